"""Steps of SGLang's argument resolution that we wrap: they come before its call-backs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from sglang_dart import cpu_host
from sglang_dart.algorithms import load_method
from sglang_dart.engine.algorithm import is_ours

logger = logging.getLogger(__name__)

Step = Callable[[Any], None]

# KV pool without a GPU unless a context is longer: eight requests of 4096 tokens.
CPU_POOL_TOKENS = 32768


def install() -> None:
    """Wrap the steps. Called once a process."""
    register_resolution_hook("handle_cpu_backends")(_cpu_defaults)
    register_resolution_hook("handle_model_specific_adjustments")(_target)
    register_resolution_hook("handle_attention_backend_compatibility")(_attention_backend)
    register_resolution_hook("handle_speculative_decoding")(_drafter_config)


def _cpu_defaults(server_args: Any, previous: Step) -> None:
    """Defaults of a host without a GPU, for plain decoding as well.

    Without fast bfloat16 kernels `--dtype auto` means float32. Without SGLang's compiled operators
    the AMX back-end cannot run; SGLang falls back from it, but only after other steps have read it.
    """
    args = resolving_view(server_args)
    if args.device == "cpu" and args.attention_backend is None and not cpu_host.has_cpu_kernels():
        declare_resolution(server_args, "sglang_dart", attention_backend="torch_native")
    previous(server_args)
    if args.device != "cpu":
        return
    if args.dtype == "auto" and cpu_host.preferred_dtype() != "bfloat16":
        declare_resolution(server_args, "sglang_dart", dtype=cpu_host.preferred_dtype())
    logger.info("sglang-dart: %s", cpu_host.describe())


def _target(server_args: Any, previous: Step) -> None:
    """Refuse targets whose verification would go wrong without a word, before SGLang adjusts.

    Without a GPU also bound the KV pool, for plain decoding as well: SGLang would take three
    quarters of the memory that is free, which on a CPU is everybody's.
    """
    args = resolving_view(server_args)
    if is_ours(args.speculative_algorithm):
        _refuse_target(args.speculative_algorithm, model_config_of(server_args))
    # The record itself holds what the user gave; SGLang has settled the fraction already.
    given = args.max_total_tokens or server_args.mem_fraction_static
    if args.device == "cpu" and given is None:
        tokens = max(CPU_POOL_TOKENS, model_config_of(server_args).context_len)
        declare_resolution(server_args, "sglang_dart", max_total_tokens=tokens)
        logger.info(
            "sglang-dart: a KV pool of %d tokens at most; --max-total-tokens or "
            "--mem-fraction-static choose another",
            tokens,
        )
    previous(server_args)


def _refuse_target(name: str | None, target: Any) -> None:
    kind = target.hf_config.architectures[0]
    if mambaish_config(target) is not None:
        raise ValueError(
            f"{name}: target {kind} has recurrent layers, whose state would keep rejected drafts; "
            "serve it without --speculative-algorithm"
        )
    if target.attention_arch == AttentionArch.MLA:
        raise ValueError(
            f"{name}: target {kind} has latent attention (MLA), whose back-ends verify no trees; "
            "serve it without --speculative-algorithm"
        )


def _attention_backend(server_args: Any, previous: Step) -> None:
    """FlashInfer is the default on a GPU; SGLang's own choice may be one without tree masks."""
    args = resolving_view(server_args)
    chosen = (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    )
    if is_ours(args.speculative_algorithm) and args.device == "cuda" and not any(chosen):
        declare_resolution(server_args, "sglang_dart", attention_backend="flashinfer")
    previous(server_args)


def _drafter_config(server_args: Any, previous: Step) -> None:
    """Hold the drafter's config.json against the target's before any weight is loaded.

    Also before SGLang reads it, whose error would not name the field.
    """
    args = resolving_view(server_args)
    if is_ours(args.speculative_algorithm):
        method = load_method(
            args.speculative_algorithm,
            args.speculative_draft_model_path,
            args.speculative_draft_model_revision,
        )
        target = model_config_of(server_args)
        method.check_target(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            layers=target.num_hidden_layers,
        )
    previous(server_args)
