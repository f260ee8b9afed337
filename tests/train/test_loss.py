"""The chunked divergence equals the plain one, values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from sglang_dart.draft.dart import DartHead, dart_taps
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.method import DartMethod


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


def test_half_precision_stays_close(
    tiny_head: DartHead, target: FrozenTarget, make_method: Callable, make_batch: Callable
) -> None:
    full = make_method()
    batch, _ = make_batch(full)
    exact = full(batch, target.capture(batch.ids)).loss
    exact.backward()
    gradient = {name: p.grad.clone() for name, p in full.named_parameters()}
    full.zero_grad()

    model = copy.deepcopy(target.model).to(torch.bfloat16)
    half_target = FrozenTarget(model, dart_taps(8))
    half = DartMethod(
        tiny_head,
        model.get_input_embeddings().weight,
        half_target.lm_head,
        gamma=0.6,
        final_norm_passes=2,
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = half(batch, half_target.capture(batch.ids)).loss
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0, rtol=0.05)
    for name, parameter in half.named_parameters():
        # Master weights and their gradients stay in float32.
        assert parameter.grad.dtype == torch.float32
        direction = torch.cosine_similarity(parameter.grad.flatten(), gradient[name].flatten(), 0)
        assert direction > 0.9, name
