"""The nouns that travel through a round, with their shapes and dtypes.

Axes: bs requests, D drafted levels, K candidates a level, N nodes with the root, V vocabulary.
Every tensor of one object lies on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Candidates:
    """What a drafter proposes for the D positions after the root.

    token    [bs, D, K] int64, target vocabulary ids, best rank first.
    log_prob [bs, D, K] float32, never rising with rank; -inf marks an unused rank.
    carry    [bs, D, E] or None: what a causal head must know of each level to score paths.
    """

    token: torch.Tensor
    log_prob: torch.Tensor
    carry: torch.Tensor | None = None

    @property
    def levels(self) -> int:
        return self.token.shape[1]

    def first(self, levels: int) -> Candidates:
        """Those of the first levels."""
        return self.map(lambda column: column[:, :levels].contiguous())

    def to(self, device: torch.device) -> Candidates:
        """The same on `device`; a copy to a GPU may still be under way."""
        return self.map(lambda column: column.to(device, non_blocking=device.type == "cuda"))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Candidates:
        """The same with every tensor changed."""
        carry = None if self.carry is None else change(self.carry)
        return Candidates(change(self.token), change(self.log_prob), carry)


@dataclass(frozen=True)
class Ledger:
    """Every node that a growth scored, in the order of scoring ("scored earlier" = smaller index).

    Node 0 is the root (parent -1, depth 0, score 0). A parent stands before its children.
    token [bs, S] int64, parent [bs, S] int32, depth [bs, S] int32,
    score [bs, S] float32: the sum along the path, -inf where the place is unused.
    """

    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    score: torch.Tensor


@dataclass(frozen=True)
class Tree:
    """The nodes to verify, parents before children, in ledger order.

    Node 0 is the root. token [bs, N] int64, parent [bs, N] int32, depth [bs, N] int32,
    score [bs, N] float32. Padding comes last: token 0, parent -1, depth 0, score -inf.
    """

    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    score: torch.Tensor

    @property
    def width(self) -> int:
        return self.token.shape[1]


@dataclass(frozen=True)
class PackedTree:
    """A tree in the form that verification reads.

    token, position [bs, N] int64 (position = committed length + depth).
    first_child, next_sibling [bs, N] int64: node index or -1; padding is linked from nowhere.
    mask [bs, N, N] bool: row i sees node j if j is i or an ancestor of i; padding sees itself.
    """

    token: torch.Tensor
    position: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Accepted:
    """The run that the target confirmed.

    node   [bs, D + 1] int32: accepted nodes from the root down, -1 after the end.
    token  [bs, D + 1] int64: the target's token after each accepted node; the last is the bonus.
    length [bs] int32: tokens committed, bonus included (1 .. D + 1).
    """

    node: torch.Tensor
    token: torch.Tensor
    length: torch.Tensor
