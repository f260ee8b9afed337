"""N-gram continuity for any scorer: candidates that seldom follow the path are worth less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import torch

from sglang_dart.score.scorer import Children, Scorer, follow

# Keeps the logarithm of an unseen continuation finite; the value of the DART release.
EPSILON = 1e-10
# The first level follows the root, which the drafter has read: it needs no help.
FIRST_LEVEL = 1


class NgramModel(Protocol):
    """How often a token followed a context, in some corpus."""

    order: int
    """Longest n-gram; at most order - 1 tokens of context count."""

    def probability(self, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Probability [..., K] float32 of each token [..., K] after its context [..., T].

        Contexts end with their newest token; -1 stands where there are fewer tokens.
        """


class Continuity:
    """Adds weight * log(P(token | newest tokens) + 1e-10) to another scorer's steps.

    The context crosses from the committed tokens into the drafted path. The first level is left
    to the other scorer alone. Source: arXiv 2601.19278 and its released search.
    """

    def __init__(
        self, scorer: Scorer, model: NgramModel, tail: torch.Tensor, weight: float
    ) -> None:
        """`tail` [bs, T] int64: newest committed tokens, root last, -1 where there are fewer."""
        self.levels = scorer.levels
        self._scorer = scorer
        self._model = model
        self._weight = weight
        self._context = tail[:, None, max(0, tail.shape[1] - model.order + 1) :]

    def score(self, level: int) -> Children:
        """Children after each path: [bs, P, K]."""
        token, step = self._scorer.score(level)
        if level < FIRST_LEVEL:
            return Children(token, step)
        token = token.expand(-1, self._context.shape[1], -1)
        probability = self._model.probability(self._context, token)
        return Children(token, step + torch.log(probability + EPSILON) * self._weight)

    def advance(self, parent: torch.Tensor, token: torch.Tensor) -> None:
        """Shift each path's newest token into its context."""
        self._scorer.advance(parent, token)
        context = torch.cat([follow(self._context, parent), token[..., None]], dim=-1)
        self._context = context[..., max(0, context.shape[-1] - self._model.order + 1) :]


class CountedNgrams:
    """An n-gram model in a dictionary: small, for study and as the oracle of faster ones.

    counts: how often each path of up to `order` tokens occurred. Every position of a document
    counts the prefixes of the window that begins there. The estimate is a plain ratio from the
    longest known context that the candidate has followed, without discount.
    """

    def __init__(self, order: int, counts: Mapping[tuple[int, ...], int]) -> None:
        self.order = order
        self.counts = counts
        self._after: dict[tuple[int, ...], dict[int, float]] = {}
        for path, count in counts.items():
            if path:
                # Reciprocal first: a direct division differs in the last bit.
                ratio = np.float32(count) * (np.float32(1) / np.float32(counts[path[:-1]]))
                self._after.setdefault(path[:-1], {})[path[-1]] = float(ratio)

    @classmethod
    def of_documents(cls, documents: Iterable[list[int]], order: int) -> CountedNgrams:
        """Count documents of token ids."""
        counts: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            for begin in range(len(document)):
                window = tuple(document[begin : begin + order])
                counts.update(window[:size] for size in range(len(window) + 1))
        return cls(order, counts)

    def lookup(self, context: tuple[int, ...], tokens: Iterable[int]) -> list[tuple[float, int]]:
        """Each token's probability and how many tokens of context it rests on; (0, 0) if unseen."""
        lengths = range(min(self.order - 1, len(context)), 0, -1)
        tables = [(self._after.get(context[-length:], {}), length) for length in lengths]
        return [
            next(((table[token], length) for table, length in tables if token in table), (0.0, 0))
            for token in tokens
        ]

    def probability(self, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """See NgramModel. Runs in Python, path by path."""
        rows = context.reshape(-1, context.shape[-1]).tolist()
        found = [
            [ratio for ratio, _ in self.lookup(tuple(t for t in row if t >= 0), candidates)]
            for row, candidates in zip(rows, token.flatten(0, -2).tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.float32, device=token.device).view(token.shape)
