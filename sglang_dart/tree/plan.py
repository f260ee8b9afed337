"""Candidates to packed trees: the tree that a round verifies, grown on the host."""

from __future__ import annotations

import torch

from sglang_dart.options import DartOptions
from sglang_dart.score.continuity import Continuity, NgramModel
from sglang_dart.score.marginal import Marginal
from sglang_dart.score.scorer import Scorer
from sglang_dart.tree import recipe
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.types import Candidates, PackedTree, Tree


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
        ngram: NgramModel | None = None,
    ) -> None:
        self._options = options
        self._levels = levels
        self._chain = chain
        self._ngram = ngram

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
        return pack(_upload(self._grow(candidates, tail, width, end), length.device), length)

    def _grow(
        self, candidates: Candidates, tail: torch.Tensor, width: int, end: torch.Tensor
    ) -> Tree:
        root, levels = tail[:, -1], self.levels(width)
        if not levels:
            return _root_only(root)
        kept = Candidates(candidates.token[:, :levels], candidates.log_prob[:, :levels])
        if self._chain:
            shape = recipe.chain(levels)
        else:
            options = self._options
            shape = recipe.beam(width - 1, options.beam, options.level_exponent)
        ledger = grow(self._scorer(kept, tail), shape, root, end)
        return prune(ledger, width - 1, shape.depth_bonus)

    def _scorer(self, candidates: Candidates, tail: torch.Tensor) -> Scorer:
        options = self._options
        marginal = Marginal(candidates, options.logit_decay)
        if self._ngram is None:
            return marginal
        return Continuity(marginal, self._ngram, tail, options.ngram_weight)


def _root_only(root: torch.Tensor) -> Tree:
    """Trees that draft nothing: the verify step is then plain decoding."""
    shape = (root.shape[0], 1)
    return Tree(
        token=root[:, None],
        parent=torch.full(shape, -1, dtype=torch.int32),
        depth=torch.zeros(shape, dtype=torch.int32),
        score=torch.zeros(shape),
    )


def _upload(tree: Tree, device: torch.device) -> Tree:
    """Bring a tree to the device in one copy. Scores are of no more use and stay behind."""
    if device.type == "cpu":
        return tree
    columns = torch.stack([tree.token, tree.parent.long(), tree.depth.long()]).pin_memory()
    token, parent, depth = columns.to(device, non_blocking=True)
    return Tree(token, parent.int(), depth.int(), tree.score)
