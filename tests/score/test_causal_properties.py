"""What holds for trees of any causal head, whatever it says; every growth against a heap."""

from __future__ import annotations

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dart.score.causal import Causal
from sglang_dart.score.scorer import Scorer
from sglang_dart.tree.core import CoreGrower
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, chain, fixed, pruned
from sglang_dart.types import Tree
from tests.tree.conftest import check_tree, paths_of

VOCABULARY, STATE = 12, 5


class ToyHead:
    """A random causal head: a recurrent state, and logits that depend on it."""

    def __init__(self, bs: int, levels: int, candidates: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        base, self.token = (2 * draw(bs, levels, VOCABULARY)).topk(candidates, dim=-1)
        self._base = base
        self._embedding, self._mix = draw(VOCABULARY, STATE), draw(STATE, STATE)
        self._out = draw(STATE, VOCABULARY)
        self._root = torch.arange(bs)

    def initial_state(self) -> torch.Tensor:
        return self._embedding[self._root][:, None]

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        token = self.token[:, level, None].expand(-1, state.shape[1], -1)
        return self._base[:, level, None] + (state @ self._out).gather(2, token)

    def step(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return torch.tanh(state @ self._mix + self._embedding[token])


def tree_of(impl: str, scorer: Scorer, recipe: TreeRecipe, bs: int) -> Tree:
    root = torch.arange(bs)
    if impl == "cpp":
        return CoreGrower(scorer.levels).grow(recipe, scorer, root)
    return prune(grow(scorer, recipe, root), recipe.budget, recipe.depth_bonus)


def heap_paths(head: ToyHead, request: int, budget: int, bonus: float) -> list[tuple[int, ...]]:
    """Best first with one call of the head a popped node: what no level-wise growth may miss."""
    levels = head.token.shape[1]

    def children(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...], float]]:
        state = head.initial_state()
        for token in path:
            step = torch.full((state.shape[0], 1), token)
            state = head.step(state, step)
        logits = head.logits(len(path), state)[request, 0]
        steps = (logits - logits.logsumexp(-1)).tolist()
        found = []
        for token, step in zip(head.token[request, len(path)].tolist(), steps, strict=True):
            total = score + step
            found.append((-(total + bonus * (len(path) + 1)), (*path, token), total))
        return found

    heap = children((), 0.0)
    heapq.heapify(heap)
    kept: list[tuple[int, ...]] = []
    while heap and len(kept) < budget:
        _, path, score = heapq.heappop(heap)
        kept.append(path)
        if len(path) < levels:
            for child in children(path, score):
                heapq.heappush(heap, child)
    return kept


@pytest.mark.parametrize("bonus", [0.0, -0.2])
@pytest.mark.parametrize("impl", ["torch", "cpp"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.integers(1, 4), budget=st.integers(1, 20))
def test_a_wide_enough_supertree_gives_the_heaps_tree(impl, bonus, seed, levels, budget):
    """Lemma 1 of arXiv 2608.13524: with no more paths than the frontier takes, pruning is exact."""
    bs, candidates = 2, 4
    head = ToyHead(bs, levels, candidates, seed)
    recipe = pruned(budget, width=candidates**levels, depth_bonus=bonus)
    tree = tree_of(impl, Causal(head), recipe, bs)
    for request in range(bs):
        expected = heap_paths(head, request, budget, bonus)
        assert set(paths_of(tree, request)) == set(expected)


@pytest.mark.parametrize("impl", ["torch", "cpp"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    levels=st.integers(1, 7),
    budget=st.integers(1, 70),
    width=st.integers(1, 12),
    kind=st.sampled_from(["pruned", "fixed", "chain"]),
)
def test_every_tree_is_a_tree(impl, seed, levels, budget, width, kind):
    """Parents before children, siblings distinct, a mask row sees its path and nothing else."""
    bs = 3
    recipe = {
        "pruned": pruned(budget, width),
        "fixed": fixed(budget),
        "chain": chain(levels),
    }[kind]
    head = ToyHead(bs, levels, VOCABULARY, seed)
    tree = tree_of(impl, Causal(head, min(VOCABULARY, budget)), recipe, bs)
    check_tree(tree)
    packed = pack(tree, torch.full((bs,), 7))
    used = torch.isfinite(tree.score)
    assert torch.equal(packed.mask.sum(-1)[used], (tree.depth + 1)[used].long())
    assert torch.equal(packed.position[used], (tree.depth + 7)[used].long())
    if kind == "fixed":
        assert int(tree.depth.max()) == min(levels, budget)


@pytest.mark.parametrize("impl", ["torch", "cpp"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.integers(1, 6), width=st.integers(1, 8))
def test_a_supertree_within_the_budget_is_kept_whole(impl, seed, levels, width):
    budget = width * levels + 3
    scorer = Causal(ToyHead(2, levels, VOCABULARY, seed))
    tree = tree_of(impl, scorer, pruned(budget, width), 2)
    first = min(width, VOCABULARY)
    expected = first + width * (levels - 1)
    assert (torch.isfinite(tree.score).sum(-1) - 1).tolist() == [expected] * 2


def test_all_requests_and_paths_go_through_the_head_together():
    """One call a level, however many requests and paths there are."""
    calls: list[tuple[int, ...]] = []

    class Counting(ToyHead):
        def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
            calls.append((level, *state.shape[:2]))
            return super().logits(level, state)

    for impl in ("torch", "cpp"):
        calls.clear()
        tree_of(impl, Causal(Counting(5, 4, VOCABULARY, 0)), pruned(64, 6), 5)
        assert calls == [(0, 5, 1), (1, 5, 6), (2, 5, 6), (3, 5, 6)]
