"""Cross-entropy of rows of logits and its slope, in as few passes over them as there can be."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Given(NamedTuple):
    """Distributions that rows should have: row i that of prob[row[i]].

    prob [p, V] float32, contiguous; row [r] int64.
    """

    prob: torch.Tensor
    row: torch.Tensor


Entropy = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def entropy(logit: torch.Tensor, label: torch.Tensor, given: Given | None, needed: bool) -> Entropy:
    """Cross-entropies of logits [r, V] with tokens label [r], or with given distributions.

    Gives them [r] float32; where the best token is the label [r] bool; and, if needed, their slopes
    in the logits [r, V], in those' dtype. With distributions a label may be -1, no token.
    """
    if logit.is_cuda:
        from sglang_dart.kernels import entropy as kernel

        return kernel.entropy(logit, label, given, needed)
    return entropy_plain(logit, label, given, needed)


def entropy_plain(
    logit: torch.Tensor, label: torch.Tensor, given: Given | None, needed: bool
) -> Entropy:
    """`entropy` in plain torch."""
    hit = logit.argmax(-1) == label
    log_prob = logit.log_softmax(-1, dtype=torch.float32)
    if given is not None:
        prob = given.prob[given.row]
        loss = -torch.linalg.vecdot(prob, log_prob)
        return loss, hit, log_prob.exp_().sub_(prob).to(logit.dtype) if needed else None
    wanted = log_prob.gather(1, label[:, None])
    loss, slope = -wanted.squeeze(1), None
    if needed:
        slope = torch.empty_like(logit)
        torch.exp(log_prob, out=slope)
        # Where a probability is near 1, rounding it would lose what is left to learn.
        slope.scatter_(1, label[:, None], torch.expm1(wanted).to(slope.dtype))
    return loss, hit, slope
