"""Candidates to packed trees: the tree that a round verifies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import sglang_dart._core as _core
from sglang_dart.score.causal import Causal, CausalHead
from sglang_dart.score.marginal import Marginal
from sglang_dart.score.scorer import Scorer
from sglang_dart.tree.core import CoreGrower
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, chain
from sglang_dart.types import Candidates, PackedTree, Tree

# The recipe for a budget.
RecipeOf = Callable[[int], TreeRecipe]
# The causal head over candidates, for a growth from roots [bs]: see DominoDrafter.path_head.
HeadOf = Callable[[Candidates, torch.Tensor], CausalHead]
# Grows trees from candidates, roots [bs] and committed lengths [bs].
Growth = Callable[[Candidates, torch.Tensor, torch.Tensor], tuple[Tree, PackedTree]]

HOST = torch.device("cpu")


class TreePlanner:
    """Grows trees by one recipe, scored by the candidates alone or by a causal head along paths.

    On the host the C++ core grows them, with n-gram continuity if there is a model; on a GPU torch
    does, without a host synchronisation.
    """

    def __init__(
        self,
        recipe: RecipeOf | None,
        levels: int,
        candidates: int,
        *,
        head: HeadOf | None = None,
        logit_decay: float = 1.0,
        ngram: _core.NgramModel | None = None,
        ngram_weight: float = 0.0,
        threads: int = 0,
        home: torch.device = HOST,
    ) -> None:
        """`levels` bounds the depth. recipe None: a chain, the best token after the best.

        candidates: how many a level the drafter shall give. logit_decay: see Marginal; it does not
        concern a head. home: where trees grow; the host, if there is an n-gram model.
        """
        self.candidates = candidates
        self.home = HOST if ngram is not None else home
        self._recipe = recipe
        self._levels = levels
        self._head = head
        self._decay = logit_decay
        self._context = 1 if ngram is None else max(1, ngram.order - 1)
        self._grower = CoreGrower(
            levels,
            logit_decay=logit_decay,
            ngram=ngram,
            ngram_weight=ngram_weight,
            threads=threads,
        )
        # By width: growths on the device that are replayed from graphs.
        self._captured: dict[int, Growth] = {}

    @property
    def context_length(self) -> int:
        """Newest tokens that must be remembered, the root included."""
        return self._context

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
    ) -> tuple[Tree, PackedTree]:
        """Grow, keep and pack a tree of `width` nodes, root included, for each request.

        candidates and tail [bs, T] at home, end [bs, E] on the host; tail ends with the root.
        length [bs] and the packed trees on its device; the trees themselves where they grew.
        """
        root, levels = tail[:, -1].contiguous(), self.levels(width)
        if not levels:
            return root_only(root, length)
        if self.home.type != "cpu":
            growth = self._captured.get(width) or self._on_device(width)
            return growth(candidates, root, length)
        recipe = self._recipe_of(width)
        kept = candidates.first(levels)
        # The device may know the lengths alone: positions count from the root until then.
        depth = torch.zeros_like(root)
        if self._head is None:
            tree, packed = self._grower.plan(recipe, kept, root, depth, end=end, tail=tail)
        else:
            scorer = self._scorer(kept.to(length.device), root.to(length.device), recipe)
            tree = self._grower.grow(recipe, scorer, root, end=end, tail=tail)
            packed = pack(tree, depth, impl="cpp")
        return tree, _at(packed, length)

    def capture(self, capture: Callable[[Growth, int], Growth], widths: Iterable[int]) -> None:
        """Plan trees of these widths by what `capture` makes of growth and width; not on a host."""
        assert self.home.type != "cpu", "the core grows trees on the host"
        for width in widths:
            if self.levels(width):
                self._captured[width] = capture(self._on_device(width), width)

    def _on_device(self, width: int) -> Growth:
        recipe, levels = self._recipe_of(width), self.levels(width)
        assert not recipe.ends_last, "the end tokens are on the host"

        def growth(
            candidates: Candidates, root: torch.Tensor, length: torch.Tensor
        ) -> tuple[Tree, PackedTree]:
            scorer = self._scorer(candidates.first(levels), root, recipe)
            tree = prune(grow(scorer, recipe, root), recipe.budget, recipe.depth_bonus)
            return tree, pack(tree, length)

        return growth

    def _recipe_of(self, width: int) -> TreeRecipe:
        return chain(self.levels(width)) if self._recipe is None else self._recipe(width - 1)

    def value(self, tree: Tree) -> torch.Tensor:
        """What decided which nodes were kept, [bs, N]."""
        # A root alone has no recipe either.
        if self._recipe is None or tree.width == 1:
            return tree.score
        return tree.score + self._recipe(tree.width - 1).depth_bonus * tree.depth

    def _scorer(self, candidates: Candidates, root: torch.Tensor, recipe: TreeRecipe) -> Scorer:
        if self._head is None:
            return Marginal(candidates, self._decay)
        return Causal(self._head(candidates, root), expandable(candidates, recipe))


def expandable(candidates: Candidates, recipe: TreeRecipe) -> int:
    """How many candidates, by base rank, a causal head may put into a tree.

    No more than the budget, as DARTree's release has it; a chain chooses among all.
    """
    given = candidates.token.shape[2]
    return given if recipe.frontier == 1 else min(given, recipe.budget)


def root_only(root: torch.Tensor, length: torch.Tensor) -> tuple[Tree, PackedTree]:
    """Trees that draft nothing, behind `length` tokens: the verify step is then plain decoding."""
    root = root.contiguous()
    none, zero = root.new_full((len(root), 1), -1).int(), root.new_zeros(len(root), 1).int()
    tree = Tree(root[:, None], none, zero, zero.float())
    token = tree.token.to(length.device, non_blocking=True)
    unlinked = torch.full_like(token, -1)
    mask = torch.ones(*token.shape, 1, dtype=torch.bool, device=length.device)
    return tree, PackedTree(token, length[:, None], unlinked, unlinked, mask)


def _at(packed: PackedTree, length: torch.Tensor) -> PackedTree:
    """Bring trees whose positions count from the root to the device, behind `length` tokens."""
    columns = torch.stack([packed.token, packed.position, packed.first_child, packed.next_sibling])
    mask = packed.mask
    if length.is_cuda:
        columns = columns.pin_memory().to(length.device, non_blocking=True)
        mask = mask.pin_memory().to(length.device, non_blocking=True)
    token, depth, first_child, next_sibling = columns
    return PackedTree(token, length[:, None] + depth, first_child, next_sibling, mask)
