"""What a round leaves behind."""

import torch

from sglang_dart.commit import RoundState, next_roots, shift_tail, verified_rows
from sglang_dart.round import Verdict
from sglang_dart.types import Candidates

# Two requests; the first commits 2 of 3 columns, the second all 3.
VERDICT = Verdict(
    token=torch.tensor([[11, 12, 99], [21, 22, 23]]),
    length=torch.tensor([2, 3], dtype=torch.int32),
    feature=torch.arange(12.0).view(2, 3, 2),
    slot=torch.tensor([[31, 32, 33], [41, 42, 43]]),
)
LENGTH = torch.tensor([5, 8])


def test_rows_beyond_the_run_go_to_the_dummy_slot():
    rows = verified_rows(VERDICT, LENGTH)
    assert rows.slot.tolist() == [31, 32, 0, 41, 42, 43]
    assert rows.position.tolist() == [5, 6, 7, 8, 9, 10]
    assert rows.next_token[:2].tolist() == [11, 12]
    assert rows.feature.shape == (6, 2)


def test_the_root_is_the_last_committed_token():
    roots = next_roots(VERDICT, LENGTH, torch.zeros(2, 1, dtype=torch.int32))
    assert roots.token.tolist() == [12, 23]
    assert roots.length.tolist() == [7, 11]
    # Taps of the token before the root: the last accepted node.
    assert roots.last_feature.tolist() == [[2.0, 3.0], [10.0, 11.0]]


def test_tail_keeps_the_newest_tokens():
    tail = torch.tensor([[-1, 7], [8, 9]])
    assert shift_tail(tail, VERDICT).tolist() == [[11, 12], [22, 23]]
    one = Verdict(VERDICT.token, torch.tensor([1, 1]), VERDICT.feature, VERDICT.slot)
    assert shift_tail(tail, one).tolist() == [[7, 11], [9, 21]]


def test_state_returns_each_row_what_was_put_last():
    state = RoundState(rows=4, levels=2, candidates=3, tail=2, device=torch.device("cpu"))

    def put(row, base):
        n = len(row)
        token = torch.arange(n * 6).view(n, 2, 3) + base
        tail = torch.full((n, 2), base)
        state.put(row, torch.tensor(row), Candidates(token, -token.float()), tail)

    put([1, 3], 100)
    put([3], 500)
    candidates, tail = state.take([3, 1], torch.tensor([3, 1]))
    assert candidates.token[:, 0, 0].tolist() == [500, 100]
    assert candidates.log_prob[:, 0, 0].tolist() == [-500.0, -100.0]
    assert tail.tolist() == [[500, 500], [100, 100]]
    assert state.tail(torch.tensor([1, 3])).tolist() == [[100, 100], [500, 500]]


def test_without_a_draft_only_the_tail_moves_on():
    state = RoundState(rows=2, levels=1, candidates=1, tail=1, device=torch.device("cpu"))
    row = torch.tensor([1])
    drafted = Candidates(torch.tensor([[[5]]]), torch.tensor([[[-1.0]]]))
    state.put([1], row, drafted, torch.tensor([[7]]))
    state.put([1], row, None, torch.tensor([[8]]))
    candidates, tail = state.take([1], row)
    assert (candidates.token.item(), tail.item()) == (5, 8)
