"""Cross-entropy of rows of logits with tokens or distributions, and its slope, in one launch.

Twin: `entropy_plain` in train/entropy.py, whose operators each read and write all logits.

Roofline, for R rows of V logits in bfloat16: a program goes through its row twice, the second time
from the L2 cache, so that 2 bytes are read and 2 written a logit; three exponentials each. A step
of a Domino drafter with R = 30000, V = 49152, base and corrected logits: 11.8 GB, 2.7 ms at the
4.3 TB/s of an H200, where the twin moves 65 GB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dart.train.entropy import Entropy, Given

# Logits that a program holds at a time.
BLOCK = 4096


def entropy(logit: torch.Tensor, label: torch.Tensor, given: Given | None, needed: bool) -> Entropy:
    """As the twin; logit [r, V] contiguous, label [r] int64."""
    assert logit.is_contiguous(), "logit has gaps"
    assert given is None or given.prob.is_contiguous(), "the distributions have gaps"
    rows, vocab = logit.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logit.device)
    best = torch.empty_like(label)
    slope = torch.empty_like(logit) if needed else None
    if rows:
        _entropy_kernel[(rows,)](
            logit,
            label,
            # Pointers that are not followed must be of something.
            loss if given is None else given.prob,
            label if given is None else given.row,
            loss,
            best,
            logit if slope is None else slope,
            vocab,
            GIVEN=given is not None,
            SLOPE=needed,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return loss, best == label, slope


@triton.jit
def _entropy_kernel(
    p_logit,
    p_label,
    p_prob,
    p_row,
    p_loss,
    p_best,
    p_slope,
    vocab,
    GIVEN: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rows times vocabulary may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    p_logit += row * vocab
    p_slope += row * vocab
    if GIVEN:
        p_prob += tl.load(p_row + row) * vocab
    else:
        label = tl.load(p_label + row)
    column = tl.arange(0, BLOCK)
    # Finite, for the difference of two infinities is no number.
    peak = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    product = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + column
        logit = tl.load(p_logit + at, mask=at < vocab, other=-1e30).to(tl.float32)
        place = tl.where(logit > peak, at, place)
        higher = tl.maximum(peak, logit)
        total = total * tl.exp(peak - higher) + tl.exp(logit - higher)
        peak = higher
        if GIVEN:
            product += tl.load(p_prob + at, mask=at < vocab, other=0.0) * logit
    top = tl.max(peak, 0)
    log_norm = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    # The first of equals.
    tl.store(p_best + row, tl.min(tl.where(peak == top, place, vocab), 0).to(tl.int64))
    wanted = tl.sum(product, 0) if GIVEN else tl.load(p_logit + label).to(tl.float32)
    tl.store(p_loss + row, log_norm - wanted)
    if SLOPE:
        for first in range(0, vocab, BLOCK):
            at = first + column
            logit = tl.load(p_logit + at, mask=at < vocab, other=-1e30).to(tl.float32)
            if GIVEN:
                wish = tl.load(p_prob + at, mask=at < vocab, other=0.0)
            else:
                wish = (at == label).to(tl.float32)
            slope = tl.exp(logit - log_norm) - wish
            tl.store(p_slope + at, slope.to(p_slope.dtype.element_ty), mask=at < vocab)
