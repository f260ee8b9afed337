import math

import numpy as np
import pytest

from sglang_dart.measure.metrics import (
    TIE_TOLERANCE,
    Acceptance,
    Mismatch,
    first_difference,
    macro_length,
    micro_length,
    percentiles,
)


def test_accept_length_counts_the_bonus_token() -> None:
    # Rounds that accepted 0, 0, 2 and 3 drafts commit 1 + 1 + 3 + 4 tokens.
    acceptance = Acceptance([2, 0, 1, 1])
    assert acceptance.rounds == 4
    assert acceptance.tokens == 9
    assert acceptance.length == 9 / 4
    assert acceptance.reach() == [2 / 4, 2 / 4, 1 / 4]


def test_no_round_has_no_length() -> None:
    assert Acceptance.of({}).length is None
    assert micro_length([Acceptance()]) is None
    assert macro_length([]) is None


def test_sum_of_histograms_of_unequal_length() -> None:
    total = Acceptance([1, 2]) + Acceptance([5]) + Acceptance([0, 0, 7])
    assert total.histogram == [6, 2, 7]


def test_micro_weighs_rounds_and_macro_weighs_answers() -> None:
    answers = [Acceptance([9]), Acceptance([0, 0, 0, 1]), Acceptance()]
    assert micro_length(answers) == pytest.approx((9 * 1 + 1 * 4) / 10)
    assert macro_length(answers) == pytest.approx((1 + 4) / 2)


def test_percentiles() -> None:
    values = list(np.random.default_rng(0).normal(size=101))
    assert percentiles(values, [0, 50, 100]) == pytest.approx(
        [min(values), sorted(values)[50], max(values)]
    )
    assert all(math.isnan(value) for value in percentiles([]))


@pytest.mark.parametrize(
    ("expected", "got", "finish", "where"),
    [
        ([1, 2, 3], [1, 2, 3], ("length", "length"), None),
        ([], [], ("length", "length"), None),
        ([1, 2, 3], [1, 9, 3], ("length", "length"), Mismatch(1, 2, 9)),
        ([1, 2, 3], [1, 2], ("length", "stop"), Mismatch(2, 3, None)),
        ([1, 2], [1, 2, 3], ("stop", "length"), Mismatch(2, None, 3)),
        ([1, 2], [1, 2], ("stop", "length"), Mismatch(2, None, None)),
    ],
)
def test_first_difference(expected, got, finish, where) -> None:
    assert first_difference(expected, got, finish) == where


def test_near_tie_needs_both_gaps_within_tolerance() -> None:
    tolerance = TIE_TOLERANCE["float32"]
    assert Mismatch(0, 1, 2, 0.0, 0.0).near_tie(tolerance)
    assert Mismatch(0, 1, 2, tolerance, tolerance).near_tie(tolerance)
    # The two best tie, but the answer took a third token.
    assert not Mismatch(0, 1, 2, 0.0, 3.0).near_tie(tolerance)
    assert not Mismatch(0, 1, 2, 2 * tolerance, 2 * tolerance).near_tie(tolerance)
    # Never looked up, or an answer that ended early.
    assert not Mismatch(0, 1, 2).near_tie(tolerance)
    assert not Mismatch(0, 1, None, 0.0, None).near_tie(tolerance)
