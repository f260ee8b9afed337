"""The level-by-level loop that scores paths and fills the ledger."""

from __future__ import annotations

import torch

from sglang_dart.score.scorer import Scorer
from sglang_dart.tree.recipe import TreeRecipe
from sglang_dart.types import Ledger


def grow(
    scorer: Scorer, recipe: TreeRecipe, root: torch.Tensor, end: torch.Tensor | None = None
) -> Ledger:
    """Grow a tree for each request, a level at a time, all requests and paths at once.

    root [bs] int64; end [bs, E] int64: tokens that end the request's answer, -1 fills up (a request
    that ignores its end tokens has -1 only). Gives the ledger, whose size depends on the recipe and
    the number of candidates only. A path scores parent + weight(level) * step, each operation
    rounded to float32; steps above 0 count as 0, so that scores never rise along a path.
    """
    bs = root.shape[0]
    entries = [_entry(root[:, None], root.new_full((bs, 1), -1), 0, _zeros(root))]
    node, score = root.new_zeros(bs, 1), _zeros(root)  # the frontier
    size = 1
    for level in range(scorer.levels):
        token, step = scorer.score(level)
        scored = score[..., None] + step.clamp(max=0) * recipe.level_weight(level)  # [bs, P, K]
        paths, width = scored.shape[1:]
        token = token.expand(scored.shape).flatten(1)
        scored = scored.flatten(1)
        if recipe.every_child:
            parent = node[..., None].expand(bs, paths, width).flatten(1)
            entries.append(_entry(token, parent, level + 1, scored))
        last = level + 1 == scorer.levels
        if last and recipe.every_child:
            break
        count = min(recipe.quota(level, scorer.levels, size - 1), paths * width)
        if count <= 0:
            break
        ended = None
        if recipe.ends_last and end is not None:
            # Paths that end the answer leave room to others, but not to unused places.
            ended = _is_end(token, end) | torch.isneginf(scored)
        chosen = best(scored, count, ended)  # [bs, count], indices into P * K
        token, score, path = token.gather(1, chosen), scored.gather(1, chosen), chosen // width
        if recipe.every_child:
            node = size + chosen
            size += paths * width
        else:
            entries.append(_entry(token, node.gather(1, path), level + 1, score))
            node = torch.arange(size, size + count, device=root.device).expand(bs, count)
            size += count
        if not last:
            scorer.advance(path, token)
    return Ledger(*(torch.cat(column, dim=1) for column in zip(*entries, strict=True)))


def best(score: torch.Tensor, count: int, last: torch.Tensor | None = None) -> torch.Tensor:
    """Indices of the `count` best of score [bs, n], best first, the earlier one on a tie.

    Where `last` [bs, n] bool is given, its members come after all others.
    """
    order = torch.sort(score, dim=1, descending=True, stable=True).indices
    if last is not None:
        moved = torch.sort(last.gather(1, order).to(torch.uint8), dim=1, stable=True).indices
        order = order.gather(1, moved)
    return order[:, :count]


def _is_end(token: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return (token[..., None] == end[:, None, :]).any(-1)


def _zeros(root: torch.Tensor) -> torch.Tensor:
    return torch.zeros(root.shape[0], 1, dtype=torch.float32, device=root.device)


Entry = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _entry(token: torch.Tensor, parent: torch.Tensor, depth: int, score: torch.Tensor) -> Entry:
    """Columns of Ledger for nodes of one depth."""
    return token, parent.int(), torch.full_like(parent, depth, dtype=torch.int32), score
