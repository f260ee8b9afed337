"""Candidates to packed trees: the tree that a round verifies, grown on the host."""

from __future__ import annotations

import torch

import sglang_dart._core as _core
from sglang_dart.options import DartOptions
from sglang_dart.tree import recipe
from sglang_dart.tree.core import CoreGrower
from sglang_dart.types import Candidates, PackedTree


class TreePlanner:
    """Grows DART's trees: marginal scores with n-gram continuity, the beam recipe.

    `levels` bounds the depth. A chain takes the best token of each level instead.
    """

    def __init__(
        self,
        options: DartOptions,
        levels: int,
        *,
        chain: bool = False,
        ngram: _core.NgramModel | None = None,
    ) -> None:
        self._options = options
        self._levels = levels
        self._chain = chain
        self._ngram = ngram
        self._grower = CoreGrower(
            levels,
            logit_decay=options.logit_decay,
            ngram=ngram,
            ngram_weight=options.ngram_weight,
            threads=options.threads,
        )

    @property
    def candidates(self) -> int:
        """Candidates a level that the drafter should give."""
        return self._options.candidates

    @property
    def context_length(self) -> int:
        """Newest tokens that must be remembered, the root included."""
        return 1 if self._ngram is None else max(1, self._ngram.order - 1)

    def levels(self, width: int) -> int:
        """The depth that no node of a tree of `width` nodes exceeds."""
        return min(self._levels, width - 1)

    def plan(
        self,
        candidates: Candidates,
        tail: torch.Tensor,
        length: torch.Tensor,
        width: int,
        end: torch.Tensor,
    ) -> PackedTree:
        """Grow, keep and pack a tree of `width` nodes, root included, for each request.

        candidates, tail [bs, T] and end [bs, E] on the host; tail ends with the root. length [bs]
        and the result on the device of `length`.
        """
        root, levels = tail[:, -1].contiguous(), self.levels(width)
        if not levels:
            return _root_only(root, length)
        kept = Candidates(
            candidates.token[:, :levels].contiguous(), candidates.log_prob[:, :levels].contiguous()
        )
        # The device may know the lengths alone: positions count from the root until then.
        depth = torch.zeros_like(root)
        _, packed = self._grower.plan(
            self._recipe(levels, width - 1), kept, root, depth, end=end, tail=tail
        )
        return _at(packed, length)

    def _recipe(self, levels: int, budget: int) -> recipe.TreeRecipe:
        if self._chain:
            return recipe.chain(levels)
        return recipe.beam(budget, self._options.beam, self._options.level_exponent)


def _root_only(root: torch.Tensor, length: torch.Tensor) -> PackedTree:
    """Trees that draft nothing: the verify step is then plain decoding."""
    token = root[:, None].to(length.device, non_blocking=True)
    none = torch.full_like(token, -1)
    mask = torch.ones(*token.shape, 1, dtype=torch.bool, device=length.device)
    return PackedTree(token, length[:, None], none, none, mask)


def _at(packed: PackedTree, length: torch.Tensor) -> PackedTree:
    """Bring trees whose positions count from the root to the device, behind `length` tokens."""
    columns = torch.stack([packed.token, packed.position, packed.first_child, packed.next_sibling])
    mask = packed.mask
    if length.is_cuda:
        columns = columns.pin_memory().to(length.device, non_blocking=True)
        mask = mask.pin_memory().to(length.device, non_blocking=True)
    token, depth, first_child, next_sibling = columns
    return PackedTree(token, length[:, None] + depth, first_child, next_sibling, mask)
