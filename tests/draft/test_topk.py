"""Candidates from logits: order, ids, and the two normalisations."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.draft import topk
from sglang_dart.draft.topk import top_k, top_k_of_rows

LOGITS = torch.tensor([[[0.0, 3.0, 1.0, 2.0], [5.0, 5.5, -40.0, 0.0]]])


def test_order_and_ids():
    ids = torch.tensor([10, 20, 30, 40])
    got = top_k(LOGITS, 3, target_id=ids)
    assert got.token.tolist() == [[[20, 40, 30], [20, 10, 40]]]
    assert got.token.dtype == torch.int64
    assert top_k(LOGITS, 2).token.tolist() == [[[1, 3], [1, 0]]]


def test_normalised_over_the_kept():
    got = top_k(LOGITS, 2)
    expected = torch.log(torch.softmax(torch.tensor([[3.0, 2.0], [5.5, 5.0]]), -1) + 1e-10)
    torch.testing.assert_close(got.log_prob[0], expected)


def test_normalised_over_the_vocabulary():
    got = top_k(LOGITS, 2, normalise="vocabulary")
    expected = torch.log_softmax(LOGITS, -1).gather(-1, got.token)
    torch.testing.assert_close(got.log_prob, expected)


@pytest.mark.parametrize("width", [1, 4, 5, 1000])
def test_width_is_clipped(width):
    got = top_k(LOGITS, width)
    assert got.token.shape == got.log_prob.shape == (1, 2, min(width, 4))
    assert (got.log_prob.diff(dim=-1) <= 0).all()


def test_half_precision_is_scored_in_float32():
    logits = torch.tensor([[[10.0, 0.0]]], dtype=torch.bfloat16)
    got = top_k(logits, 2).log_prob
    assert got.dtype == torch.float32
    # bfloat16 would round the probability to 1 and the log to 0.
    assert -5e-5 < got[0, 0, 0] < 0


def test_a_vanished_probability_stays_finite():
    assert top_k(torch.tensor([[[200.0, 0.0]]]), 2).log_prob.isfinite().all()


@pytest.mark.parametrize("most", [1, 7, 9, 100])
def test_rows_in_groups(monkeypatch, most):
    monkeypatch.setattr(topk, "LOGIT_ROWS", most)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 3, 8, generator=generator), torch.randn(8, 20)
    rows = []

    def head(part):
        rows.append(part.shape[0] * part.shape[1])
        return part @ weight

    got = top_k_of_rows(head, hidden, 4, normalise="vocabulary")
    expected = top_k(hidden @ weight, 4, normalise="vocabulary")
    assert torch.equal(got.token, expected.token)
    torch.testing.assert_close(got.log_prob, expected.log_prob)
    assert sum(rows) == 15
    assert max(rows) <= max(most, 3)
