"""The chunked divergence equals the plain one, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_dart.draft.dart import DartHead
from sglang_dart.train.capture import FrozenTarget


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_loss_equals_divergence_over_the_draft_vocabulary(
    tiny_head: DartHead,
    target: FrozenTarget,
    make_method: Callable,
    make_batch: Callable,
    chunk: int,
) -> None:
    method = make_method(chunk=chunk)
    batch, _ = make_batch(method)
    capture = target.capture(batch.ids)
    found = method(batch, capture)
    found.loss.backward()
    gradient = {name: p.grad.clone() for name, p in method.named_parameters()}
    method.zero_grad()

    rows, kept = batch.rows, tiny_head.target_id()
    teacher = (capture.hidden.flatten(0, 1)[rows.position] @ target.lm_head.T)[rows.teacher]
    best = teacher.argmax(-1)
    inside = torch.isin(best, kept)
    assert inside.any()
    assert not inside.all()
    student = tiny_head.lm_head(method.hidden(batch, capture))
    divergence = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher[:, kept].log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    weight = 0.6 ** rows.level.float() * inside
    expected = (weight * divergence).sum() / (inside & (rows.level == 0)).sum()
    expected.backward()
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.correct, kept[student.argmax(-1)] == best)
    for name, parameter in method.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_batch_without_rows_has_zero_loss(
    target: FrozenTarget, make_method: Callable, make_batch: Callable
) -> None:
    method = make_method()
    batch, turn = make_batch(method)
    empty = type(batch)(batch.ids, method.rows(torch.zeros_like(turn)), batch.sample)
    loss = method(empty, target.capture(batch.ids)).loss
    loss.backward()
    assert loss == 0
    assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)
