"""The best nodes of a ledger, renumbered parents first."""

from __future__ import annotations

from typing import Literal

import torch

from sglang_dart.tree.grow import best
from sglang_dart.types import Ledger, Tree


def prune(
    ledger: Ledger,
    budget: int,
    depth_bonus: float = 0.0,
    *,
    impl: Literal["auto", "torch", "cpp"] = "torch",
) -> Tree:
    """Keep the `budget` best nodes of each request's ledger, by score + depth_bonus * depth.

    ledger.score [bs, S] float32, -inf where unused -> Tree with N = budget + 1: the root at 0,
    nodes in ledger order, padding last. On a tie the node scored earlier stays, so that scores
    which never rise along a path keep parents with their children.
    impl: "cpp" needs host tensors; "auto" takes it for them, and "torch" elsewhere.
    Raises ValueError if budget < 1 or depth_bonus > 0.
    Source: DARTree, arXiv 2608.13524, section 3.3; the order of ties is ours.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if depth_bonus > 0:
        raise ValueError(f"depth_bonus must be at most 0, got {depth_bonus}")
    if impl == "cpp" or (impl == "auto" and ledger.score.device.type == "cpu"):
        from sglang_dart.tree.core import prune_cpp

        return prune_cpp(ledger, budget, depth_bonus)
    bs, size = ledger.score.shape
    rank = ledger.score + ledger.depth.float() * depth_bonus
    rank[:, 0] = torch.inf
    kept = best(rank, budget + 1)
    # Unused places go to index S, behind all nodes; so does what the ledger is short of.
    kept = torch.where(ledger.score.gather(1, kept) > -torch.inf, kept, size)
    kept = torch.nn.functional.pad(kept, (0, budget + 1 - kept.shape[1]), value=size)
    kept = kept.sort(dim=1).values

    new_index = torch.zeros(bs, size + 1, dtype=torch.int32, device=kept.device)
    places = torch.arange(budget + 1, dtype=torch.int32, device=kept.device)
    new_index.scatter_(1, kept, places.expand(bs, -1))
    old_parent = _take(ledger.parent, kept, -1)
    parent = new_index.gather(1, old_parent.clamp(min=0).long())
    return Tree(
        token=_take(ledger.token, kept, 0),
        parent=torch.where(old_parent < 0, -1, parent),
        depth=_take(ledger.depth, kept, 0),
        score=_take(ledger.score, kept, -torch.inf),
    )


def _take(column: torch.Tensor, kept: torch.Tensor, padding: float) -> torch.Tensor:
    """Column [bs, S] at indices `kept` [bs, N], `padding` at index S."""
    return torch.nn.functional.pad(column, (0, 1), value=padding).gather(1, kept)
