"""N-gram continuity: counts and lookups against the release, contexts along every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dart.score.continuity import Continuity, CountedNgrams
from sglang_dart.score.marginal import Marginal
from sglang_dart.score.scorer import Children
from sglang_dart.types import Candidates


def test_counts_equal_the_release(golden_json, golden_ngram):
    corpora = {"ngram_order3.trie": golden_json("dart/ngram_corpus.json")}
    small = golden_json("dart/ngram_small_corpora.json")
    for order in (2, 4):
        corpora[f"ngram_order{order}_small.trie"] = {
            "order": order,
            "documents": small[str(order)],
        }
    for name, corpus in corpora.items():
        built = CountedNgrams.of_documents(corpus["documents"], corpus["order"])
        assert built.counts == golden_ngram(name).counts
        assert built.order == golden_ngram(name).order


def test_lookups_equal_the_release(golden_json, golden_ngram):
    queries = golden_json("dart/ngram_queries.json")
    assert len(queries) == 210
    for query in queries:
        model = golden_ngram(query["trie"])
        found = model.lookup(tuple(query["context"]), query["candidates"])
        assert [length for _, length in found] == query["matched_len"]
        expected = np.array(query["prob"], dtype=np.float32)
        assert np.array_equal(np.array([p for p, _ in found], dtype=np.float32), expected)


class Recorder:
    """An n-gram model that believes everything and keeps the contexts it was asked for."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.contexts: list[torch.Tensor] = []

    def probability(self, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        self.contexts.append(context)
        assert token.shape[:-1] == context.shape[:-1]
        return torch.ones(token.shape)


@pytest.mark.parametrize("order", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("history", [1, 2, 9])
def test_context_crosses_into_the_path(order, history):
    candidates = Candidates(
        token=torch.arange(100, 112).view(1, 4, 3).expand(2, 4, 3),
        log_prob=torch.zeros(2, 4, 3),
    )
    committed = torch.stack([torch.arange(10, 10 + history), torch.arange(50, 50 + history)])
    padding = torch.full((2, max(0, order - 1 - history)), -1)
    tail = torch.cat([padding, committed], dim=1)
    model = Recorder(order)
    scorer = Continuity(Marginal(candidates), model, tail, weight=1.0)
    paths = [[row] for row in tail.tolist()]  # per request, the full text of each path
    frontier = 1
    for level in range(4):
        token, _ = scorer.score(level)
        if level:
            seen = model.contexts[-1]
            assert seen.shape == (2, frontier, order - 1)
            for i in range(2):
                assert seen[i].tolist() == [path[-(order - 1) :] for path in paths[i]]
        else:
            assert not model.contexts
        # Two survivors; the second follows the last path, with another token.
        parent = torch.tensor([[0, frontier - 1], [frontier - 1, 0]])
        chosen = torch.tensor([[0, 2], [1, 0]])
        following = token.expand(2, frontier, 3)[torch.arange(2)[:, None], parent, chosen]
        scorer.advance(parent, following)
        paths = [
            [
                [*paths[i][p], t]
                for p, t in zip(parent[i].tolist(), following[i].tolist(), strict=True)
            ]
            for i in range(2)
        ]
        frontier = 2


def test_adds_the_weighted_logarithm():
    model = CountedNgrams.of_documents([[7, 1], [7, 1], [7, 2], [7, 2]], order=3)
    candidates = Candidates(
        token=torch.tensor([[[7, 1], [1, 3]]]),
        log_prob=torch.tensor([[[-0.5, -1.5], [-1.0, -2.0]]]),
    )
    scorer = Continuity(Marginal(candidates, 0.9), model, torch.tensor([[-1, 5]]), weight=0.5)
    token, step = scorer.score(0)
    assert step.tolist() == [[[-0.5, -1.5]]]
    scorer.advance(torch.tensor([[0]]), token[:, :, 0])
    _, step = scorer.score(1)
    expected = [-1.0 * 0.9 + 0.5 * np.log(0.5), -2.0 * 0.9 + 0.5 * np.log(1e-10)]
    np.testing.assert_allclose(step[0, 0], expected, rtol=1e-6)


class Forked:
    """A scorer whose children depend on the path: each path repeats its own token."""

    levels = 3

    def __init__(self) -> None:
        self.token = torch.tensor([[3]])

    def score(self, level: int) -> Children:
        token = torch.stack([self.token, self.token + 1], dim=-1)
        return Children(token, torch.zeros(token.shape))

    def advance(self, parent: torch.Tensor, token: torch.Tensor) -> None:
        self.token = token


def test_wraps_a_causal_scorer():
    model = CountedNgrams.of_documents([[3, 3], [4, 5]], order=2)
    scorer = Continuity(Forked(), model, torch.tensor([[3]]), weight=1.0)
    token, _ = scorer.score(0)
    scorer.advance(torch.tensor([[0, 0]]), token[0])
    token, step = scorer.score(1)
    assert token.tolist() == [[[3, 4], [4, 5]]]
    half, unseen = np.log(0.5), np.log(1e-10)
    np.testing.assert_allclose(step[0], [[half, unseen], [unseen, 0]], rtol=1e-6)
