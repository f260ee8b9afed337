"""What rounds take and bring is learned without waiting for a device that works behind the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dart.engine.adaptivity import why_constant
from sglang_dart.engine.width import LOOKED_AT, RoundWidth
from sglang_dart.options import DartOptions
from sglang_dart.round import Verdict
from sglang_dart.tree.budget import AdaptiveWidth, short_ladder
from sglang_dart.types import Tree

ROOT = 7


class Device:
    """A device whose marks are reached `lag` marks later, and whose clock only its work moves."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.time = 0.0
        self.marks = 0

    def mark(self) -> Any:
        device, time, number = self, self.time, self.marks
        self.marks += 1

        class At:
            when = time

            def reached(self) -> bool:
                return device.marks > number + device.lag

            def seconds_since(self, earlier: Any) -> float:
                assert self.reached(), "a wait"
                return self.when - earlier.when

        return At()


def chain(width: int, requests: int) -> Tree:
    """Every node under the one before it, the token of each its rank; scores fall with it."""
    node = torch.arange(width).expand(requests, width)
    token = torch.where(node == 0, ROOT, 100 + node)
    return Tree(token, (node - 1).int(), node.int(), -node.float())


def verdict(accepted: list[int], width: int) -> Verdict:
    token = 101 + torch.arange(width).repeat(len(accepted), 1)
    for row, length in zip(token, accepted, strict=True):
        row[length] = ROOT
    nothing = torch.empty(0)
    return Verdict(token, torch.tensor(accepted) + 1, nothing, nothing)


def value(tree: Tree) -> torch.Tensor:
    return tree.score


class Server:
    """Rounds of `requests` requests, of which each accepts a node with chance `acceptance`."""

    def __init__(
        self, seconds: Callable[[int, int], float], draft_seconds: float, lag: int, **fields: Any
    ) -> None:
        self.seconds = seconds
        self.draft_seconds = draft_seconds
        self.device = Device(lag)
        self.chosen = AdaptiveWidth(short_ladder(61), seconds, **fields)
        self.width = RoundWidth(61, adaptive=self.chosen, mark=self.device.mark)
        self.dice = np.random.default_rng(0)
        self.widths: list[int] = []

    def run(self, rounds: int, requests: int, acceptance: float) -> float:
        """Tokens a second of one request."""
        tokens, since = 0, self.device.time
        for _ in range(rounds):
            width, draft = self.width.begin(list(range(requests)))
            self.widths.append(width)
            lengths = self.dice.geometric(1 - acceptance, requests) - 1 if acceptance else 0
            accepted = np.minimum(np.broadcast_to(lengths, requests), width - 1).tolist()
            tokens += sum(accepted) + requests
            self.width.end(chain(width, requests), value, verdict(accepted, width))
            self.device.time += self.seconds(requests, width) + draft * self.draft_seconds
        return tokens / requests / (self.device.time - since)


def gpu(plain: float, knee: int) -> Callable[[int, int], float]:
    """Reads weights in `plain` seconds; from `knee` rows on, rows cost in proportion."""
    return lambda requests, width: plain * max(1.0, requests * width / knee) * (1 + 0.001 * width)


@settings(max_examples=40, deadline=None)
@given(
    plain=st.floats(0.002, 0.05),
    knee=st.sampled_from([32, 128, 200, 400]),
    draft=st.floats(0.0, 0.3),
    requests=st.integers(1, 48),
    lag=st.integers(0, 6),
)
def test_a_drafter_that_finds_nothing_costs_almost_nothing(plain, knee, draft, requests, lag):
    """Accept length 1.0: plain decoding within a few rounds, and at least 0.95 of its speed."""
    server = Server(gpu(plain, knee), draft * plain, lag)
    server.run(200, requests, 0.0)
    assert server.run(1500, requests, 0.0) >= 0.95 / gpu(plain, knee)(requests, 1)
    assert server.widths.count(1) > 0.9 * len(server.widths)


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_good_drafter_gets_wide_trees_alone_and_narrow_ones_under_load(lag: int) -> None:
    seconds = gpu(0.005, 200)
    server = Server(seconds, 0.0005, lag)
    widest = {}
    for requests in (1, 16, 100):
        server.run(400, requests, 0.8)
        speed = server.run(400, requests, 0.8)
        best = max(
            sum(0.8**n for n in range(w)) / (seconds(requests, w) + 0.0005)
            for w in server.chosen.widths
        )
        assert speed > 0.93 * best
        widest[requests] = math.ceil(np.median(server.widths[-400:]))
    assert widest[1] > widest[16] > widest[100]


