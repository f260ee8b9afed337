"""Draft logits to candidates: the best K tokens of each level and their log-probabilities."""

from __future__ import annotations

from typing import Literal

import torch

from sglang_dart.types import Candidates

# Keeps the logarithm of a vanished probability finite; the value of the DART release.
EPSILON = 1e-10


def top_k(
    logits: torch.Tensor,
    width: int,
    *,
    target_id: torch.Tensor | None = None,
    normalise: Literal["kept", "vocabulary"] = "kept",
) -> Candidates:
    """Keep the `width` best tokens of each level (all of them, if the vocabulary is smaller).

    logits [bs, D, Vd]; target_id [Vd] int64 maps draft ids to target ids (None: they are equal).
    "kept": log(softmax over the kept logits + 1e-10), as the DART release, but always in float32
    (the release: model dtype). "vocabulary": log-softmax over all Vd.
    """
    # One cast first: in half precision equal logits are common and the softmax rounds to 1.
    value, index = torch.topk(logits.float(), min(width, logits.shape[-1]), dim=-1)
    if normalise == "kept":
        log_prob = torch.log(torch.softmax(value, dim=-1) + EPSILON)
    else:
        log_prob = value - torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    return Candidates(token=index if target_id is None else target_id[index], log_prob=log_prob)
