"""Attention over slot-indexed KV in plain torch: trees, single tokens, chunks of a prompt.

The CPU path's core and the oracle of the GPU kernels. Grouped-query heads are never copied: for few
query rows the group is folded into the rows, for many the KV is expanded with stride 0.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# Query rows that share one mask when a prompt is attended chunk by chunk.
CHUNK_ROWS = 256


def tree_visibility(
    mask: torch.Tensor, length: torch.Tensor, columns: int, window: int | None = None
) -> torch.Tensor:
    """Which KV positions each tree node sees: all committed ones, its ancestors, itself.

    mask [bs, N, N] bool as in PackedTree, length [bs] committed positions; node j stands at
    position length + j of the KV, `columns` >= length + N. A window of w hides what lies more than
    w positions before the node, by depth for other nodes. Returns [bs, N, columns] bool.
    """
    bs, width, _ = mask.shape
    column = torch.arange(columns, device=mask.device)
    committed = (column < length[:, None]).unsqueeze(1).expand(bs, width, columns)
    node = column - length[:, None]
    is_node = (node >= 0) & (node < width)
    at = node.clamp(0, width - 1).unsqueeze(1).expand(bs, width, columns)
    visible = committed | (mask.gather(2, at) & is_node.unsqueeze(1))
    if window is None:
        return visible
    depth = mask.sum(2) - 1
    position = torch.where(
        is_node, length[:, None] + depth.gather(1, node.clamp(0, width - 1)), column
    )
    query = length[:, None] + depth
    return visible & (position.unsqueeze(1) >= query.unsqueeze(2) - window)


def as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf where not, in the queries' dtype."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))


def gather(cache: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Rows of a KV cache [slots, HK, D] at slot [bs, S] -> [bs, S, HK, D]."""
    # Several times faster than cache[slot] on a CPU.
    rows = cache.flatten(1).index_select(0, slot.flatten())
    return rows.view(*slot.shape, *cache.shape[1:])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of few query rows a request over gathered KV.

    query [bs, N, H, D], key [bs, S, HK, D], value [bs, S, HK, Dv], bias [bs, N, S] additive or
    None where every row sees everything; H a multiple of HK. Returns [bs, N, H, Dv].
    """
    bs, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    folded = query.view(bs, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(bs, kv_heads, group * rows, dim)
    if bias is not None:
        bias = bias.unsqueeze(1).repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(
        folded,
        key.to(query.dtype).transpose(1, 2),
        value.to(query.dtype).transpose(1, 2),
        attn_mask=bias,
        scale=scale,
    )
    out = out.view(bs, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(bs, rows, heads, -1)


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last n positions of one request over all of them.

    query [n, H, D], key [S, HK, D], value [S, HK, Dv] with S >= n; a window of w hides what lies
    more than w positions back. Returns [n, H, Dv].
    """
    rows, heads, dim = query.shape
    total, kv_heads = key.shape[:2]
    group = heads // kv_heads
    # [G, HK, n, D]: the group is a batch dimension, over which the KV repeats without a copy.
    grouped = query.view(rows, kv_heads, group, dim).permute(2, 1, 0, 3)
    keys, values = (
        part.to(query.dtype).transpose(0, 1).expand(group, kv_heads, total, -1)
        for part in (key, value)
    )
    if rows == total and window is None:
        out = scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        return out.permute(2, 1, 0, 3).reshape(rows, heads, -1)

    prefix = total - rows
    chunks = []
    for start in range(0, rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, rows)
        seen = prefix + stop
        position = torch.arange(prefix + start, seen, device=query.device).unsqueeze(1)
        column = torch.arange(seen, device=query.device)
        visible = column <= position
        if window is not None:
            visible &= column >= position - window
        chunks.append(
            scaled_dot_product_attention(
                grouped[:, :, start:stop],
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=as_bias(visible, query.dtype),
                scale=scale,
            )
        )
    return torch.cat(chunks, dim=2).permute(2, 1, 0, 3).reshape(rows, heads, -1)
