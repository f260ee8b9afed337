"""The target's pass over packed trees, inside SGLang."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from sglang_dart.round import Verdict
from sglang_dart.types import PackedTree


class TargetVerifier:
    """Verifies the trees of one running batch. Made anew for each round; keeps the raw result.

    `branching` is SGLang's `topk`: 1 says that every tree is a chain, whose accepted KV already
    stands in front; any other value says that it must be moved there.
    """

    def __init__(
        self,
        batch: Any,
        worker: Any,
        branching: int,
        grammar_barrier: Any,
        publish: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._batch = batch
        self._worker = worker
        self._branching = branching
        self._grammar_barrier = grammar_barrier
        self._publish = publish
        self.result: GenerationBatchResult | None = None

    def verify(self, packed: PackedTree, levels: int) -> Verdict:
        """Runs SGLang's own verify step: target forward, grammar, acceptance, KV to the front."""
        batch = self._batch
        bs, width = packed.token.shape
        batch.spec_info = self._verify_input(packed, levels)
        result = eagle_worker_common.run_eagle_verify(
            batch,
            target_worker=self._worker.target_worker,
            req_to_token_pool=self._worker.req_to_token_pool,
            token_to_kv_pool_allocator=self._worker.token_to_kv_pool_allocator,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            topk=batch.spec_info.topk,
            num_draft_tokens=width,
            device=self._worker.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
            grammar_barrier=self._grammar_barrier,
        )
        self.result = result
        if self._publish is not None:
            # As early as the new lengths exist: the scheduler prepares the next step from them.
            self._publish(result.new_seq_lens)
        columns = levels + 1
        feature = result.logits_output.hidden_states.view(bs, width, -1)[:, :columns]
        result.logits_output.hidden_states = None
        return Verdict(
            token=result.next_token_ids.view(bs, width)[:, :columns].long(),
            length=result.accept_lens,
            feature=feature,
            slot=batch.out_cache_loc.view(bs, width)[:, :columns],
        )

    def _verify_input(self, packed: PackedTree, levels: int) -> EagleVerifyInput:
        bs, width = packed.token.shape
        nodes = torch.arange(bs * width, device=packed.token.device).view(bs, width)
        # Only the back-end for a host without a GPU asks for the mask of a single row.
        unmasked = width == 1 and packed.token.is_cuda
        verify_input = (RootVerifyInput if unmasked else EagleVerifyInput)(
            draft_token=packed.token.flatten(),
            custom_mask=None if unmasked else self._mask(packed),
            positions=packed.position.flatten(),
            retrieve_index=nodes,
            retrieve_next_token=packed.first_child,
            retrieve_next_sibling=packed.next_sibling,
            retrieve_cum_len=None,
            spec_steps=levels,
            topk=branching_of(width, self._branching),
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )
        # What the sampler reads (engine/sampling.py); SGLang passes the object through to it.
        verify_input.tree = packed
        return verify_input

    def _mask(self, packed: PackedTree) -> torch.Tensor:
        """The visibility of every node, in the layout that the attention back-end reads."""
        buffer = self._worker.target_worker.model_runner.attn_backend.verify_mask
        mode = default_tree_mask_mode() if buffer is None else buffer.mode
        if mode == TreeMaskMode.QLEN_ONLY:
            return packed.mask.flatten()
        assert mode == TreeMaskMode.FULL_MASK, f"unknown tree mask layout {mode}"

        bs, width = packed.token.shape
        cells = width * (sum(length_bounds(self._batch)) + width * bs)
        if buffer is not None and buffer.fits(bs):
            flat = buffer.buffer[:cells]
            flat.fill_(True)
        else:
            flat = torch.ones(cells, dtype=torch.bool, device=packed.mask.device)
        return write_full_mask(packed.mask, self._batch.seq_lens, flat)


class RootVerifyInput(EagleVerifyInput):
    """Of roots alone. They see all that stands before them, so there is no mask to write and read.

    A step is then what plain decoding computes, where a back-end decodes with its prefill kernel.
    """

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: torch.Tensor, **layout: Any
    ) -> tuple[torch.Tensor, ...]:
        """What FlashInfer plans with: slots, their offsets, those of the rows, and no mask."""
        # 0.5.23 extends a mask that has too few cells; these are many, and take no memory.
        cell = torch.empty((), dtype=torch.bool, device=req_pool_indices.device)
        self.custom_mask = cell.expand(2**40)
        *offsets, _ = super().generate_attn_arg_prefill(req_pool_indices=req_pool_indices, **layout)
        self.custom_mask = None  # type: ignore[assignment]
        return *offsets, None


def branching_of(width: int, branching: int) -> int:
    """SGLang's `topk` for trees of this width: a root alone is a chain."""
    return 1 if width == 1 else branching


def length_bounds(batch: Any) -> list[int]:
    """An upper bound on each request's committed length, known to the host.

    With overlap the true lengths may exist on the device only; the allocated ones include them.
    """
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu.tolist()
    return [req.kv.kv_allocated_len for req in batch.reqs]


def write_full_mask(mask: torch.Tensor, length: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Write tree masks [bs, N, N] into `flat`, already True, behind each row's committed columns.

    SGLang's layout: request by request, row by row, length[i] + N columns a row. In place; returns
    `flat`. No host synchronisation.
    """
    width = mask.shape[1]
    row_size = length + width
    start = (row_size.cumsum(0) - row_size) * width
    node = torch.arange(width, device=mask.device)
    column = length[:, None, None] + node
    row = node[:, None] * row_size[:, None, None]
    # An index per cell of the tree block; the committed columns keep their True.
    at = start[:, None, None] + row + column
    flat[at.flatten()] = mask.flatten().to(flat.dtype)
    return flat
