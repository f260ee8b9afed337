"""Captured functions: sizes, filling up, buffers. A stand-in for graphs runs anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_dart.capture import Captured, Recording, tensors
from sglang_dart.types import Candidates


def replayer(run: Callable[[], Any]) -> Recording:
    """Replays by running again, into what the first run gave."""
    result = run()

    def replay() -> None:
        for held, fresh in zip(tensors(result), tensors(run()), strict=True):
            held.copy_(fresh)

    return replay, result


class Doubler:
    """Doubles tables [bs, W] and counts [bs], and remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, table: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, Candidates]:
        self.calls.append((table.clone(), count.clone()))
        return count * 2, Candidates(table * 2, table.float())


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def captured(doubler) -> Captured:
    made = Captured(doubler, batch(1), (1, 4, 2), replayer)
    assert [len(count) for _, count in doubler.calls] == [4, 2, 1], "the largest comes first"
    assert not any(count.any() for _, count in doubler.calls)
    doubler.calls.clear()
    return made


def batch(count: int, columns: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1, count * columns + 1).view(count, columns), torch.arange(1, count + 1)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 5)])
def test_next_size_filled_up_with_zeros(captured, doubler, count, size):
    table, number = batch(count)
    doubled, candidates = captured(table, number)
    assert torch.equal(doubled, number * 2)
    assert torch.equal(candidates.token, table * 2)
    assert candidates.carry is None
    seen_table, seen_number = doubler.calls[-1]
    assert seen_number.tolist() == number.tolist() + [0] * (size - count)
    assert not seen_table[count:].any()


def test_rows_of_a_larger_batch_are_cleared(captured, doubler):
    captured(*batch(4))
    captured(*batch(1))
    captured(*batch(3))
    assert doubler.calls[-1][1].tolist() == [1, 2, 3, 0]
    captured(*batch(2))
    captured(torch.full((3, 5), 7), torch.full((3,), 7))
    assert doubler.calls[-1][1].tolist() == [7, 7, 7, 0]


def test_a_batch_too_large_leaves_the_buffers_alone(captured, doubler):
    captured(*batch(3))
    captured(*batch(9))
    captured(*batch(3))
    assert doubler.calls[-1][1].tolist() == [1, 2, 3, 0]


def test_columns_may_be_fewer(captured):
    table, number = batch(2, columns=3)
    _, candidates = captured(table, number)
    assert torch.equal(candidates.token[:, :3], table * 2)


def test_more_columns_than_the_buffer_are_an_error(captured):
    with pytest.raises(RuntimeError, match="size"):
        captured(*batch(2, columns=6))


def test_a_result_stands_until_the_next_call(captured):
    first, _ = captured(*batch(2))
    kept = first.clone()
    captured(torch.zeros(1, 5), torch.full((1,), 50))  # another size: another result
    assert torch.equal(first, kept)
    captured(torch.zeros(2, 5), torch.full((2,), 50))
    assert first.tolist() == [100, 100]


def test_no_result():
    seen = []
    made = Captured(lambda x: seen.append(x.sum().item()), (torch.zeros(1),), (2,), replayer)
    assert made(torch.ones(1)) is None
    assert seen == [0, 1]
