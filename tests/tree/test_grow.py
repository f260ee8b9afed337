"""Growth, in torch and C++: recipes against their definitions, batches against single requests."""

from __future__ import annotations

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dart.score.marginal import Marginal
from sglang_dart.score.scorer import Children
from sglang_dart.tree.grow import best, grow
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, beam, best_first, chain, fixed, pruned
from sglang_dart.types import Candidates, Tree

RECIPES = {
    "chain": chain(5),
    "fixed": fixed(17),
    "pruned": pruned(17, 4),
    "beam": beam(17, 3),
    "best_first": best_first(17),
}
sizes = st.sampled_from([1, 3, 17, 65])


def grown(
    candidates: Candidates,
    recipe: TreeRecipe,
    end: torch.Tensor | None = None,
    impl: str = "torch",
) -> Tree:
    root = torch.arange(candidates.token.shape[0])
    if impl == "cpp":
        from sglang_dart.tree.core import CoreGrower

        grower = CoreGrower(candidates.levels, threads=2)
        return grower.plan(recipe, candidates, root, root, end=end)[0]
    return prune(grow(Marginal(candidates), recipe, root, end), recipe.budget, recipe.depth_bonus)


def heap_of(candidates: Candidates, request: int, budget: int) -> dict[tuple[int, ...], float]:
    """Best-first search by definition: pop the best path, push its children."""
    token, log_prob = candidates.token[request], candidates.log_prob[request]
    zero = torch.zeros((), dtype=torch.float32)
    heap: list = []

    def push(path, score):
        level = len(path)
        if level < token.shape[0]:
            for rank in range(token.shape[1]):
                child = score + log_prob[level, rank]
                heapq.heappush(heap, (-child.item(), (*path, int(token[level, rank])), child))

    push((), zero)
    kept = {}
    while heap and len(kept) < budget:
        _, path, score = heapq.heappop(heap)
        kept[path] = score.item()
        push(path, score)
    return kept


