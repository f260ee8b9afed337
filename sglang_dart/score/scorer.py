"""The protocol of scorers: what the next token is worth after each path of the frontier."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Children(NamedTuple):
    """What may follow each of P paths.

    token [bs, P, K] int64; step [bs, P, K] float32: the score of the step, never above 0, -inf
    where a child is unused. The P axis is 1 if the children are the same after every path.
    """

    token: torch.Tensor
    step: torch.Tensor


class Scorer(Protocol):
    """What a path is worth. Made for one growth; its frontier begins as the root alone.

    A growth calls `score` level by level, and between two levels `advance` once.
    """

    levels: int
    """Levels that can be scored."""

    def score(self, level: int) -> Children:
        """Score the children of every path of the frontier."""

    def advance(self, parent: torch.Tensor, token: torch.Tensor) -> None:
        """Replace the frontier: `parent` [bs, P'] indexes the old one, `token` [bs, P'] follows."""


def follow(state: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
    """Give each new path its parent's state: state [bs, P, S], parent [bs, P'] -> [bs, P', S]."""
    return state.gather(1, parent[..., None].expand(-1, -1, state.shape[2]))
