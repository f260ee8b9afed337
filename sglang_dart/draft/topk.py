"""Draft logits to candidates: the best K tokens of each level and their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from sglang_dart.types import Candidates

# Keeps the logarithm of a vanished probability finite; the value of the DART release.
EPSILON = 1e-10
# Rows whose logits exist at once. 512 rows keep a GPU's matrix units busy, and of a vocabulary of
# 151936 they take 0.15 GiB in half precision and 0.3 GiB in float32.
LOGIT_ROWS = 512


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
    logits = logits.float()
    value, index = torch.topk(logits, min(width, logits.shape[-1]), dim=-1)
    if normalise == "kept":
        log_prob = torch.log(torch.softmax(value, dim=-1) + EPSILON)
    else:
        log_prob = value - torch.logsumexp(logits, dim=-1, keepdim=True)
    return Candidates(token=index if target_id is None else target_id[index], log_prob=log_prob)


def top_k_of_rows(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, width: int, **options: Any
) -> Candidates:
    """The same from hidden rows [bs, D, H], whose logits `head` gives LOGIT_ROWS at a time."""
    requests = max(1, LOGIT_ROWS // hidden.shape[1])
    parts = [top_k(head(part), width, **options) for part in hidden.split(requests)]
    return Candidates(
        token=torch.cat([part.token for part in parts]),
        log_prob=torch.cat([part.log_prob for part in parts]),
    )
