"""The width that is chosen is the fastest one of a simulated server."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from sglang_dart.tree.budget import (
    LONGEST_PAUSE,
    TRY,
    TRY_COST,
    AdaptiveWidth,
    RankAcceptance,
    RoundCost,
    accepted_ranks,
    ladder,
)

WIDTHS = ladder(32)


def test_ladder() -> None:
    assert ladder(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert ladder(61)[-2:] == [48, 61]
    assert ladder(2) == [1, 2]
    assert ladder(1) == [1]


class Simulation:
    """Rounds whose time is seconds(requests, width) and whose node of rank r is accepted by chance.

    A path holds the ranks below a random one, as if every tree were a chain.
    """

    def __init__(
        self, chosen: AdaptiveWidth, seconds: Callable[[int, int], float], acceptance: float
    ) -> None:
        self.chosen = chosen
        self.seconds = seconds
        self.acceptance = acceptance
        self.dice = random.Random(0)
        self.widths: list[int] = []

    def run(self, rounds: int, requests: int = 1) -> float:
        """Tokens a second of one request."""
        took, tokens = 0.0, 0
        for _ in range(rounds):
            width = self.chosen.choose(requests)
            self.widths.append(width)
            took += self.seconds(requests, width)
            self.chosen.cost.observe(requests, width, self.seconds(requests, width))
            runs = [self._run(width) for _ in range(requests)]
            tokens += sum(map(len, runs)) + requests
            if width > 1:
                self.chosen.acceptance.observe(runs, width)
        return tokens / requests / took

    def _run(self, width: int) -> np.ndarray:
        length = 0
        while length < width - 1 and self.dice.random() < self.acceptance:
            length += 1
        return np.arange(1, length + 1)

    def best(self, requests: int = 1) -> tuple[float, int]:
        """Speed and width of the best constant choice."""
        return max(
            (sum(self.acceptance**n for n in range(width)) / self.seconds(requests, width), width)
            for width in WIDTHS
        )


def flat(requests: int, width: int) -> float:
    return 1 + 0.02 * requests * (width - 1)


def steep(requests: int, width: int) -> float:
    return 0.1 + 0.9 * requests * width


@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("seconds", [flat, steep])
@pytest.mark.parametrize("prior", [flat, steep, lambda requests, width: 0.0])
def test_nearly_as_fast_as_the_best_width(prior, seconds, acceptance, requests) -> None:
    simulation = Simulation(AdaptiveWidth(WIDTHS, prior), seconds, acceptance)
    simulation.run(300, requests)
    speed, _ = simulation.best(requests)
    assert simulation.run(1000, requests) > 0.93 * speed


def test_a_useless_drafter_costs_little() -> None:
    simulation = Simulation(AdaptiveWidth(WIDTHS, flat), flat, acceptance=0.0)
    simulation.run(100)
    assert simulation.run(2000) > 0.97
    assert simulation.chosen.resting


def test_a_drafter_that_becomes_useful_is_used() -> None:
    simulation = Simulation(AdaptiveWidth(WIDTHS, flat), flat, acceptance=0.0)
    simulation.run(400)
    simulation.acceptance = 0.8
    simulation.run(2 * LONGEST_PAUSE)
    speed, _ = simulation.best()
    assert simulation.run(200) > 0.9 * speed


def test_while_resting_nothing_need_be_drafted() -> None:
    """A width above 1 never comes as a surprise: the round before it was not resting."""
    simulation = Simulation(AdaptiveWidth(WIDTHS, flat), flat, acceptance=0.02)
    drafted, tries = True, 0
    for _ in range(3000):
        before = drafted
        simulation.run(1)
        drafted = not simulation.chosen.resting
        if simulation.widths[-1] > 1:
            assert before
            tries += not before
    assert simulation.widths[-1] in WIDTHS


def test_a_try_is_short_and_cheap() -> None:
    simulation = Simulation(AdaptiveWidth(WIDTHS, steep), steep, acceptance=0.0)
    simulation.run(2000)
    tries = [width for width in simulation.widths[200:] if width > 1]
    assert 0 < len(tries) <= 5 * TRY
    assert all(steep(1, width) <= TRY_COST * steep(1, 1) or width == 2 for width in tries)


def test_one_slow_round_excludes_no_width() -> None:
    cost = RoundCost(flat)
    for width in (1, 8, 16):
        for _ in range(5):
            cost.observe(1, width, flat(1, width))
    cost.observe(1, 12, 100.0)
    assert cost.seconds(1, 12) == pytest.approx(flat(1, 12))


def test_what_was_asked_before_changes_no_answer() -> None:
    dice = random.Random(0)
    asked, seen = RoundCost(flat), []
    for _ in range(300):
        seen.append((dice.randint(1, 6), dice.choice(WIDTHS), dice.random()))
        asked.observe(*seen[-1])
        fresh = RoundCost(flat)
        for one in seen:
            fresh.observe(*one)
        for case in ((dice.randint(1, 6), width) for width in WIDTHS):
            assert asked.seconds(*case) == fresh.seconds(*case)


def test_acceptance_is_that_of_every_narrower_tree() -> None:
    acceptance = RankAcceptance(7)
    for _ in range(500):
        acceptance.observe([np.array([1, 4])], width=8)
    assert [round(acceptance.tokens(width), 2) for width in (1, 2, 4, 5, 8)] == [1, 2, 2, 3, 3]
    # Unseen ranks keep what was assumed of them.
    assert RankAcceptance(7).tokens(8) == pytest.approx(1 + 0.5 * sum(1 / r for r in range(1, 8)))


def test_ranks_of_the_accepted_path() -> None:
    #      0
    #    1    2      tokens 5, 6
    #   3 4   5      tokens 7, 8, 7
    token = np.array([0, 5, 6, 7, 8, 7])
    parent = np.array([-1, 0, 0, 1, 1, 2], dtype=np.int32)
    score = np.array([0, -1, -2, -4, -3, -4], dtype=np.float32)
    assert accepted_ranks(token, parent, score, [5, 7, 99]).tolist() == [1, 4]
    assert accepted_ranks(token, parent, score, [6, 7, 99]).tolist() == [2, 5]
    assert accepted_ranks(token, parent, score, [99]).tolist() == []
