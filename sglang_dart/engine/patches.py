"""Each hook on upstream, why it is there, and when it can go."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec

from sglang_dart import cpu_host
from sglang_dart.engine.algorithm import find, is_ours

Hook = tuple[str, Callable[..., Any], HookType]


def install() -> None:
    """Register every hook; SGLang applies them once all plug-ins have run."""
    hooks = HOOKS
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from sglang_dart.engine import cpu_attention

        cpu_attention.register()
        hooks += CPU_HOOKS
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


def _row_headroom(original: Callable[[], int]) -> int:
    """A row of the slot table must hold the slots reserved beyond the context length.

    0.5.23 widens the rows at page size 1 for its own algorithms only; without this a wide tree
    near the context limit writes into the next request's row. Goes when upstream sizes the row
    from the reserve for every algorithm.
    """
    extra = original()
    if not is_ours(get_spec().speculative_algorithm):
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() + 4)


def _cell_size(size: int, configurator: Any, kvc: Any, num_layers: int) -> int | None:
    """Draft KV lies beside the target's, slot by slot, and is paid from the same memory.

    Goes when a custom algorithm can declare bytes per token.
    """
    if not is_ours(get_spec().speculative_algorithm) or kvc.is_draft_worker:
        return None
    return size + kvc.spec_algorithm.draft_bytes_per_slot


def _prefix_cache(original: Callable[..., None], *args: Any, **fields: Any) -> None:
    """Share a slot only between requests that go on with the same token.

    A drafter may make its row from a token and the one after it. Then the last token of a shared
    prefix is read anew, as 0.5.23 does for its own EAGLE. Goes when a custom algorithm can ask for
    bigram keys.
    """
    name = get_spec().speculative_algorithm
    if is_ours(name) and find(name).keys_are_bigrams:
        fields["is_eagle"] = True
    original(*args, **fields)


def _sample(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Sample our trees as plain decoding samples, where upstream's kernels would not.

    0.5.23 is greedy on a CPU, drops min_p, and penalises all nodes as the root. Other algorithms'
    trees stay with upstream. Goes when upstream's sampling of trees is exact.
    """
    return _tree_sampler().sample(original, *args, **options)


def _batch_invariant(original: Callable[..., None], runner: Any) -> None:
    """--enable-deterministic-inference without a GPU: seeds hold, kernels stay as they are.

    0.5.23 has batch-invariant kernels for accelerators only, and raises without one. Goes when it
    honours seeds there.
    """
    if runner.device != "cpu":
        original(runner)


def _pack_weights(_: None, runner: Any) -> None:
    """Verify steps multiply few rows, for which torch's float32 products are slow on a CPU.

    Goes when SGLang packs weights on CPUs without AMX.
    """
    from sglang_dart.engine import cpu_linear

    if runner.device == "cpu" and not cpu_host.has_cpu_kernels():
        cpu_linear.pack(runner.model)


def _repack_weights(_: Any, updater: Any, *__: Any, **___: Any) -> None:
    """Goes with `_pack_weights`."""
    from sglang_dart.engine import cpu_linear

    cpu_linear.forget(updater.get_model())


@functools.cache
def _tree_sampler() -> Any:
    from sglang_dart.engine.sampling import TreeSampler

    return TreeSampler()


def _request_metrics(_: None, manager: Any, meta_info: dict[str, Any], *__: Any) -> None:
    """Accept length and rate of a request, within what is possible.

    0.5.23 counts the token of the prefill as if a verify step had made it, and divides the
    accepted drafts by the width of the tree, of which only one path can be accepted. Ours: tokens
    after the first, a verify step; and accepted drafts over the deepest possible path.
    """
    spec = get_spec()
    if not is_ours(spec.speculative_algorithm) or "spec_verify_ct" not in meta_info:
        return
    rounds = meta_info["spec_verify_ct"]
    drafted = max(meta_info["completion_tokens"] - 1 - rounds, 0)
    meta_info["spec_accept_length"] = 1 + drafted / rounds
    meta_info["spec_accept_rate"] = drafted / (rounds * spec.speculative_num_steps)


_SRT = "sglang.srt."
_MEMORY = f"{_SRT}mem_cache."
_RUNNER = f"{_SRT}model_executor.model_runner.ModelRunner."
_UPDATER = f"{_SRT}model_executor.model_runner_components.weight_updater.WeightUpdater."

HOOKS: tuple[Hook, ...] = (
    (
        f"{_MEMORY}allocation_sizing.get_req_to_token_extra_context_len",
        _row_headroom,
        HookType.AROUND,
    ),
    (
        f"{_SRT}model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        _cell_size,
        HookType.AFTER,
    ),
    (
        f"{_MEMORY}cache_init_params.CacheInitParams.__init__",
        _prefix_cache,
        HookType.AROUND,
    ),
    (f"{_SRT}speculative.eagle_worker_common.eagle_sample", _sample, HookType.AROUND),
    (
        f"{_SRT}managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        _request_metrics,
        HookType.AFTER,
    ),
)

# Without a GPU.
CPU_HOOKS: tuple[Hook, ...] = (
    (f"{_RUNNER}maybe_enable_batch_invariant_mode", _batch_invariant, HookType.AROUND),
    (f"{_RUNNER}load_model", _pack_weights, HookType.AFTER),
    (f"{_UPDATER}update_weights_from_disk", _repack_weights, HookType.AFTER),
    (f"{_UPDATER}load_weights_from_distributed", _repack_weights, HookType.AFTER),
    (f"{_UPDATER}update_weights_from_tensor", _repack_weights, HookType.AFTER),
    (f"{_UPDATER}update_weights_from_ipc", _repack_weights, HookType.AFTER),
    (f"{_UPDATER}end_weight_update", _repack_weights, HookType.AFTER),
)
