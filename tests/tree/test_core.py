"""The C++ core against the plain-torch steps: the same trees, ties included."""

from __future__ import annotations

import functools
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dart.score.causal import Causal
from sglang_dart.score.continuity import Continuity, CountedNgrams
from sglang_dart.score.marginal import Marginal
from sglang_dart.score.scorer import Children
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, beam, best_first, chain, fixed, pruned
from sglang_dart.types import Candidates, Ledger, PackedTree, Tree
from tests.score.test_causal import EVERY as DOMINO_TREES
from tests.score.test_causal import DominoHead, recipe_of
from tests.test_ngram_model import build, documents
from tests.tree.test_search_golden import CASES, TOLERANCE, candidates_of, canonical

_core = pytest.importorskip("sglang_dart._core")

from sglang_dart.tree.core import CoreGrower  # noqa: E402

RECIPES = ("chain", "fixed", "pruned", "beam", "best_first", "ends last")


def recipe_named(name: str, budget: int, frontier: int, levels: int) -> TreeRecipe:
    return {
        "chain": lambda: chain(levels),
        "fixed": lambda: fixed(budget),
        "pruned": lambda: pruned(budget, frontier, -0.25),
        "beam": lambda: beam(budget, frontier),
        "best_first": lambda: best_first(budget),
        "ends last": lambda: TreeRecipe(budget, frontier, every_child=False, ends_last=True),
    }[name]()


def torch_tree(scorer, recipe, root, end=None) -> Tree:
    return prune(grow(scorer, recipe, root, end), recipe.budget, recipe.depth_bonus)


def assert_same_tree(got: Tree, expected: Tree) -> None:
    for name in ("token", "parent", "depth", "score"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def assert_same_packed(got: PackedTree, expected: PackedTree) -> None:
    for name in ("token", "position", "first_child", "next_sibling", "mask"):
        one, other = getattr(got, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


class PathScorer:
    """A step depends on every token of its path; coarse steps make ties common."""

    def __init__(self, candidates: Candidates) -> None:
        self.levels = candidates.levels
        self._candidates = candidates
        self._state = torch.zeros(candidates.token.shape[0], 1, dtype=torch.int64)

    def score(self, level: int) -> Children:
        token = self._candidates.token[:, level, None].expand(-1, self._state.shape[1], -1)
        noise = (self._state[..., None] * 31 + token * 17 + level) % 97 // 12
        return Children(token, self._candidates.log_prob[:, level, None] - noise / 4)

    def advance(self, parent: torch.Tensor, token: torch.Tensor) -> None:
        self._state = (self._state.gather(1, parent) * 7 + token) % 1009


@st.composite
def growths(draw):
    """(candidates, end tokens, recipe): with ties, unused ranks, and tokens that end the answer."""
    bs, levels = draw(st.sampled_from([1, 2, 5])), draw(st.integers(1, 7))
    width, seed = draw(st.sampled_from([1, 2, 3, 8, 17])), draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    token = torch.rand(bs, levels, 3 * width, generator=generator).argsort(dim=-1)[..., :width]
    log_prob = -3 * torch.rand(bs, levels, width, generator=generator)
    grid = draw(st.sampled_from([0, 1, 4]))
    if grid:
        log_prob = (log_prob * grid).round() / grid
    log_prob = log_prob.sort(dim=-1, descending=True).values
    if draw(st.booleans()):
        used = torch.randint(0, width + 1, (bs, levels, 1), generator=generator)
        log_prob = log_prob.masked_fill(torch.arange(width) >= used, -torch.inf)
    end = torch.full((bs, 3), -1)
    for request in range(0, bs, 2):
        end[request, : draw(st.integers(0, 3))] = token[
            request, draw(st.integers(0, levels - 1)), 0
        ]
    name, frontier = draw(st.sampled_from(RECIPES)), draw(st.sampled_from([1, 2, 3, 12]))
    budget = draw(st.sampled_from([1, 3, 16, 17, 64, 65, 300]))
    return Candidates(token, log_prob), end, recipe_named(name, budget, frontier, levels)


@given(growth=growths(), decay=st.sampled_from([1.0, 0.9]), threads=st.sampled_from([1, 4]))
@settings(max_examples=150, deadline=None)
def test_marginal_trees_are_the_same(growth, decay, threads):
    candidates, end, recipe = growth
    bs = candidates.token.shape[0]
    root, length = torch.arange(bs), torch.arange(bs) * 9
    expected = torch_tree(Marginal(candidates, decay), recipe, root, end)
    grower = CoreGrower(candidates.levels, logit_decay=decay, threads=threads)
    tree, packed = grower.plan(recipe, candidates, root, length, end=end)
    assert_same_tree(tree, expected)
    assert_same_packed(packed, pack(expected, length))


@given(growth=growths(), threads=st.sampled_from([1, 4]))
@settings(max_examples=100, deadline=None)
def test_path_dependent_trees_are_the_same(growth, threads):
    candidates, end, recipe = growth
    root = torch.arange(candidates.token.shape[0])
    expected = torch_tree(PathScorer(candidates), recipe, root, end)
    grower = CoreGrower(candidates.levels, threads=threads)
    assert_same_tree(grower.grow(recipe, PathScorer(candidates), root, end=end), expected)


@pytest.mark.parametrize("recipe", [beam(60, 20), best_first(65), pruned(64, 12)])
def test_candidates_out_of_order_are_no_trouble(make_candidates, recipe):
    candidates = make_candidates(3, 5, 25, 11)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))
    shuffled = Candidates(candidates.token[..., order], candidates.log_prob[..., order])
    root = torch.zeros(3, dtype=torch.int64)
    tree, _ = CoreGrower(5).plan(recipe, shuffled, root, root)
    assert_same_tree(tree, torch_tree(Marginal(shuffled), recipe, root))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_search_equals_the_release(case, golden):
    model = _core.NgramModel.open(str(golden / "dart" / case["trie"]))
    grower = CoreGrower(
        case["levels"], logit_decay=0.9, ngram=model, ngram_weight=case["ngram_weight"]
    )
    tree, _ = grower.plan(
        beam(case["budget"], case["beam_width"]),
        candidates_of(case),
        torch.tensor([case["root_token"]]),
        torch.zeros(1, dtype=torch.int64),
        end=torch.tensor([[case["eos_token_id"]]]),
        tail=torch.tensor([case["prompt_tokens"]]),
    )
    got = canonical(*(c[0].tolist() for c in (tree.token, tree.parent, tree.depth, tree.score)))
    rows = ((0, "tokens"), (-1, "parents"), (0, "depths"), (0.0, "scores"))
    expected = canonical(*([first, *case[name]] for first, name in rows))
    assert got.keys() == expected.keys()
    assert max(abs(got[path] - score) for path, score in expected.items()) <= 1e-6


