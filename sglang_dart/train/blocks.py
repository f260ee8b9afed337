"""Which rows exist, what each sees, what each should predict: DART's shared-prefix blocks.

Prefix i of a text gives M + 1 rows: real row R_i, which knows x_0 .. x_i and the embedding of
x_{i+1}, and M mask rows. The row of level j predicts x_{i+2+j}; its teacher is the target's
distribution after x_{i+1+j}. R_i sees R_k for k <= i; the mask rows see R_k for k <= i and the
masks of their own block up to themselves. Source: arXiv 2601.19278.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F

from sglang_dart.draft.dart import DartHead
from sglang_dart.draft.layers import rotate

# Extra components per attention head; flash kernels want a multiple of 8.
_EXTRA = 8
# Closes the mask's key to real rows: exp(-1e4 / sqrt(head_dim)) is 0 for every head size in use.
_SHUT = -1e4


@dataclass(frozen=True)
class Rows:
    """The trained rows of a batch [B, T], ordered by teacher position, then by level.

    prefix   [R] int64: b * T + i.
    level    [R] int64: 0 for the real row, j for mask j.
    teacher  [R] int64: index into `position`.
    position [P] int64: b * T + t, where the target's distribution after x_t is the teacher.
    start    P + 1 integers: rows start[p] .. start[p + 1] have teacher p (kept on the host).
    """

    prefix: torch.Tensor
    level: torch.Tensor
    teacher: torch.Tensor
    position: torch.Tensor
    start: list[int]

    def to(self, device: torch.device) -> Self:
        """The same rows on `device`, copied without waiting."""

        if device.type != "cuda":
            return self
        moved: dict[str, Any] = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


def trained_rows(turn: torch.Tensor, levels: int, roots: torch.Tensor | None = None) -> Rows:
    """Choose the rows that serving would draft from; `roots` [B, T] bool: from these roots alone.

    turn [B, T] (host): k for the tokens of the k-th answer of a text (k >= 1), 0 elsewhere. A row
    is trained if its root x_{i+1}, what it predicts and all between belong to one answer, because
    drafting starts when the answer's first token is known and ends with the answer.
    """
    length = turn.shape[1]
    padded = F.pad(turn, (levels, 1))
    predicted = padded[:, levels + 1 :]  # turn of x_{t+1}
    # Level j of teacher t has root x_{t-j}; position 0 cannot be a root, it has no prefix.
    back = torch.arange(levels)
    at = torch.arange(length)[:, None] - back  # [T, levels]
    allowed = padded if roots is None else padded * F.pad(roots, (levels, 1))
    root = torch.where(at >= 1, allowed[:, at + levels], 0)
    found = ((predicted > 0)[..., None] & (root == predicted[..., None])).nonzero()
    text, time, level = found.unbind(1)
    position, teacher, count = torch.unique_consecutive(
        text * length + time, return_inverse=True, return_counts=True
    )
    start = [0, *count.cumsum(0).tolist()]
    return Rows(text * length + time - 1 - level, level, teacher, position, start)


def draft_rows(
    head: DartHead,
    feature: torch.Tensor,
    next_embedding: torch.Tensor,
    rows: Rows,
    final_norm_passes: int,
) -> torch.Tensor:
    """Inputs of the draft head's `lm_head` for the chosen rows, [R, H].

    feature [B, T, 3H]: taps of each token; next_embedding [B, T, H]: of the token after each.
    Equals what the serving drafter computes for the same prefix and level.
    """
    joined, residual = head.real_rows(feature, next_embedding)
    attended = attend_blocks(head, joined)
    levels = attended.shape[2]
    attended = attended.flatten(0, 2).index_select(0, rows.prefix * levels + rows.level)
    _, mask_residual = head.mask_row()
    residual = torch.where(
        (rows.level == 0)[:, None], residual.flatten(0, 1)[rows.prefix], mask_residual
    )
    hidden = head.finish(residual, attended)
    for _ in range(final_norm_passes):
        hidden = head.norm(hidden)
    return hidden


def attend_blocks(head: DartHead, joined: torch.Tensor) -> torch.Tensor:
    """Attention of all blocks at once: joined [B, T, 2H] -> [B, T, M + 1, heads, head_dim].

    One causal attention does it, because mask rows are constants up to rotation. Their values are
    all equal, and the scores among them depend on the level alone, so for level j the mask keys
    count as one key of score `sink[j]`: it stands before the text, where every row sees it. The
    levels are extra query heads on the same keys. No [T * levels]^2 mask is ever made.
    """
    config = head.config
    length, masks = joined.shape[1], config.draft_length
    kv_heads, size = config.num_key_value_heads, config.head_dim
    angle = head.angle(torch.arange(length, device=joined.device))
    key, value = head.key_value(joined)
    key, real_query = rotate(key, angle), rotate(head.query(joined), angle)

    mask, _ = head.mask_row()
    mask_query, (mask_key, mask_value) = head.query(mask), head.key_value(mask)
    later = head.angle(torch.arange(1, length + masks, device=joined.device))
    # Mask j of prefix i stands at i + j: level j's queries are a window of one rotated sequence.
    windows = rotate(mask_query, later).unfold(0, length, 1)  # [M, heads, size, T]
    windows = windows.permute(3, 0, 1, 2).expand(joined.shape[0], -1, -1, -1, -1)
    query = torch.cat([real_query[:, :, None], windows.to(real_query.dtype)], dim=2)
    gate = _sink(head, mask_query, mask_key) * math.sqrt(size)  # [M, heads]
    gate = F.pad(gate, (0, 0, 1, 0), value=_SHUT).to(query.dtype)

    # [B, T, levels, heads, size + extra]; the extra component meets a 1 in the sink's key only.
    extra = F.pad(gate[..., None], (0, _EXTRA - 1)).expand(*query.shape[:-1], _EXTRA)
    query = torch.cat([query, extra], dim=-1).unflatten(3, (kv_heads, -1))
    # Query heads that share a KV head must be neighbours; row 0 belongs to the sink.
    query = F.pad(query.permute(0, 3, 2, 4, 1, 5).flatten(1, 3), (0, 0, 1, 0))
    sink_key = F.pad(torch.zeros_like(mask_key), (0, 1), value=1.0)
    sink_key = F.pad(sink_key, (0, _EXTRA - 1)).to(key.dtype)
    key = _put_first(sink_key, F.pad(key, (0, _EXTRA)))
    value = _put_first(F.pad(mask_value, (0, _EXTRA)), F.pad(value, (0, _EXTRA)))
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=size**-0.5, enable_gqa=True
    )
    out = out[:, :, 1:, :size].unflatten(1, (kv_heads, masks + 1, -1))
    return out.permute(0, 4, 2, 1, 3, 5).flatten(3, 4)


def _sink(head: DartHead, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp [M, heads] of the scores of mask j with masks 1 .. j of its block."""
    masks = head.config.draft_length
    angle = head.angle(torch.arange(1, masks + 1, device=query.device))
    group = query.shape[0] // key.shape[0]
    queries, keys = rotate(query, angle), rotate(key, angle).repeat_interleave(group, dim=1)
    with torch.autocast(query.device.type, enabled=False):
        score = torch.einsum("qhd,khd->qhk", queries.float(), keys.float())
    ahead = torch.ones(masks, masks, dtype=torch.bool, device=query.device).triu(1)
    score = (score * head.config.head_dim**-0.5).masked_fill(ahead[:, None], -torch.inf)
    return score.logsumexp(-1)


def _put_first(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """first [kv_heads, d] before rest [B, T, kv_heads, d] -> [B, kv_heads, T + 1, d]."""
    first = first.expand(rest.shape[0], 1, *first.shape).to(rest.dtype)
    return torch.cat([first, rest], dim=1).transpose(1, 2)
