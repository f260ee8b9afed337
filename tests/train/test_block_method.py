"""Block losses against the definition, and training rows against the serving drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.domino import DominoDrafter
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.train.block_method import BlockMethod
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.method import Batch

# DFlash; Domino whose slot k predicts s + 1 + k; Domino whose slot k predicts s + k.
KINDS = [("dflash", False), ("domino", True), ("domino", False)]


def served_logits(
    method: BlockMethod, target: FrozenTarget, batch: Batch, text: int, anchor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base and corrected logits [levels, V] that the serving drafter gives after the true path."""
    kind = DominoDrafter if hasattr(method.model, "domino") else DFlashDrafter
    drafter = kind(method.model, target.embed, lambda h: h @ target.lm_head.T, 8)
    drafter.allocate(32)
    ids, slot = batch.ids[text], torch.arange(1, anchor + 1)
    feature = target.capture(ids[None]).feature[0, :anchor]
    drafter.append(Rows(feature, ids[1 : anchor + 1], slot - 1, slot))
    roots = Roots(ids[anchor : anchor + 1], torch.tensor([anchor]), feature[-1:], slot[None])
    base = drafter.draft_logits(roots)[0]
    if kind is DFlashDrafter:
        return base, base
    # With every token a candidate, the head's logits are the whole vocabulary's.
    candidates = drafter.draft(roots, base.shape[1])
    paths = drafter.path_head(candidates, ids[anchor : anchor + 1])
    state, final = paths.initial_state(), torch.empty_like(base)
    for level in range(method.levels):
        place = candidates.token[0, level]
        final[level, place] = paths.logits(level, state)[0, 0]
        follower = ids[min(anchor + 1 + level, len(ids) - 1)]
        state = paths.step(state, follower.view(1, 1))
    return base, final


@pytest.mark.parametrize(("kind", "shift"), KINDS)
def test_training_logits_equal_serving_logits(
    kind: str,
    shift: bool,
    block_target: FrozenTarget,
    make_block_method: Callable,
    make_batch: Callable,
) -> None:
    method = make_block_method(kind, shift_label=shift, anchors=20)
    assert method.levels == (6 if kind == "domino" and shift else 5)
    batch, _ = make_batch(method)
    with torch.no_grad():
        capture = block_target.capture(batch.ids)
        base = method.hidden(batch, capture) @ block_target.lm_head.T
        final = method.logits(batch, capture)
    width, checked = batch.ids.shape[1], 0
    for prefix in batch.rows.prefix.unique().tolist():
        text, anchor = prefix // width, prefix % width + 1
        expected = served_logits(method, block_target, batch, text, anchor)
        for row in (batch.rows.prefix == prefix).nonzero().flatten():
            level = batch.rows.level[row]
            torch.testing.assert_close(base[row], expected[0][level], atol=1e-4, rtol=1e-4)
            # Served scores are log-probabilities, equal up to a constant a level.
            torch.testing.assert_close(
                final[row].log_softmax(-1), expected[1][level].log_softmax(-1), atol=2e-4, rtol=1e-3
            )
            checked += 1
    assert checked == len(batch.rows.prefix) > 50
    if kind == "domino":
        first = batch.rows.level == 0
        assert torch.equal(final[first], base[first])
        assert (final - base)[~first].abs().amax(1).min() > 0.01


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize(("kind", "share"), [("dflash", 0.0), ("domino", 0.0), ("domino", 0.3)])
def test_loss_is_the_weighted_mix_of_cross_entropies(
    kind: str,
    share: float,
    chunk: int,
    taught: bool,
    block_target: FrozenTarget,
    make_block_method: Callable,
    make_batch: Callable,
) -> None:
    method = make_block_method(kind, taught=taught, chunk=chunk, base_until=0.5)
    method.schedule(0.5 * (1 - share))
    batch, _ = make_batch(method)
    capture = block_target.capture(batch.ids)
    found = method(batch, capture)
    found.loss.backward()
    gradient = {name: p.grad.clone() for name, p in method.named_parameters()}
    method.zero_grad()

    rows, lm_head = batch.rows, block_target.lm_head
    base, final = method.hidden(batch, capture) @ lm_head.T, method.logits(batch, capture)
    at = rows.position[rows.teacher]
    if taught:
        teacher = (capture.hidden.flatten(0, 1)[at] @ lm_head.T).softmax(-1)
        label, best = teacher, teacher.argmax(-1)
    else:
        label = best = batch.ids.flatten()[at + 1]
    weight = torch.exp(-rows.level.float() / 7)

    def mean(logit: torch.Tensor) -> torch.Tensor:
        return (weight * F.cross_entropy(logit, label, reduction="none")).sum() / weight.sum()

    expected = (1 - share) * mean(final) + share * mean(base)
    expected.backward()
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.correct, final.argmax(-1) == best)
    if kind == "domino":
        assert torch.equal(found.base_correct, base.argmax(-1) == best)
    for name, parameter in method.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-5, rtol=1e-3)
        assert parameter.grad.any(), name


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest result of any operator has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for result in found if isinstance(found, tuple | list) else [found]:
            if isinstance(result, torch.Tensor):
                self.numbers = max(self.numbers, result.numel())
        return found


