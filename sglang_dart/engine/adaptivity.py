"""Whether the rounds of a server choose their width."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

from sglang_dart.options import TreeOptions


def why_constant(options: TreeOptions, device: str, server_args: Any) -> str | None:
    """Why no round may choose its width; None if every round does."""
    if not options.adaptive:
        return '"adaptive" is false'
    if device == "cpu" and options.cpu_rows:
        return f'"cpu_rows" is {options.cpu_rows}'
    if server_args.enable_deterministic_inference:
        return "the arithmetic of a row must not depend on how fast the last rounds were"
    if server_args.tp_size > 1:
        return "ranks measure different times, and would part"
    if SIMULATE_ACC_LEN > 1:
        return "SGLANG_SIMULATE_ACC_LEN says what is accepted, whatever the width"
    if device != "cpu" and check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return "there are no CUDA graphs"
    return None
