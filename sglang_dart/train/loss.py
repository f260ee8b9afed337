"""Losses of the drafters: distillation over a draft vocabulary, chunked to bound memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_dart.train.blocks import Rows
from sglang_dart.train.entropy import Given, entropy


@dataclass(frozen=True)
class Teacher:
    """The target's distributions for some positions, before its output matrix.

    hidden    [P, H]: normed states after the tokens at those positions.
    lm_head   [V, H]: the target's output matrix.
    target_id [Vd] int64: target id of each draft id.
    draft_id  [V] int64: draft id of each target id, -1 outside the draft vocabulary.
    """

    hidden: torch.Tensor
    lm_head: torch.Tensor
    target_id: torch.Tensor
    draft_id: torch.Tensor


@dataclass(frozen=True)
class Distilled:
    """loss: scalar, differentiable. correct [R] bool: the row's best token is the one wanted.

    base_correct: the same before a correction head, None where there is none.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    base_correct: torch.Tensor | None = None


def distil(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    rows: Rows,
    teacher: Teacher,
    level_weight: torch.Tensor,
    chunk: int = 512,
) -> Distilled:
    """Kullback-Leibler divergence of the target's distribution from the drafter's.

    hidden [R, H] and lm_head [Vd, H] give the drafter's logits; level_weight [levels] float32
    weighs each row by its level. The teacher is restricted to the draft vocabulary and
    renormalised; rows whose teacher's best token is outside it have no loss and count as wrong.
    loss = sum of weighted divergences / number of level-0 rows with a loss.
    `chunk` teacher positions are worked on at a time: memory is chunk * (V + levels * Vd) numbers.
    """
    # The function says itself what runs in which precision.
    with torch.autocast(hidden.device.type, enabled=False):
        total, correct, prefixes = _ChunkedDivergence.apply(
            hidden, lm_head, rows, teacher, level_weight, chunk
        )
    return Distilled(total / prefixes.clamp(min=1), correct)


class _ChunkedDivergence(torch.autograd.Function):
    """Computes gradients beside the loss, so that no logits are kept for a backward pass."""

    @staticmethod
    def forward(ctx, hidden, lm_head, rows, teacher, level_weight, chunk):
        dtype = teacher.hidden.dtype
        states, matrix = hidden.to(dtype), lm_head.to(dtype)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(states)
        d_matrix = torch.zeros_like(lm_head, dtype=torch.float32)
        correct = torch.empty(len(states), dtype=torch.bool, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        prefixes = torch.zeros((), device=hidden.device)
        for part, prob, label in _teacher_chunks(rows, teacher, chunk):
            own = rows.teacher[part] - rows.teacher[part.start]
            level = rows.level[part]
            inside = label[own] >= 0
            weight = level_weight[level] * inside
            cross, correct[part], slope = entropy(
                states[part] @ matrix.T, label[own], Given(prob, own), needed
            )
            # Sum of p log p - p log q.
            divergence = cross - torch.special.entr(prob).sum(-1)[own]
            total += (weight * divergence).sum()
            prefixes += (inside & (level == 0)).sum()
            if slope is not None:
                # A row's weight counts in its products, which are far smaller than its logits.
                d_hidden[part] = weight[:, None] * (slope @ matrix)
                d_matrix += slope.T @ (weight[:, None] * states[part]).to(dtype)
        if needed:
            ctx.save_for_backward(d_hidden, d_matrix)
            ctx.dtypes = hidden.dtype, lm_head.dtype
        ctx.mark_non_differentiable(correct, prefixes)
        return total, correct, prefixes

    @staticmethod
    def backward(ctx, d_total, _d_correct, _d_prefixes):
        d_hidden, d_matrix = ctx.saved_tensors
        hidden_dtype, matrix_dtype = ctx.dtypes
        return (
            (d_hidden * d_total).to(hidden_dtype),
            (d_matrix * d_total).to(matrix_dtype),
            None,
            None,
            None,
            None,
        )


def _teacher_chunks(
    rows: Rows, teacher: Teacher, chunk: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Per `chunk` positions: their rows, probability [p, Vd] float32, best draft id or -1 [p]."""
    for first in range(0, len(rows.start) - 1, chunk):
        last = min(first + chunk, len(rows.start) - 1)
        logit = teacher.hidden[first:last] @ teacher.lm_head.T
        label = teacher.draft_id[logit.argmax(-1)]
        prob = logit[:, teacher.target_id].softmax(-1, dtype=torch.float32)
        yield slice(rows.start[first], rows.start[last]), prob, label
