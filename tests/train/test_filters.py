"""What stays out of training data."""

from __future__ import annotations

import pytest

from sglang_dart.exclusion import Exclusion
from sglang_dart.train.filters import Sieve, distinct_share

QUESTION = (
    "Darrell and Allen have ages in the ratio of seven to eleven; their total age now is 162."
)


def test_sieve_counts_every_reason() -> None:
    sieve = Sieve(Exclusion([QUESTION]), min_tokens=4, min_distinct=0.5)
    fresh = list(range(20))
    assert sieve.keeps([1], fresh, "a", "b")
    assert not sieve.keeps([1], fresh, "a", "b")
    assert not sieve.keeps([2], [1, 2, 3], "a", "b")
    assert not sieve.keeps([3], fresh, " ", "b")
    assert not sieve.keeps([4], [5, 6] * 10, "a", "b")
    assert not sieve.keeps([5], fresh, "x", QUESTION)
    assert sieve.refused == {"duplicate": 1, "empty": 2, "repetitive": 1, "evaluation overlap": 1}


def test_distinct_share() -> None:
    assert distinct_share([1, 2, 3]) == 1.0
    assert distinct_share([7] * 8) == pytest.approx(1 / 5)
    assert distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(4 / 5)
