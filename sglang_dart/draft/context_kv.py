"""Draft KV of verified rows, indexed by the target's KV slot: append and attend."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Impl = Literal["auto", "torch"]


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
        impl: Impl = "auto",
    ) -> torch.Tensor:
        """Attend from a block of rows to their request's context and to the block itself.

        query [bs, Q, heads, head_dim]; key, value [bs, Q, kv_heads, head_dim], the block's own;
        block_mask [Q, Q] bool, True where row i sees row j, never an empty row;
        slot_table [bs, W]: slot of context position j, valid for j < length[i]; length [bs].
        Gives [bs, Q, heads, head_dim]. Scale 1/sqrt(head_dim), softmax in float32.
        """
        if not slot_table.is_cuda:
            # On a CPU reading a length costs nothing and saves the columns nobody uses.
            slot_table = slot_table[:, : max(int(length.max()), 0)]
        width = slot_table.shape[1]
        seen = torch.arange(width, device=length.device) < length[:, None]  # [bs, W]
        slot = torch.where(seen, slot_table, 0)
        bs, rows, heads, head_dim = query.shape
        kv_heads = key.shape[2]
        group = heads // kv_heads

        keys = torch.cat([self.key[layer][slot], key], dim=1).transpose(1, 2)
        values = torch.cat([self.value[layer][slot], value], dim=1).transpose(1, 2)
        mask = torch.cat(
            [seen[:, None, :].expand(bs, rows, width), block_mask.expand(bs, rows, rows)], dim=2
        )
        # The query heads that share a KV head become rows of it: no repeated keys.
        folded = query.view(bs, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            folded.reshape(bs, kv_heads, group * rows, head_dim),
            keys,
            values,
            attn_mask=mask.repeat(1, group, 1)[:, None],
        )
        out = out.view(bs, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(bs, rows, heads, head_dim)
