"""Server arguments of our algorithms: what is refused, and what the user may leave open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_dart.algorithms import Method, load_method

logger = logging.getLogger(__name__)

GPU_BACKENDS = ("flashinfer", "triton", "fa3")
CPU_BACKENDS = ("torch_native",)

# Field, whether its value is refused, why, and the way out.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tp_size", lambda v: v > 1, "tensor parallelism is not supported yet; use 1"),
    ("pp_size", lambda v: v > 1, "pipeline parallelism is not supported; use 1"),
    ("dcp_size", lambda v: v > 1, "context parallelism is not supported; use 1"),
    ("enable_prefill_cp", bool, "context parallelism is not supported; drop it"),
    (
        "disaggregation_mode",
        lambda v: v != "null",
        "prefill and decode must run in one server; drop it",
    ),
    (
        "tokenizer_worker_num",
        lambda v: v > 1,
        "SGLang loads no plug-ins in extra tokenizer workers; use 1",
    ),
    ("enable_dp_attention", bool, "data-parallel attention is not supported; drop it"),
    ("enable_two_batch_overlap", bool, "two-batch overlap is not supported; drop it"),
    ("enable_pdmux", bool, "prefill-decode multiplexing is not supported; drop it"),
    (
        "enable_hierarchical_cache",
        bool,
        "the host cache does not keep draft KV, so reloaded prompts would draft badly; drop it",
    ),
    ("enable_unified_memory", bool, "the unified memory pool moves slots; drop it"),
    ("enable_hisparse", bool, "sparse KV is not supported; drop it"),
    ("enable_unified_cache_external_linker", bool, "external caches are not supported; drop it"),
    ("enable_lora", bool, "adapters are not supported; drop it"),
    ("lora_paths", bool, "adapters are not supported; drop it"),
    (
        "is_embedding",
        bool,
        "an embedding model decodes nothing; drop --speculative-algorithm",
    ),
    ("dllm_algorithm", bool, "diffusion language models decode by themselves; drop it"),
    (
        "enable_return_hidden_states",
        bool,
        "the hidden states of a verify step are the drafter's taps, not the last layer's; drop it",
    ),
    ("enable_watermark", bool, "watermarking is not supported; drop it"),
    ("speculative_adaptive", bool, "the tree's width is chosen by us; drop it"),
    ("speculative_use_rejection_sampling", bool, "verification is lossless already; drop it"),
    ("speculative_use_block_verification", bool, "verification is lossless already; drop it"),
    ("speculative_accept_threshold_single", lambda v: v < 1, "would change the answers; use 1.0"),
    ("speculative_accept_threshold_acc", lambda v: v < 1, "would change the answers; use 1.0"),
    ("speculative_token_map", bool, "the drafter brings its own vocabulary; drop it"),
)


def flag(field: str) -> str:
    """`pp_size` -> `--pp-size`."""
    return "--" + field.replace("_", "-")


def refuse_unsupported(args: Any) -> None:
    """Raise ValueError, one line that names the flag, for what cannot be served rightly."""
    for field, refused, reason in _REFUSED:
        value = getattr(args, field, None)
        if value is not None and refused(value):
            raise ValueError(f"{args.speculative_algorithm}: {flag(field)}={value}: {reason}")
    if args.device == "cpu":
        _refuse_backends(args, CPU_BACKENDS)
        if args.enable_torch_compile:
            raise ValueError(
                f"{args.speculative_algorithm}: --enable-torch-compile: not supported without a "
                "GPU; drop it"
            )
    elif args.device == "cuda":
        _refuse_backends(args, GPU_BACKENDS)
    else:
        raise ValueError(
            f"{args.speculative_algorithm}: --device={args.device}: serves on cuda and cpu only"
        )


def _refuse_backends(args: Any, allowed: tuple[str, ...]) -> None:
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    for field in fields:
        value = getattr(args, field)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{args.speculative_algorithm}: {flag(field)}={value}: cannot verify trees on "
                f"{args.device}; use one of {', '.join(allowed)}"
            )


def fill_defaults(name: str, args: Any) -> None:
    """Set what the user left open, and check the numbers against each other.

    num_steps is the deepest drafted level L, num_draft_tokens the rows N of a verify step with
    the root, eagle_topk 1 for a chain and more for a tree.
    Raises ValueError naming the flag, the value and the range.
    """
    method = load_method(
        name, args.speculative_draft_model_path, args.speculative_draft_model_revision
    )
    _fill_shape(method, args)
    args.enable_mixed_chunk = False
    if args.device == "cpu":
        # SGLang has no overlapped decode without a GPU.
        args.disable_overlap_schedule = True
        args.disable_cuda_graph = True


def _fill_shape(method: Method, args: Any) -> None:
    levels = args.speculative_num_steps
    if levels is None:
        levels = method.levels
    if not 1 <= levels <= method.levels:
        raise ValueError(
            f"--speculative-num-steps={levels}: this drafter drafts 1 to {method.levels} levels"
        )
    branching = args.speculative_eagle_topk
    if branching is not None and branching < 1:
        raise ValueError(
            f"--speculative-eagle-topk={branching}: must be 1 (a chain) or more (a tree)"
        )
    if method.chain and branching not in (None, 1):
        raise ValueError(
            f"--speculative-eagle-topk={branching}: the variant is chain, which is 1; drop the flag"
        )
    chain = method.chain or branching == 1
    budget = method.options.budget
    width = args.speculative_num_draft_tokens
    if width is None:
        width = levels + 1 if chain else max(method.default_width(args.device), levels + 1)
    if not levels + 1 <= width <= MAX_WIDTH:
        raise ValueError(
            f"--speculative-num-draft-tokens={width}: must be {levels + 1} to {MAX_WIDTH}, at "
            f"least --speculative-num-steps + 1"
        )
    if budget is not None and width != budget + 1:
        raise ValueError(
            f"budget {budget} needs --speculative-num-draft-tokens {budget + 1}, got {width}; "
            "give only one of the two"
        )
    if chain and width != levels + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens={width}: a chain (--speculative-eagle-topk 1) of "
            f"{levels} steps has {levels + 1}; set that, or raise --speculative-eagle-topk"
        )
    args.speculative_num_steps = levels
    args.speculative_num_draft_tokens = width
    # Only a marker, "this is a tree": the true branching is the recipe's. Kept small because
    # SGLang reserves max(steps * topk, width) slots a request.
    args.speculative_eagle_topk = 1 if chain else 2
    if not chain and width < 2 * levels:
        logger.info("a tree of %d rows is narrower than two chains of %d levels", width, levels)


MAX_WIDTH = 1024
