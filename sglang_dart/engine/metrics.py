"""Gauges of ours beside SGLang's: what the trees' depths were worth."""

from __future__ import annotations

from typing import Any


class AcceptMetrics:
    """Accepted nodes by depth, for Prometheus when the server exports metrics.

    `sglang_dart:rounds_total` counts verified trees and `sglang_dart:accepted_total{depth="d"}`
    those whose accepted path reached depth d: their ratio is the acceptance at that depth, and
    the sum of the ratios plus 1 is the accept length.
    """

    def __init__(self, levels: int, server_args: Any) -> None:
        self.reached = [0] * (levels + 1)
        self._rounds = self._accepted = None
        if server_args.enable_metrics:
            from prometheus_client import Counter

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

    def count(self, accepted: list[int]) -> None:
        """Add one verify step: the accepted drafts (bonus excluded) of each request."""
        if self._rounds is not None:
            self._rounds.inc(len(accepted))
        for depth in accepted:
            self.reached[depth] += 1
            if self._accepted is not None:
                for counter in self._accepted[:depth]:
                    counter.inc()
