"""Gauges of ours beside SGLang's: what the trees' depths were worth."""

from __future__ import annotations

from typing import Any


class RoundMetrics:
    """Accepted nodes by depth and widths of rounds, for Prometheus when the server exports metrics.

    `sglang_dart:rounds_total` counts verified trees and `sglang_dart:accepted_total{depth="d"}`
    those whose accepted path reached depth d: their ratio is the acceptance at that depth, and
    the sum of the ratios plus 1 is the accept length.
    `sglang_dart:steps_total{width="w"}` counts rounds whose trees had w nodes, 1 being plain
    decoding. Where the width follows the load, the gauges `sglang_dart:expected_tokens` and
    `sglang_dart:expected_seconds` are what it was chosen for: a request's tokens of a round, and
    the time of the round.
    """

    def __init__(self, levels: int, server_args: Any) -> None:
        self.reached = [0] * (levels + 1)
        self._rounds = self._accepted = self._steps = None
        if server_args.enable_metrics:
            from prometheus_client import Counter, Gauge

            labels = {"model_name": server_args.served_model_name}
            self._rounds = Counter(
                "sglang_dart:rounds", "Trees that the target has verified.", labels.keys()
            ).labels(**labels)
            accepted = Counter(
                "sglang_dart:accepted",
                "Verified trees whose accepted path reached this depth.",
                [*labels, "depth"],
            )
            self._accepted = [
                accepted.labels(**labels, depth=str(depth)) for depth in range(1, levels + 1)
            ]
            self._steps = Counter(
                "sglang_dart:steps", "Rounds by the width of their trees.", [*labels, "width"]
            )
            self._labels = labels
            self._tokens = Gauge(
                "sglang_dart:expected_tokens",
                "Tokens of a request that the last round was expected to commit.",
                labels.keys(),
            ).labels(**labels)
            self._seconds = Gauge(
                "sglang_dart:expected_seconds",
                "Time that the last round was expected to take.",
                labels.keys(),
            ).labels(**labels)

    def step(self, width: int, expected: tuple[float, float] | None) -> None:
        """Count a round of this width, and what it was chosen for: tokens, seconds."""
        if self._steps is None:
            return
        self._steps.labels(**self._labels, width=str(width)).inc()
        if expected is not None:
            self._tokens.set(expected[0])
            self._seconds.set(expected[1])

    def count(self, accepted: list[int]) -> None:
        """Add one verify step: the accepted drafts (bonus excluded) of each request."""
        if self._rounds is not None:
            self._rounds.inc(len(accepted))
        for depth in accepted:
            self.reached[depth] += 1
            if self._accepted is not None:
                for counter in self._accepted[:depth]:
                    counter.inc()
