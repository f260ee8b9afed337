"""The trained rows: which exist, and that each sees what it will see in serving."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sglang_dart.draft.dart import DartDrafter, DartHead
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.draft.layers import rotate
from sglang_dart.train.blocks import attend_blocks, trained_rows
from sglang_dart.train.capture import FrozenTarget


def test_rows_stay_inside_one_answer() -> None:
    # Token:               0  1  2  3  4  5  6  7  8
    turn = torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0]])
    rows = trained_rows(turn, levels=3)
    # Root x_{i+1} is an answer token; level j predicts x_{i+2+j} of the same answer.
    #   i=1: root x2, predicts x3 (level 0), x4 (level 1);   i=2: root x3, predicts x4
    #   i=5: root x6, predicts x7
    found = sorted(zip(rows.prefix.tolist(), rows.level.tolist(), strict=True))
    assert found == [(1, 0), (1, 1), (2, 0), (5, 0)]
    assert rows.position[rows.teacher].tolist() == (rows.prefix + 1 + rows.level).tolist()
    assert rows.start == [0, 1, 3, 4]


@pytest.mark.parametrize("turn", [[[0, 0, 0]], [[1]], [[1, 1]], [[0, 1, 0]]])
def test_no_row_without_a_root_and_a_token_to_predict(turn: list[list[int]]) -> None:
    rows = trained_rows(torch.tensor(turn), levels=8)
    assert len(rows.prefix) == 0
    assert rows.start == [0]


def test_answer_that_opens_a_text_has_no_row_without_a_prefix() -> None:
    rows = trained_rows(torch.tensor([[1, 1, 1]]), levels=8)
    assert list(zip(rows.prefix.tolist(), rows.level.tolist(), strict=True)) == [(0, 0)]


def dense_attention(head: DartHead, joined: torch.Tensor) -> torch.Tensor:
    """All T * (M + 1) rows in one sequence under an explicit mask; joined [T, 2H]."""
    length, levels = joined.shape[0], head.config.draft_length + 1
    mask, _ = head.mask_row()
    rows = torch.cat([joined[:, None], mask.expand(length, levels - 1, -1)], dim=1).flatten(0, 1)
    prefix = torch.arange(length).repeat_interleave(levels)
    level = torch.arange(levels).repeat(length)
    real = level == 0
    sees_real = real & (prefix <= prefix[:, None])
    sees_mask = ~real & (prefix == prefix[:, None]) & (level <= level[:, None])
    angle = head.angle(prefix + level)
    key, value = head.key_value(rows)
    group = head.config.num_attention_heads // head.config.num_key_value_heads
    query, key = rotate(head.query(rows), angle), rotate(key, angle)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1).repeat_interleave(group, 0),
        value.transpose(0, 1).repeat_interleave(group, 0),
        attn_mask=sees_real | sees_mask,
    )
    return out.transpose(0, 1).unflatten(0, (length, levels))


@pytest.mark.parametrize("length", [1, 3, 17, 65])
def test_attention_equals_a_dense_mask_and_so_do_its_gradients(
    tiny_head: DartHead, length: int
) -> None:
    torch.manual_seed(length)
    joined = torch.randn(2, length, 48)
    weight = torch.randn(2, length, 4, 4, 6)
    parameters = [p for n, p in tiny_head.named_parameters() if "_proj" in n or "mask_rep" in n]

    def gradients(attended: torch.Tensor) -> list[torch.Tensor]:
        return [
            g
            for g in torch.autograd.grad((attended * weight).sum(), parameters, allow_unused=True)
            if g is not None
        ]

    ours = attend_blocks(tiny_head, joined)
    dense = torch.stack([dense_attention(tiny_head, text) for text in joined])
    torch.testing.assert_close(ours, dense, atol=2e-5, rtol=1e-4)
    for found, expected in zip(gradients(ours), gradients(dense), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("passes", [1, 2])
def test_training_logits_equal_serving_logits(
    tiny_head: DartHead,
    target: FrozenTarget,
    make_method: Callable,
    make_batch: Callable,
    passes: int,
) -> None:
    method = make_method(final_norm_passes=passes)
    batch, _ = make_batch(method)
    capture = target.capture(batch.ids)
    with torch.no_grad():
        trained = tiny_head.lm_head(method.hidden(batch, capture))
    drafter = DartDrafter(tiny_head, target.embed, 8, final_norm_passes=passes)
    drafter.allocate(32)
    length = batch.ids.shape[1]
    checked = 0
    for text in range(2):
        slot = torch.arange(1, length)
        drafter.append(
            Rows(
                feature=capture.feature[text, :-1],
                next_token=batch.ids[text, 1:],
                position=torch.arange(length - 1),
                slot=slot,
            )
        )
        for prefix in range(length - 1):
            roots = Roots(
                token=batch.ids[text, prefix + 1 : prefix + 2],
                length=torch.tensor([prefix + 1]),
                last_feature=capture.feature[text, prefix : prefix + 1],
                slot_table=slot[None],
            )
            served = drafter.draft_logits(roots)[0]
            for row in (batch.rows.prefix == text * length + prefix).nonzero().flatten():
                level = batch.rows.level[row]
                torch.testing.assert_close(trained[row], served[level], atol=1e-4, rtol=1e-4)
                checked += 1
    assert checked == len(batch.rows.prefix) > 50
