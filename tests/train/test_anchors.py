"""Which blocks are drawn, which of their rows are trained, and what those should predict."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.train.anchors import block_rows


def test_rows_stay_inside_one_answer() -> None:
    # Token:               0  1  2  3  4  5  6  7  8
    turn = torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0]])
    rows = block_rows(turn, levels=3, most=10, seed=[(0,)])
    # Anchor 2 predicts x3 (level 0) and x4 (level 1), anchor 3 x4, anchor 6 x7.
    assert rows.anchor.tolist() == [[2, 3, 6]]
    found = sorted(zip(rows.block.tolist(), rows.level.tolist(), strict=True))
    assert found == [(0, 0), (0, 1), (1, 0), (2, 0)]
    anchor = rows.anchor.flatten()[rows.block]
    assert torch.equal(rows.prefix, anchor - 1)
    # The teacher's position is the one before the predicted token, p + 1 + j.
    assert torch.equal(rows.position[rows.teacher], anchor + rows.level)


@pytest.mark.parametrize("turn", [[[0, 0, 0]], [[1]], [[0, 1]], [[0, 1, 0]], [[1, 1, 0]]])
def test_no_anchor_without_a_context_and_a_token_to_predict(turn: list[list[int]]) -> None:
    rows = block_rows(torch.tensor(turn), levels=4, most=8, seed=[(0,)])
    assert len(rows.prefix) == 0
    assert rows.anchor.tolist() == [[0]]


def test_each_text_draws_for_itself() -> None:
    turn = torch.zeros(3, 70, dtype=torch.int64)
    turn[0, 5:65], turn[1, 8:12], turn[2, 5:65] = 1, 1, 1
    rows = block_rows(turn, levels=4, most=9, seed=[(0, 1), (0, 2), (0, 3)])
    assert rows.anchor.shape == (3, 9)
    for text in (0, 2):
        drawn = rows.anchor[text]
        assert torch.equal(drawn, drawn.unique())
        assert 5 <= drawn.min() <= drawn.max() <= 63
    assert rows.anchor[1].tolist() == [8, 9, 10, 0, 0, 0, 0, 0, 0]
    assert not torch.equal(rows.anchor[0], rows.anchor[2])
    # Every drawn block has its first level, none has another text's rows.
    assert (rows.level == 0).sum() == 9 + 3 + 9
    assert torch.equal(rows.block // 9, rows.prefix // 70)

    alone = block_rows(turn[2:], levels=4, most=9, seed=[(0, 3)])
    assert torch.equal(alone.anchor[0], rows.anchor[2])
    other = block_rows(turn[2:], levels=4, most=9, seed=[(1, 3)])
    assert not torch.equal(other.anchor[0], rows.anchor[2])


def test_draw_is_even() -> None:
    turn = torch.ones(1, 34, dtype=torch.int64)
    count = torch.zeros(34)
    for draw in range(2000):
        count[block_rows(turn, 1, 8, [(draw,)]).anchor[0]] += 1
    # 32 possible anchors, 8 of them drawn: 500 +- 5 standard deviations of 19.
    assert (count[1:33] - 500).abs().max() < 97
    assert count[0] == count[33] == 0
