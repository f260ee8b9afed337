"""Attention of many blocks at once: each sees the context before its anchor, and itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    anchor: torch.Tensor,
) -> torch.Tensor:
    """Attend from the blocks of a batch of texts.

    query [B, A, S, heads, d]; key, value [B, A, S, kv_heads, d]: the blocks' own rows, rotated;
    context_key, context_value [B, T, kv_heads, d]; anchor [B, A]: a block sees context < anchor.
    Gives [B, A, S, heads, d]. Scale 1/sqrt(d).

    Neighbouring blocks are computed in groups that share one copy of the context under a dense
    mask. A group's own rows are about half as many as the context's: so masked work adds half,
    and the copies stay at three times the blocks' own rows however long the texts are.
    """
    # Norms of queries and keys have float32 weights under autocast: copies would be twice as large.
    query, key, context_key = (x.to(value.dtype) for x in (query, key, context_key))
    texts, blocks, rows, heads, size = query.shape
    length, kv_heads = context_key.shape[1:3]
    together = min(blocks, max(1, -(-length // (2 * rows))))
    groups = -(-blocks // together)
    spare = groups * together - blocks
    anchor = F.pad(anchor, (0, spare)).view(texts * groups, together)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        """[B, A, S, h, d] -> [B * groups, h, together * S, d]."""
        x = F.pad(x, (0, 0) * 3 + (0, spare))
        return x.reshape(texts * groups, together * rows, *x.shape[3:]).transpose(1, 2)

    def with_context(context: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        context = context.transpose(1, 2).repeat_interleave(groups, dim=0)
        return torch.cat([context, grouped(own)], dim=2)

    seen = torch.arange(length, device=anchor.device) < anchor[..., None]  # [N, together, T]
    own = torch.eye(together, dtype=torch.bool, device=anchor.device)
    own = own.repeat_interleave(rows, dim=1).expand(len(anchor), -1, -1)
    mask = torch.cat([seen, own], dim=2).repeat_interleave(rows, dim=1)  # [N, together * S, keys]

    # Query heads that share a KV head become rows of it: no kernel needs to know of groups.
    share = heads // kv_heads
    queries = grouped(query).unflatten(1, (kv_heads, share)).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        queries,
        with_context(context_key, key),
        with_context(context_value, value),
        attn_mask=mask.repeat(1, share, 1)[:, None],
    )
    out = out.unflatten(2, (share, together * rows)).flatten(1, 2).transpose(1, 2)
    return out.reshape(texts, groups * together, rows, heads, size)[:, :blocks]