def test_what_is_not_captured_is_never_chosen() -> None:
    server = Server(gpu(0.005, 10**6), 0.0, 1, fits=lambda requests, width: requests * width <= 100)
    for requests in (1, 3, 12, 25, 60, 101, 1, 30, 3):
        start = len(server.widths)
        server.run(300, requests, 0.95)
        used = set(server.widths[start:])
        assert all(width == 1 or requests * width <= 100 for width in used)
        fitting = [w for w in server.chosen.widths if w == 1 or requests * w <= 100]
        # Rows are free here: the widest that fits is the best.
        assert np.median(server.widths[-100:]) >= fitting[max(0, len(fitting) - 3)]


@pytest.mark.parametrize("lag", [0, 2, 5])
def test_times_are_those_of_the_widths_that_took_them(lag: int) -> None:
    """Behind the host or not, a round's time is never another round's."""
    server = Server(lambda requests, width: 0.001 * width, 0.0, lag)
    server.run(50, 2, 0.5)
    for width in set(server.widths[:-10]):
        assert server.chosen.cost.seconds(2, width) == pytest.approx(0.001 * width)


def test_nothing_is_learned_from_a_round_that_a_prefill_has_stretched() -> None:
    server = Server(lambda requests, width: 0.001 * width, 0.0, 1)
    for _ in range(50):
        server.run(1, 2, 0.5)
        server.device.time += 10.0
        server.width.interrupt()
    server.run(50, 2, 0.5)
    assert all(server.chosen.cost.seconds(2, w) < 1.0 for w in server.chosen.widths)


def test_acceptance_is_learned_from_some_requests_of_a_batch() -> None:
    server = Server(gpu(0.005, 10**6), 0.0, 2)
    width, _ = server.width.begin([0] * 2 * LOOKED_AT)
    accepted = [2] * LOOKED_AT + [60] * LOOKED_AT
    for _ in range(40):
        server.width.end(chain(width, len(accepted)), value, verdict(accepted, width))
        server.width.begin([0] * 2 * LOOKED_AT)
    assert server.chosen.acceptance.tokens(width) == pytest.approx(3, abs=0.1)


def test_a_simulated_run_that_leaves_the_tree_is_no_error() -> None:
    server = Server(gpu(0.005, 10**6), 0.0, 0)
    width, _ = server.width.begin([0])
    strange = Verdict(torch.full((1, width), 5), torch.tensor([4]), torch.empty(0), torch.empty(0))
    server.width.end(chain(width, 1), value, strange)
    server.width.begin([0])
    assert server.chosen.acceptance.tokens(2) < 1.5


def test_the_widths_that_a_round_may_have() -> None:
    assert RoundWidth(61).widths == (61,)
    assert RoundWidth(4, rows=8).widths == (1, 2, 3, 4)
    assert Server(gpu(0.005, 200), 0.0, 0).width.widths == (1, 4, 8, 16, 32, 61)


def test_a_constant_width_marks_and_learns_nothing() -> None:
    width = RoundWidth(8, mark=lambda: pytest.fail("a mark"))
    for _ in range(3):
        assert width.begin([0, 1]) == (8, True)
        width.end(chain(8, 2), lambda tree: pytest.fail("a value"), verdict([0, 3], 8))
    assert width.expected(2, 8) is None


def args(**fields: Any) -> Any:
    return SimpleNamespace(**({"enable_deterministic_inference": False, "tp_size": 1} | fields))


def test_what_keeps_the_width_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dart.engine import adaptivity

    monkeypatch.setattr(adaptivity, "check_cuda_graph_backend", lambda phase, backend: False)
    options = DartOptions()
    assert why_constant(options, "cuda", args()) is None
    assert why_constant(options, "cpu", args()) is None
    assert why_constant(DartOptions(adaptive=False), "cuda", args()) == '"adaptive" is false'
    assert why_constant(DartOptions(cpu_rows=64), "cpu", args()) == '"cpu_rows" is 64'
    assert why_constant(DartOptions(cpu_rows=64), "cuda", args()) is None
    assert why_constant(options, "cuda", args(enable_deterministic_inference=True)) is not None
    assert why_constant(options, "cuda", args(tp_size=2)) is not None
    monkeypatch.setattr(adaptivity, "check_cuda_graph_backend", lambda phase, backend: True)
    assert why_constant(options, "cuda", args()) == "there are no CUDA graphs"
    assert why_constant(options, "cpu", args()) is None
    monkeypatch.setattr(adaptivity, "SIMULATE_ACC_LEN", 4.5)
    assert "SGLANG_SIMULATE_ACC_LEN" in str(why_constant(options, "cpu", args()))
    monkeypatch.setattr(adaptivity, "SIMULATE_ACC_LEN", 1.0)
    assert why_constant(options, "cpu", args()) is None
