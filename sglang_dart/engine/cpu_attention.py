"""Attention backend that verifies trees without a GPU.

Takes the place of `torch_native` under the same name, because SGLang 0.5.23 compares with that
literal: to turn graphs off, to choose allocators without Triton, to fall back from AMX. Plain
decoding and prefill gain as well, so that it stays a fair baseline for speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.arg_groups.choices import (
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
)
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_dart.verify.attention import (
    as_bias,
    attend,
    attend_chunk,
    gather,
    tree_visibility,
)

NAME = "torch_native"

# Gathered key bytes up to which a padded batch beats one request after the other.
# Measured with one thread on an EPYC with AVX2, float32, 8 requests of 8 rows, per layer:
# 3 KV heads x 64, 128 tokens (0.8 MB) 0.73 against 1.04 ms; 8 x 128, 1024 tokens (34 MB) 159
# against 78 ms.
PADDED_BATCH_BYTES = 4 * 2**20


def register() -> None:
    """Make SGLang use this backend where it says `torch_native`. Called once a process.

    Also admits it to --enable-deterministic-inference, the mode in which SGLang honours seeds.
    """
    register_attention_backend(NAME)(TorchNativeTreeBackend)
    for choices in (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in choices:
            choices.append(NAME)


@dataclass
class FewRows:
    """Requests with equally many query rows each: a decode step, or a verify step.

    tree  [bs, N, N] bool: which nodes each node sees.
    table [bs, S] int64: KV slots; beyond a request's own they repeat its last one.
    total [bs] int64: positions with the nodes.
    """

    tree: torch.Tensor
    table: torch.Tensor
    total: torch.Tensor
    _bias: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [bs, N, S], made by the first layer that asks; None if all is seen."""
        key = window, dtype
        if key not in self._bias:
            rows = self.tree.shape[1]
            visible = tree_visibility(self.tree, self.total - rows, self.table.shape[1], window)
            self._bias[key] = None if visible.all() else as_bias(visible, dtype)
        return self._bias[key]

    def part(self, request: int) -> FewRows:
        """The plan of one request alone, without padding."""
        one = slice(request, request + 1)
        columns = int(self.total[request])
        return FewRows(self.tree[one], self.table[one, :columns], self.total[one])


class TorchNativeTreeBackend(TorchNativeAttnBackend):
    """`torch_native` with tree verification, folded query groups and cheaper prompt chunks."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        if self.use_sliding_window_kv_pool and not model_runner.spec_algorithm.is_none():
            raise ValueError(
                "this target keeps sliding-window KV in a pool of its own, where trees cannot be "
                "verified without a GPU; add --disable-hybrid-swa-memory"
            )
        self._few_rows: FewRows | None = None
        self._parts: list[FewRows] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build what all layers of one forward share."""
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        self._few_rows, self._parts = None, []
        if mode.is_target_verify():
            spec = forward_batch.spec_info
            width = spec.draft_token_num
            tree = spec.custom_mask.view(-1, width, width).bool()
        elif mode.is_decode():
            tree = torch.ones(forward_batch.batch_size, 1, 1, dtype=torch.bool)
        else:
            return
        # In a verify step SGLang's lengths do not count the nodes; in a decode step they do.
        nodes = tree.shape[1] if mode.is_target_verify() else 0
        self._few_rows = self._plan(forward_batch, tree, forward_batch.seq_lens + nodes)

    def _plan(self, forward_batch: Any, tree: torch.Tensor, total: torch.Tensor) -> FewRows:
        columns = torch.arange(int(total.max()))
        own = torch.minimum(columns, total.unsqueeze(1) - 1)
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        return FewRows(tree, rows.gather(1, own).long(), total)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor | None,
        extend_seq_lens: torch.Tensor | None,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """A verify step, or chunks of prompts. query, output [tokens, H, D]."""
        caches = k_cache, v_cache
        if self._few_rows is not None:
            return self._attend_few(self._few_rows, query, output, *caches, options)
        lengths = seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens
        if encoder_lens is not None or not options["causal"] or self.use_sliding_window_kv_pool:
            return super()._run_sdpa_forward_extend(
                query, output, *caches, req_to_token, req_pool_indices, *lengths, **options
            )
        assert extend_seq_lens is not None, "only a verify step comes without extend lengths"
        start = 0
        requests = zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        )
        for row, total, count in requests:
            slot = req_to_token[row, :total].unsqueeze(0)
            output[start : start + count] = attend_chunk(
                query[start : start + count],
                gather(k_cache, slot)[0],
                gather(v_cache, slot)[0],
                options["scaling"],
                options["sliding_window_size"],
            )
            start += count
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """A decode step. query, output [bs, H, D]."""
        caches = k_cache, v_cache
        if encoder_lens is not None or self.use_sliding_window_kv_pool:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                *caches,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                **options,
            )
        assert self._few_rows is not None, "init_forward_metadata comes before every forward"
        return self._attend_few(self._few_rows, query, output, *caches, options)

    def _attend_few(
        self,
        plan: FewRows,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        requests, columns = plan.table.shape
        key_bytes = requests * columns * k_cache[0].numel() * k_cache.element_size()
        if requests == 1 or key_bytes <= PADDED_BATCH_BYTES:
            plans = [plan]
        else:
            self._parts = self._parts or [plan.part(request) for request in range(requests)]
            plans = self._parts
        rows = query.view(requests, plan.tree.shape[1], *query.shape[1:])
        out = output.view(requests, plan.tree.shape[1], *output.shape[1:])
        start = 0
        for part in plans:
            stop = start + part.table.shape[0]
            out[start:stop] = attend(
                rows[start:stop],
                gather(k_cache, part.table),
                gather(v_cache, part.table),
                part.bias(options["sliding_window_size"], query.dtype),
                options["scaling"],
            )
            start = stop
        return output