@pytest.mark.parametrize(("model", "case", "number"), DOMINO_TREES)
def test_domino_trees_equal_the_reference(model, case, number):
    expected = case["trees"][number]
    head = DominoHead(model, case, expected["normaliser_candidates"])
    scorer, root = Causal(head, expected["effective_k"]), torch.tensor([case["root"]])
    tree = CoreGrower(scorer.levels).grow(recipe_of(expected), scorer, root)
    count = len(expected["parents"])
    assert tree.token[0, 1:count].tolist() == expected["tokens"]
    assert tree.parent[0, :count].tolist() == expected["parents"]
    assert tree.depth[0, 1:count].tolist() == expected["depths"]
    scores = torch.tensor(expected["scores"])
    torch.testing.assert_close(tree.score[0, :count], scores, atol=TOLERANCE, rtol=0)
    assert (tree.parent[0, count:] == -1).all()


@pytest.fixture(scope="module")
def counted_models(tmp_path_factory):
    """The model of the golden documents at an order: in the core, and in a dictionary."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(order: int) -> tuple[_core.NgramModel, CountedNgrams]:
        path = build(folder / f"{order}.ngram", documents(), order)
        return _core.NgramModel.open(str(path)), CountedNgrams.of_documents(documents(), order)

    return make


def likeliest(model, context: torch.Tensor) -> torch.Tensor:
    """The token [bs] that follows each context [bs, T] most often."""
    found = [model.continuations(row)[:2] for row in context.tolist()]
    return torch.tensor([int(token[count.argmax()]) if len(token) else 0 for token, count in found])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("order", [2, 3, 4, 5, 6])
def test_continuity_around_any_scorer(name, order, counted_models):
    """Against the torch scorer. Logarithms may differ in the last bit, so scores are compared.

    Five levels: a context crosses from the committed tokens into the path, at every order.
    """
    model, counted = counted_models(order)
    seen = sorted(path for path in counted.counts if len(path) == order)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        # As many tokens as count: what follows is in the model only with all of them.
        tail = torch.tensor([seen[seed * 7][: order - 1], seen[seed * 11][: order - 1]])
        token = torch.rand(2, 5, 200, generator=generator).argsort(dim=-1)[..., :12]
        # What was seen to follow is among the candidates.
        token[:, 0, 0] = torch.tensor([seen[seed * 7][-1], seen[seed * 11][-1]])
        for level in range(1, 5):
            token[:, level, 0] = likeliest(model, torch.cat([tail, token[:, :level, 0]], dim=1))
        log_prob = -3 * torch.rand(2, 5, 12, generator=generator).sort(dim=-1).values
        candidates, recipe = Candidates(token, log_prob), recipe_named(name, 40, 6, 5)
        grower = CoreGrower(5, ngram=model, ngram_weight=0.5, threads=2)
        got = [
            grower.plan(recipe, candidates, tail[:, -1], tail[:, 0], tail=tail)[0],
            grower.grow(recipe, PathScorer(candidates), tail[:, -1], tail=tail),
        ]
        for tree, scorer in zip(got, (Marginal, PathScorer), strict=True):
            continued = Continuity(scorer(candidates), counted, tail, 0.5)
            expected = torch_tree(continued, recipe, tail[:, -1])
            for request in range(2):
                torch.testing.assert_close(
                    tree.score[request].sort().values,
                    expected.score[request].sort().values,
                    atol=1e-5,
                    rtol=0,
                )


@pytest.mark.parametrize("bs", [1, 3, 17, 65])
def test_threads_and_order_of_requests_change_nothing(make_candidates, golden, bs):
    model = _core.NgramModel.open(str(golden / "dart/ngram_order3.trie"))
    candidates, root = make_candidates(bs, 6, 10, 5), torch.arange(bs) % 200
    order = torch.randperm(bs, generator=torch.Generator().manual_seed(2))
    shuffled = Candidates(candidates.token[order], candidates.log_prob[order])
    settings = {"ngram": model, "ngram_weight": 0.5}
    one, many = CoreGrower(6, threads=1, **settings), CoreGrower(6, threads=4, **settings)
    tail, recipe = torch.stack([root + 1, root], dim=1), beam(60, 20)
    expected, packed = one.plan(recipe, candidates, root, root, tail=tail)
    for _ in range(3):
        again, _ = many.plan(recipe, candidates, root, root, tail=tail)
        assert_same_tree(again, expected)
    moved, moved_packed = many.plan(recipe, shuffled, root[order], root[order], tail=tail[order])
    assert_same_tree(moved, Tree(*(c[order] for c in vars(expected).values())))
    assert_same_packed(moved_packed, PackedTree(*(c[order] for c in vars(packed).values())))


def test_an_empty_batch_and_a_budget_that_candidates_cannot_fill(make_candidates, check):
    none = make_candidates(1, 3, 4, 0)
    none = Candidates(none.token[:0], none.log_prob[:0])
    root = torch.zeros(0, dtype=torch.int64)
    assert CoreGrower(3).plan(beam(5, 2), none, root, root)[0].token.shape == (0, 6)
    two, root = make_candidates(2, 2, 2, 0), torch.zeros(2, dtype=torch.int64)
    tree, _ = CoreGrower(2).plan(best_first(65), two, root, root)
    check(tree)
    assert (tree.parent >= 0).sum(dim=1).tolist() == [6, 6]


def test_growth_stops_when_nothing_more_can_be_kept():
    """Level 1 fills the budget of 2; what follows costs 9 or more."""
    log_prob = torch.tensor([[[-1.0, -2.0], [-9.0, -9.0], [-1.0, -1.0]]])
    candidates = Candidates(torch.tensor([[[1, 2], [1, 2], [1, 2]]]), log_prob)

    class Counting(PathScorer):
        asked = 0

        def score(self, level: int) -> Children:
            self.asked += 1
            return super().score(level)

    scorer = Counting(candidates)
    tree = CoreGrower(3).grow(best_first(2), scorer, torch.tensor([0]))
    assert tree.token.tolist() == [[0, 1, 2]]
    assert scorer.asked == 2


@pytest.mark.parametrize("impl", ["cpp", "auto"])
def test_prune_refuses_scores_that_rise(impl):
    column = torch.tensor([[0, 1, 2]])
    parent, depth = torch.tensor([[-1, 0, 1]]).int(), torch.tensor([[0, 1, 2]]).int()
    rising = Ledger(column, parent, depth, torch.tensor([[0.0, -2.0, -1.0]]))
    with pytest.raises(ValueError, match="ledger node 2 outranks its parent 1"):
        prune(rising, 1, impl=impl)


def test_pack_refuses_a_parent_that_comes_later():
    parent, depth = torch.tensor([[-1, 2, 0]]).int(), torch.tensor([[0, 2, 1]]).int()
    tree = Tree(torch.tensor([[5, 6, 7]]), parent, depth, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="node 1 has parent 2; expected -1 or an earlier node"):
        pack(tree, torch.tensor([4]), impl="cpp")


def test_calls_from_several_threads(make_candidates):
    candidates, root = make_candidates(9, 6, 10, 5), torch.arange(9)
    grower, recipe = CoreGrower(6, threads=3), beam(60, 20)
    expected, _ = grower.plan(recipe, candidates, root, root)
    failures = []

    def work() -> None:
        for _ in range(50):
            tree, _ = grower.plan(recipe, candidates, root, root)
            if not torch.equal(tree.score, expected.score):
                failures.append(tree)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_a_forked_child_makes_its_own_threads(make_candidates):
    candidates, root = make_candidates(9, 3, 4, 5), torch.arange(9)
    old = CoreGrower(3, threads=2)
    old.plan(beam(5, 2), candidates, root, root)
    child = os.fork()
    if not child:
        try:
            old.plan(beam(5, 2), candidates, root, root)
        except RuntimeError as error:
            fresh, _ = CoreGrower(3, threads=2).plan(beam(5, 2), candidates, root, root)
            os._exit(0 if "after fork()" in str(error) and fresh.width == 6 else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
