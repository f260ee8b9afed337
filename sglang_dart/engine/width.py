"""The rows a request of each round: constant, or chosen by what rounds have brought and taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from sglang_dart.engine.mark import HostMark, Mark, host_copy
from sglang_dart.round import Verdict
from sglang_dart.tree.budget import AdaptiveWidth, accepted_ranks
from sglang_dart.types import Tree

# Requests of a round whose acceptance is looked at: enough to know it, few enough to copy and walk.
LOOKED_AT = 16


class RoundWidth:
    """Tells each round its width, and whether the next one needs a draft.

    A device works behind the host. What a round took and brought is therefore learned later, at the
    first round that begins after the device is done with it; nothing waits.
    """

    def __init__(
        self,
        ceiling: int,
        *,
        rows: int | None = None,
        adaptive: AdaptiveWidth | None = None,
        mark: Callable[[], Mark] = HostMark,
    ) -> None:
        """`ceiling`: the widest tree; rows: what a step may hold, all requests together.

        mark: marks the work that was given out so far.
        """
        self._ceiling = ceiling
        self._rows = rows
        self._adaptive = adaptive
        self._mark = mark
        self._drafted = True
        self._began: tuple[Mark, list[int], int] | None = None
        # What there is to learn, and when, in the order of the marks.
        self._lessons: deque[tuple[Mark, Callable[[], None]]] = deque()

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width that a round may have, ascending."""
        if self._adaptive is not None:
            return self._adaptive.widths
        return (self._ceiling,) if self._rows is None else tuple(range(1, self._ceiling + 1))

    def interrupt(self) -> None:
        """A prefill comes between two rounds: the time from one to the other says nothing."""
        self._began = None

    def begin(self, row: list[int]) -> tuple[int, bool]:
        """The width of a round of these requests, and whether the next one needs a draft."""
        if self._adaptive is None:
            share = self._ceiling if self._rows is None else max(1, self._rows // len(row))
            return min(self._ceiling, share), True
        now = self._mark()
        if self._began is not None:
            before, rows, width = self._began
            if rows == row:
                self._lessons.append((now, partial(self._learn_cost, before, now, row, width)))
        self._learn()
        width = self._adaptive.choose(len(row))
        draft = not self._adaptive.resting
        if not self._drafted:
            # The last round left nothing to grow a tree from.
            width = 1
        self._drafted = draft
        self._began = now, row, width
        return width, draft

    def expected(self, requests: int, width: int) -> tuple[float, float] | None:
        """Tokens of a request and seconds of such a round, if widths are chosen by them."""
        if self._adaptive is None:
            return None
        return (
            self._adaptive.acceptance.tokens(width),
            self._adaptive.cost.seconds(requests, width),
        )

    def end(self, tree: Tree, value: Callable[[Tree], torch.Tensor], verdict: Verdict) -> None:
        """Take note of a round's trees; value(tree) [bs, N] is what ranks their nodes."""
        if self._adaptive is None or tree.width == 1:
            return
        columns = (tree.token, tree.parent, value(tree), verdict.token, verdict.length)
        seen = [host_copy(column[:LOOKED_AT]) for column in columns]
        self._lessons.append((self._mark(), partial(self._learn_acceptance, *seen)))

    def _learn(self) -> None:
        while self._lessons and self._lessons[0][0].reached():
            self._lessons.popleft()[1]()

    def _learn_cost(self, start: Mark, end: Mark, row: list[int], width: int) -> None:
        assert self._adaptive is not None
        self._adaptive.cost.observe(len(row), width, end.seconds_since(start))

    def _learn_acceptance(
        self,
        token: torch.Tensor,
        parent: torch.Tensor,
        value: torch.Tensor,
        run: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        assert self._adaptive is not None
        columns = zip(token.numpy(), parent.numpy(), value.numpy(), strict=True)
        runs = zip(run.tolist(), length.tolist(), strict=True)
        ranks = [
            accepted_ranks(nodes, parents, score, run[:length])
            for (nodes, parents, score), (run, length) in zip(columns, runs, strict=True)
        ]
        self._adaptive.acceptance.observe(ranks, token.shape[1])
