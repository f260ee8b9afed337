"""Figures of a run, each with one definition: accept length, throughput, percentiles, mismatches.

Accept length τ = tokens committed per round (draft, verify, accept), the bonus token included. A
round that accepts i drafts commits i + 1 tokens; the token that prefill yields belongs to no round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Acceptance:
    """Accepted drafts per round. histogram[i] counts the rounds that accepted i drafts."""

    histogram: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Acceptance:
        """From SGLang's per-request meta data; without speculation, no round."""
        return cls(list(meta.get("spec_correct_drafts_histogram") or []))

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def tokens(self) -> int:
        """Tokens committed by the rounds."""
        return sum((drafts + 1) * count for drafts, count in enumerate(self.histogram))

    @property
    def length(self) -> float | None:
        """Accept length τ; None without a round."""
        return self.tokens / self.rounds if self.rounds else None

    def reach(self) -> list[float]:
        """reach[l]: share of rounds in which level l's draft was accepted."""
        left = self.rounds
        shares = []
        for count in self.histogram[:-1]:
            left -= count
            shares.append(left / self.rounds)
        return shares

    def __add__(self, other: Acceptance) -> Acceptance:
        short, long = sorted((self.histogram, other.histogram), key=len)
        total = list(long)
        for drafts, count in enumerate(short):
            total[drafts] += count
        return Acceptance(total)


def micro_length(answers: Iterable[Acceptance]) -> float | None:
    """τ over all rounds together: long answers count more. None without a round."""
    return sum(answers, Acceptance()).length


def macro_length(answers: Iterable[Acceptance]) -> float | None:
    """Mean of each answer's τ: every answer counts alike. None without a round."""
    lengths = [answer.length for answer in answers if answer.length is not None]
    return float(np.mean(lengths)) if lengths else None


def percentiles(values: Sequence[float], ranks: Sequence[float] = (50, 90, 99)) -> list[float]:
    """Percentiles with linear interpolation; NaN for no value."""
    if not values:
        return [float("nan")] * len(ranks)
    return [float(value) for value in np.percentile(values, ranks)]


# Logit gap up to which a difference counts as an arithmetic near-tie: verifying several rows in
# one matrix product rounds differently from one row. Measured (benchmarks/near_ties.py) with
# SmolLM2-135M on a CPU, 3024 positions, largest movement of a gap: float32 7.6e-5, bfloat16 0.50.
# float16: the same as bfloat16, with 8 times finer steps, twice over.
TIE_TOLERANCE = {"float32": 1e-4, "float16": 2**-5, "bfloat16": 0.51}


@dataclass(frozen=True)
class Mismatch:
    """The first place where an answer leaves plain decoding.

    position: index in the answer. expected, got: token ids, None where that answer had ended.
    top_gap: logit of the target's best token minus that of its second best.
    got_gap: logit of the target's best token minus that of `got`.
    """

    position: int
    expected: int | None
    got: int | None
    top_gap: float | None = None
    got_gap: float | None = None

    def near_tie(self, tolerance: float) -> bool:
        """True if both tokens are the target's best within the tolerance.

        An answer that ends where the other goes on is never one: the ends are tokens too, so a tie
        there shows as two tokens.
        """
        gaps = (self.top_gap, self.got_gap)
        return all(gap is not None and gap <= tolerance for gap in gaps)


def first_difference(
    expected: Sequence[int], got: Sequence[int], finish: tuple[str, str] = ("", "")
) -> Mismatch | None:
    """Compare token ids, and then the reasons to finish (expected, got); None if all is equal."""
    for position, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return Mismatch(position, a, b)
    common = min(len(expected), len(got))
    if len(expected) != len(got) or finish[0] != finish[1]:
        return Mismatch(
            common,
            expected[common] if common < len(expected) else None,
            got[common] if common < len(got) else None,
        )
    return None
