"""CUDA-graph capture of the tree-masked verify, for one width of trees or several."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sglang_dart.engine.mark import DeviceMark
from sglang_dart.engine.memory import mib, room_for
from sglang_dart.engine.verifier import RootVerifyInput, branching_of

logger = logging.getLogger(__name__)

# Rows of one step, all requests together, up to which trees are captured where their width follows
# the load. A GPU multiplies some 200 rows while it reads a weight (H200, bfloat16: 790 TFLOP/s and
# 4.3 TB/s); from there on every row costs, and far beyond it no tree pays.
MOST_ROWS = 512
# Captured batch sizes of trees grow by this factor at least; SGLang's own list is closer.
SIZE_STEP = 1.3
# Timed replays of each graph; the fastest counts.
REPLAYS = 3


class TreeGraphRunner(DecodeCudaGraphRunner):
    """Captures the target's verify with the tree mask and with taps.

    Without a spec input of its own SGLang would capture a custom algorithm mask-less, and the
    replay would silently ignore the tree.
    """

    def get_spec_info(self, num_tokens: int) -> EagleVerifyInput:
        """The verify input to capture with; shapes only, the pointers come at replay."""
        root_only = self.speculative_num_draft_tokens == 1
        return (RootVerifyInput if root_only else EagleVerifyInput)(
            draft_token=None,
            custom_mask=None if root_only else self.buffers.custom_mask,
            positions=None,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=self.speculative_num_steps,
            topk=get_spec().speculative_eagle_topk,
            draft_token_num=self.speculative_num_draft_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )


class LadderGraphRunner(TreeGraphRunner):
    """One of several widths: captures the batch sizes where it may pay, and times each graph.

    seconds: of one replay, by captured batch size. The contexts are empty, as they are at capture.
    """

    def __init__(self, model_runner: Any, **shape: Any) -> None:
        self.seconds: dict[int, float] = {}
        graph = get_exec().graph
        config = graph.cuda_graph_config
        width = shape.get("speculative_num_draft_tokens", get_spec().speculative_num_draft_tokens)
        sizes = captured_sizes(sorted(config.decode.bs), width)
        with graph.override(cuda_graph_config=with_phase(config, Phase.DECODE, bs=sizes)):
            super().__init__(model_runner, **shape)

    def capture(self) -> None:
        """Capture all sizes; SGLang calls it once."""
        with _room(self.speculative_num_draft_tokens):
            super().capture()

    def capture_one_shape(self, size: int, forward: Callable[..., Any], *variant: Any) -> None:
        """Capture a batch size, and time it while its metadata is in place."""
        super().capture_one_shape(size, forward, *variant)
        key = self._make_graph_key(size, *variant)
        self.seconds[size] = _replay_seconds(lambda: self.backend.replay(key, None))

    def fits(self, requests: int) -> bool:
        """Whether a graph takes so many requests."""
        return requests in self.capture_bs if self.disable_padding else requests <= self.max_bs


class VerifyGraphs:
    """The target's verify at several widths, each with graphs and an attention back-end of its own.

    A back-end holds the metadata, the mask and the kernels of one width, so a step of another width
    takes another back-end, graph or no graph. SGLang's adaptive EAGLE does the same (0.5.23:
    SpecRuntimeState). They share the workspace, since steps follow each other on one stream.
    """

    def __init__(self, runner: Any, widths: Sequence[int]) -> None:
        """`widths`: ascending; the last is the one that SGLang itself prepares."""
        self.widths = tuple(widths)
        self._runner = runner
        self._widest: Any = None
        # Attention back-end and graphs of each width but the last.
        self._narrow: dict[int, tuple[Any, LadderGraphRunner]] = {}
        self.gib = 0.0
        self.capture_seconds = 0.0

    def capture(self) -> None:
        """Prepare all widths. SGLang has captured the widest.

        Raises RuntimeError, one line, if the device has too little memory.
        """
        self._widest = self._runner.decode_cuda_graph_runner
        free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        # Wide ones first: the narrow ones reuse their memory.
        for width in reversed(self.widths[:-1]):
            with _room(width):
                self._narrow[width] = self._prepare(width)
        used = free - torch.cuda.mem_get_info()[0]
        self.gib, self.capture_seconds = used / 2**30, time.perf_counter() - started
        logger.info(
            "sglang-dart: verify graphs for %s rows a request, up to %s requests: %s beside the "
            "widest, %.1f s; a step of one request takes %s ms",
            "/".join(map(str, self.widths)),
            "/".join(str(self._graphs(width).max_bs) for width in self.widths),
            mib(used),
            self.capture_seconds,
            "/".join(f"{1000 * self.seconds(1, width):.2f}" for width in self.widths),
        )

    @contextmanager
    def of(self, width: int) -> Iterator[None]:
        """The target verifies trees of this width in the block."""
        if self._runner.decode_cuda_graph_runner is not self._widest:
            # SGLang has captured anew, as it may after new weights; old graphs read the old ones.
            self.capture()
        if width == self.widths[-1]:
            yield
            return
        runner = self._runner
        usual = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self._narrow[width]
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = usual

    def sizes(self) -> dict[int, list[int]]:
        """Captured batch sizes, by width of tree; a root alone is none."""
        return {width: self._graphs(width).capture_bs for width in self.widths if width > 1}

    def fits(self, requests: int, width: int) -> bool:
        """Whether a graph takes so many requests with trees of this width."""
        return self._graphs(width).fits(requests)

    def seconds(self, requests: int, width: int) -> float:
        """What such a step took at capture, without contexts; past the last size, as that one."""
        seconds = self._graphs(width).seconds
        sizes = sorted(seconds)
        return seconds[sizes[min(bisect_left(sizes, requests), len(sizes) - 1)]]

    def _graphs(self, width: int) -> LadderGraphRunner:
        if width == self.widths[-1]:
            return self._widest
        return self._narrow[width][1]

    def _prepare(self, width: int) -> tuple[Any, LadderGraphRunner]:
        spec = get_spec()
        topk = branching_of(width, spec.speculative_eagle_topk)
        # Back-ends read the width where they are made.
        with spec.override(speculative_num_draft_tokens=width, speculative_eagle_topk=topk):
            backend = self._runner._get_attention_backend()
            self._runner.kv_index_translator.bind_and_verify_backends([backend])
            graphs = LadderGraphRunner(
                self._runner,
                attn_backend=backend,
                speculative_num_steps=min(spec.speculative_num_steps, width - 1),
                speculative_num_draft_tokens=width,
            )
        return backend, graphs


def captured_sizes(sizes: Sequence[int], width: int) -> list[int]:
    """Which of SGLang's batch sizes, ascending, are captured for trees of this width.

    Plain decoding keeps all, so that it loses nothing to padding; trees fewer and smaller ones.
    """
    if width == 1:
        return list(sizes)
    most = max([size for size in sizes if size * width <= MOST_ROWS], default=sizes[0])
    kept = [sizes[0]]
    for size in sizes:
        if size <= most and (size >= SIZE_STEP * kept[-1] or size == most > kept[-1]):
            kept.append(size)
    return kept


def _room(width: int) -> Any:
    return room_for(
        f"the verify graphs of trees of {width} nodes",
        "lower --cuda-graph-max-bs-decode or --mem-fraction-static, or set "
        """SGLANG_DART_CONFIG='{"adaptive": false}' to have one width""",
    )


def _replay_seconds(replay: Callable[[], object]) -> float:
    # The first replay uploads the graph.
    replay()
    marks = [DeviceMark()]
    for _ in range(REPLAYS):
        replay()
        marks.append(DeviceMark())
    torch.cuda.synchronize()
    return min(end.seconds_since(start) for start, end in pairwise(marks))
