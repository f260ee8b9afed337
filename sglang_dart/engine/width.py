"""The rows a request of each round: constant, or chosen by what rounds have brought and taken."""

from __future__ import annotations

import time

import torch

from sglang_dart.round import Verdict
from sglang_dart.tree.budget import AdaptiveWidth, accepted_ranks
from sglang_dart.types import Tree


class RoundWidth:
    """Tells each round its width, and whether the next one needs a draft."""

    def __init__(
        self, ceiling: int, *, rows: int | None = None, adaptive: AdaptiveWidth | None = None
    ) -> None:
        """`ceiling`: the widest tree; rows: what a step may hold, all requests together."""
        self._ceiling = ceiling
        self._rows = rows
        self._adaptive = adaptive
        self._drafted = True
        self._began: tuple[float, list[int], int] | None = None

    def interrupt(self) -> None:
        """A prefill comes between two rounds: the time from one to the other says nothing."""
        self._began = None

    def begin(self, row: list[int]) -> tuple[int, bool]:
        """The width of a round of these requests, and whether the next one needs a draft."""
        if self._adaptive is None:
            share = self._ceiling if self._rows is None else max(1, self._rows // len(row))
            return min(self._ceiling, share), True
        now = time.perf_counter()
        if self._began is not None:
            before, rows, width = self._began
            if rows == row:
                self._adaptive.cost.observe(len(row), width, now - before)
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

    def end(self, tree: Tree, value: torch.Tensor, verdict: Verdict) -> None:
        """Learn from a round's trees; value [bs, N] is what ranks their nodes. All on the host."""
        if self._adaptive is None or tree.width == 1:
            return
        columns = zip(tree.token.numpy(), tree.parent.numpy(), value.numpy(), strict=True)
        runs = zip(verdict.token.tolist(), verdict.length.tolist(), strict=True)
        self._adaptive.acceptance.observe(
            [
                accepted_ranks(token, parent, score, run[:length])
                for (token, parent, score), (run, length) in zip(columns, runs, strict=True)
            ],
            tree.width,
        )
