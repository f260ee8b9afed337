"""Cross-entropy of a frozen output matrix and a trained low-rank correction, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_dart.train.blocks import Rows
from sglang_dart.train.entropy import Given, entropy
from sglang_dart.train.loss import Distilled

# Keeps the loss of a batch without rows finite.
_NO_ROWS = 1e-6


@dataclass(frozen=True)
class Labels:
    """What rows should predict: the text's own token, or the target's whole distribution.

    token   [P] int64: the token after each of `rows.position`.
    teacher [P, H]: the target's normed states there, or None for the text's tokens.
    """

    rows: Rows
    token: torch.Tensor
    teacher: torch.Tensor | None

    def chunks(
        self, chunk: int, lm_head: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, Given | None]]:
        """Per `chunk` rows: which, best tokens [r], and distributions over V if taught."""
        start, count = self.rows.start, len(self.rows.prefix)
        for first in range(0, count, chunk):
            part = slice(first, min(first + chunk, count))
            # A position whose rows lie in two chunks is computed for both.
            low, high = bisect_right(start, part.start) - 1, bisect_left(start, part.stop)
            own = self.rows.teacher[part] - low
            if self.teacher is None:
                yield part, self.token[low:high][own], None
            else:
                logit = self.teacher[low:high] @ lm_head.T
                given = Given(logit.softmax(-1, dtype=torch.float32), own)
                yield part, logit.argmax(-1)[own], given


def cross_entropy(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    correction: tuple[torch.Tensor, torch.Tensor] | None,
    labels: Labels,
    weight: torch.Tensor,
    base_share: float,
    chunk: int,
) -> Distilled:
    """Weighted mean cross-entropy of the base and the corrected logits.

    hidden [R, H] and the frozen lm_head [V, H] give the base logits; correction: low [R, E] and
    up [V, E], whose product is added to them, or None. weight [R] float32.
    loss = sum of weight * ((1 - base_share) * CE(corrected) + base_share * CE(base)) / sum(weight).
    `chunk` rows are worked on at a time: memory is a few times chunk * V numbers.
    """
    low, up = correction or (None, None)
    # The function says itself what runs in which precision.
    with torch.autocast(hidden.device.type, enabled=False):
        total, correct, base_correct = _ChunkedCrossEntropy.apply(
            hidden, low, up, lm_head, labels, weight, base_share, chunk
        )
        loss = total / (weight.sum() + _NO_ROWS)
    return Distilled(loss, correct, base_correct if correction else None)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes gradients beside the loss, so that no logits are kept for a backward pass."""

    @staticmethod
    def forward(ctx, hidden, low, up, lm_head, labels, weight, base_share, chunk):
        dtype, needed = lm_head.dtype, any(ctx.needs_input_grad[:3])
        states = hidden.to(dtype)
        d_hidden = torch.zeros_like(states)
        if low is not None:
            lows, ups = low.to(dtype), up.to(dtype)
            d_low, d_up = torch.zeros_like(lows), torch.zeros_like(up, dtype=torch.float32)
        else:
            base_share = 1.0
        total = torch.zeros((), device=hidden.device)
        correct = torch.empty(len(states), dtype=torch.bool, device=hidden.device)
        base_correct = torch.empty_like(correct)
        for part, label, given in labels.chunks(chunk, lm_head):
            own, slope = weight[part], None
            base = states[part] @ lm_head.T
            if base_share > 0:
                loss, base_correct[part], slope = entropy(base, label, given, needed)
                total += base_share * (own * loss).sum()
            else:
                base_correct[part] = base.argmax(-1) == label
            if low is None:
                correct[part] = base_correct[part]
            else:
                final = torch.addmm(base, lows[part], ups.T)
                # Gradients of nothing are not worth their time.
                rising = needed and base_share < 1
                loss, correct[part], steep = entropy(final, label, given, rising)
                total += (1 - base_share) * (own * loss).sum()
                if steep is not None:
                    # A row's weight counts in its products, which are far smaller than its logits.
                    final_weight = (1 - base_share) * own[:, None]
                    d_low[part] = final_weight * (steep @ ups)
                    d_up += steep.T @ (final_weight * lows[part]).to(dtype)
                    slope = steep if slope is None else slope.lerp_(steep, 1 - base_share)
            if slope is not None:
                d_hidden[part] = own[:, None] * (slope @ lm_head)
        ctx.mark_non_differentiable(correct, base_correct)
        if needed:
            ctx.save_for_backward(d_hidden, *(() if low is None else (d_low, d_up)))
            ctx.dtypes = [x.dtype for x in (hidden, low, up) if x is not None]
        return total, correct, base_correct

    @staticmethod
    def backward(ctx, d_total, _d_correct, _d_base):
        given = [
            (saved * d_total).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *given, *[None] * (8 - len(given))
