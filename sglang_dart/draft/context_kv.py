"""Draft KV of verified rows, indexed by the target's KV slot: append and attend."""

from __future__ import annotations

import torch

from sglang_dart.verify import attention

# Context rows that a CPU gathers at once: larger buffers are mapped anew each time. CPU time, one
# thread of an EPYC, 8 KV heads of 128 in float32, 8 requests of 500 rows: 25 to 73 ms all at once,
# 19 to 25 ms in groups of 2; 8 of 2000: 166 to 221 ms at once, 102 to 110 ms one by one.
CPU_CONTEXT_ROWS = 1024


class ContextKV:
    """Keys (rotated) and values of every verified row, one place per layer and target slot.

    key, value [layers, slots, kv_heads, head_dim]. Slot 0 is a dummy and stays zero.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, slots, kv_heads, head_dim)
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)

    def append(
        self, layer: int, slot: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write rows at their slots, without a host synchronisation.

        slot [R] int64; key, value [R, kv_heads, head_dim]. Rows with slot 0 are dropped.
        """
        # Padding rows may hold NaN, which a mask does not stop (0 * NaN): keep slot 0 zero.
        padding = (slot == 0)[:, None, None]
        self.key[layer].index_copy_(0, slot, key.masked_fill(padding, 0))
        self.value[layer].index_copy_(0, slot, value.masked_fill(padding, 0))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: torch.Tensor,
        slot_table: torch.Tensor,
        length: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from a block of rows to their request's context and to the block itself.

        query [bs, Q, heads, head_dim]; key, value [bs, Q, kv_heads, head_dim], the block's own;
        block_mask [Q, Q] bool, True where row i sees row j, never an empty row;
        slot_table [bs, W]: slot of context position j, valid for j < length[i]; length [bs].
        Gives [bs, Q, heads, head_dim]. Scale 1/sqrt(head_dim), softmax in float32.
        """
        if slot_table.is_cuda:
            # Triton is slow to import, and hosts without a GPU may lack it.
            from sglang_dart.kernels.block_attention import block_attention

            context = self.key[layer], self.value[layer]
            return block_attention(query, key, value, block_mask, *context, slot_table, length)
        # Reading a length costs nothing on a CPU, and saves the columns that nobody uses.
        longest = max(1, int(length.max()))
        parts = (query, key, value, slot_table[:, :longest], length)
        step = max(1, CPU_CONTEXT_ROWS // longest)
        return torch.cat(
            [
                self.attend_plain(layer, q, k, v, block_mask, slots, seen)
                for q, k, v, slots, seen in zip(*(x.split(step) for x in parts), strict=True)
            ]
        )

    def attend_plain(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: torch.Tensor,
        slot_table: torch.Tensor,
        length: torch.Tensor,
    ) -> torch.Tensor:
        """The same in plain torch: it gathers the KV of all W columns."""
        bs, rows = query.shape[:2]
        width = slot_table.shape[1]
        seen = torch.arange(width, device=length.device) < length[:, None]  # [bs, W]
        slot = torch.where(seen, slot_table, 0)
        mask = torch.cat(
            [seen[:, None].expand(bs, rows, width), block_mask.expand(bs, rows, rows)], dim=2
        )
        return attention.attend(
            query,
            torch.cat([attention.gather(self.key[layer], slot), key], dim=1),
            torch.cat([attention.gather(self.value[layer], slot), value], dim=1),
            attention.as_bias(mask, query.dtype),
        )


class ContextKVHolder:
    """The part of a drafter that owns its draft KV, which is made once the engine knows its slots.

    `_dtype` and `_device` are those of the drafter's weights.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, *, like: torch.Tensor) -> None:
        """`like`: a weight of the drafter, whose dtype and device the KV gets."""
        self._dtype, self._device = like.dtype, like.device
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._kv: ContextKV | None = None

    def kv_bytes_per_slot(self) -> int:
        """Bytes of draft KV for one token."""
        return 2 * self._layers * self._kv_heads * self._head_dim * self._dtype.itemsize

    def allocate(self, slots: int) -> None:
        """Make draft KV for slots 0 .. slots - 1; slot 0 is a dummy."""
        self._kv = ContextKV(
            self._layers,
            slots,
            self._kv_heads,
            self._head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def kv(self) -> ContextKV:
        """The draft KV. Raises RuntimeError before `allocate`."""
        if self._kv is None:
            raise RuntimeError(
                f"{type(self).__name__}: call allocate(slots) before append or draft"
            )
        return self._kv