@pytest.mark.parametrize("taught", [False, True])
def test_no_tensor_holds_the_logits_of_all_rows(
    taught: bool, block_target: FrozenTarget, make_block_method: Callable, make_batch: Callable
) -> None:
    method = make_block_method("domino", anchors=20, chunk=4, taught=taught, base_until=1.0)
    method.schedule(0.5)
    batch, _ = make_batch(method)
    capture = block_target.capture(batch.ids)
    with Largest() as largest:
        method(batch, capture).loss.backward()
    # What is left are queries of all blocks and the correction's matrix.
    assert largest.numbers < 0.5 * len(batch.rows.prefix) * 264


def test_base_part_falls_from_one_to_zero(make_block_method: Callable) -> None:
    method = make_block_method("domino", base_until=0.5)
    shares = []
    for done in (0.0, 0.125, 0.25, 0.5, 1.0):
        method.schedule(done)
        shares.append(method.base_share)
    assert shares == [1.0, 0.75, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_batch_without_rows_has_zero_loss(
    kind: str, block_target: FrozenTarget, make_block_method: Callable, make_batch: Callable
) -> None:
    method = make_block_method(kind)
    batch, turn = make_batch(method)
    rows = method.rows(torch.zeros_like(turn), [(0,), (1,)])
    loss = method(Batch(batch.ids, rows, batch.sample), block_target.capture(batch.ids)).loss
    loss.backward()
    assert loss == 0
    assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_half_precision_stays_close(
    kind: str, block_target: FrozenTarget, make_block_method: Callable, make_batch: Callable
) -> None:
    full = make_block_method(kind, anchors=20, base_until=1.0)
    full.schedule(0.5)
    batch, _ = make_batch(full)
    exact = full(batch, block_target.capture(batch.ids)).loss
    exact.backward()
    gradient = {name: p.grad.clone() for name, p in full.named_parameters()}
    full.zero_grad()

    target = copy.deepcopy(block_target.model).to(torch.bfloat16)
    half_target = FrozenTarget(target, [1, 4, 6])
    half = BlockMethod(
        full.model,
        target.get_input_embeddings().weight,
        half_target.lm_head,
        mask_token_id=263,
        anchors=20,
        decay=7.0,
        base_until=1.0,
    )
    half.schedule(0.5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = half(batch, half_target.capture(batch.ids)).loss
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0, rtol=0.05)
    for name, parameter in half.named_parameters():
        # Master weights and their gradients stay in float32.
        assert parameter.grad.dtype == torch.float32
        direction = torch.cosine_similarity(parameter.grad.flatten(), gradient[name].flatten(), 0)
        assert direction > 0.9, name