@given(budget=sizes, levels=st.integers(1, 5), width=st.integers(1, 6), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_best_first_equals_a_heap(impl, make_candidates, tree_paths, budget, levels, width, seed):
    candidates = make_candidates(2, levels, width, seed)
    tree = grown(candidates, best_first(budget), impl=impl)
    for request in range(2):
        expected = heap_of(candidates, request, budget)
        paths = tree_paths(tree, request)
        assert len(paths) == len(expected)
        assert dict(zip(paths, tree.score[request, 1:].tolist(), strict=False)) == expected


@given(budget=sizes, width=st.integers(1, 5), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_best_first_with_ties_keeps_the_best_scores(
    impl, make_candidates, check, budget, width, seed
):
    candidates = make_candidates(1, 4, width, seed, grid=2)
    tree = grown(candidates, best_first(budget), impl=impl)
    check(tree)
    used = tree.score[0] > -torch.inf
    got = sorted(tree.score[0][used][1:].tolist())
    assert got == sorted(heap_of(candidates, 0, budget).values())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("grid", [None, 1])
@given(width=st.integers(1, 7), seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_every_tree_is_a_tree(impl, make_candidates, check, name, grid, width, seed):
    check(grown(make_candidates(3, 5, width, seed, grid=grid), RECIPES[name], impl=impl))


@pytest.mark.parametrize("name", RECIPES)
@given(budget=sizes, levels=st.integers(1, 5), width=st.integers(1, 7), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_no_room_is_left_that_a_node_could_fill(
    impl, make_candidates, name, budget, levels, width, seed
):
    """A tree has budget + 1 places, all filled if so many nodes were scored."""
    recipe = {
        "chain": lambda: chain(levels),
        "fixed": lambda: fixed(budget),
        "pruned": lambda: pruned(budget, 4),
        "beam": lambda: beam(budget, 3),
        "best_first": lambda: best_first(budget),
    }[name]()
    candidates = make_candidates(3, levels, width, seed, grid=2)
    ledger = grow(Marginal(candidates), recipe, torch.arange(3))
    scored = (ledger.score > -torch.inf).sum(dim=1) - 1
    tree = grown(candidates, recipe, impl=impl)
    assert tree.width == recipe.budget + 1
    filled = (tree.parent >= 0).sum(dim=1)
    assert filled.tolist() == scored.clamp(max=recipe.budget).tolist()
    if name == "best_first":
        possible = sum(width**level for level in range(1, levels + 1))
        assert filled.tolist() == [min(budget, possible)] * 3


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", [1, 3, 17, 65])
def test_batch_equals_one_at_a_time_in_any_order(impl, make_candidates, name, size):
    candidates = make_candidates(size, 5, 6, 7, grid=4)
    end = torch.stack([candidates.token[:, 0, 0], candidates.token[:, 1, 1]], dim=1)
    end[::2] = -1
    together = grown(candidates, RECIPES[name], end, impl)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    shuffled = grown(
        Candidates(candidates.token[order], candidates.log_prob[order]),
        RECIPES[name],
        end[order],
        impl,
    )
    for column in ("parent", "depth", "score"):
        assert torch.equal(getattr(shuffled, column), getattr(together, column)[order])
    assert torch.equal(shuffled.token[:, 1:], together.token[order, 1:])
    for i in range(min(size, 3)):
        one = Candidates(candidates.token[i : i + 1], candidates.log_prob[i : i + 1])
        alone = grown(one, RECIPES[name], end[i : i + 1], impl)
        assert torch.equal(alone.parent[0], together.parent[i])
        assert torch.equal(alone.token[0, 1:], together.token[i, 1:])


def test_chain_takes_the_best_of_each_level(make_candidates):
    candidates = make_candidates(2, 5, 4, 1)
    tree = grown(candidates, chain(5))
    assert torch.equal(tree.token[:, 1:], candidates.token[:, :, 0])
    assert tree.parent.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2


def test_fixed_shares_the_budget(make_candidates):
    tree = grown(make_candidates(1, 5, 8, 2), fixed(17))
    assert torch.bincount(tree.depth[0]).tolist() == [1, 4, 4, 3, 3, 3]


def test_pruned_without_need_keeps_the_supertree(make_candidates):
    """3 levels of 4 nodes fit into a budget of 20; the rest is padding."""
    candidates = make_candidates(1, 3, 4, 2)
    whole, cut = grown(candidates, pruned(12, 4, -0.5)), grown(candidates, pruned(20, 4, -0.5))
    assert torch.equal(cut.token[:, :13], whole.token)
    assert (cut.parent[0, 13:] == -1).all()


def tree_by_hand() -> Candidates:
    r"""Two levels of two: scores on the edges.

         root
        -1/ \-2
        7     8
    -1/ \-3  -1/ \-3
     7   8   7    8
    """
    return Candidates(
        token=torch.tensor([[[7, 8], [7, 8]]]),
        log_prob=torch.tensor([[[-1.0, -2.0], [-1.0, -3.0]]]),
    )


def test_beam_by_hand(tree_paths):
    recipe = TreeRecipe(budget=4, frontier=1, every_child=True)
    tree = grown(tree_by_hand(), recipe)
    assert tree_paths(tree, 0) == [(7,), (8,), (7, 7), (7, 8)]
    assert tree.score.tolist() == [[0, -1, -2, -2, -4]]


def test_paths_that_end_are_extended_last(tree_paths):
    recipe = TreeRecipe(budget=4, frontier=1, every_child=True, ends_last=True)
    ends, ignores = torch.tensor([[3, 7]]), torch.tensor([[-1, -1]])
    assert tree_paths(grown(tree_by_hand(), recipe, ends), 0) == [(7,), (8,), (8, 7), (8, 8)]
    assert tree_paths(grown(tree_by_hand(), recipe, ignores), 0) == [(7,), (8,), (7, 7), (7, 8)]
    wide = TreeRecipe(budget=6, frontier=2, every_child=True, ends_last=True)
    paths = tree_paths(grown(tree_by_hand(), wide, ends), 0)
    assert paths == [(7,), (8,), (8, 7), (8, 8), (7, 7), (7, 8)]


def test_unused_ranks_never_enter(check, tree_paths):
    candidates = tree_by_hand()
    candidates.log_prob[0, 0, 1] = -torch.inf
    for recipe in (best_first(6), fixed(6), pruned(6, 2)):
        tree = grown(candidates, recipe)
        check(tree)
        assert tree_paths(tree, 0) == [(7,), (7, 7), (7, 8)]


def test_unused_ranks_take_no_room_from_paths_that_end(tree_paths):
    candidates = tree_by_hand()
    candidates.log_prob[0, 0, 1] = -torch.inf
    recipe = TreeRecipe(budget=4, frontier=1, every_child=True, ends_last=True)
    paths = tree_paths(grown(candidates, recipe, torch.tensor([[7]])), 0)
    assert paths == [(7,), (7, 7), (7, 8)]


class Rising:
    """A scorer whose steps wrongly rise."""

    levels = 3

    def score(self, level):
        return Children(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, -1.0]]]))

    def advance(self, parent, token):
        pass


def test_steps_above_zero_count_as_zero(check):
    ledger = grow(Rising(), best_first(3), torch.tensor([0]))
    assert ledger.score.max() == 0
    check(prune(ledger, 3))


def test_best_is_stable():
    score = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0]])
    assert best(score, 6).tolist() == [[1, 2, 5, 0, 3, 4]]
    last = torch.tensor([[False, True, False, False, False, True]])
    assert best(score, 5, last).tolist() == [[2, 0, 3, 4, 1]]
