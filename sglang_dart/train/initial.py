"""Where a DART head starts: its draft vocabulary, and weights borrowed from the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.draft.dart import DartHead
from sglang_dart.train.capture import FrozenTarget


def draft_vocabulary(count: np.ndarray, size: int, always: set[int]) -> torch.Tensor:
    """The `size` most frequent tokens and all of `always`, ascending [size] int64.

    count [V]: occurrences in the training answers; ties go to the lower id.
    Raises ValueError if `size` is outside 1 .. V.
    """
    if not len(always) <= size <= len(count):
        raise ValueError(
            f"draft vocabulary of {size}: must be {max(1, len(always))} .. {len(count)} "
            "(the target's vocabulary)"
        )
    ranked = count.astype(np.int64).copy()
    ranked[sorted(always)] = np.iinfo(np.int64).max
    kept = np.argsort(-ranked, kind="stable")[:size]
    return torch.from_numpy(np.sort(kept)).to(torch.int64)


@torch.no_grad()
def initial_head(
    config: DartConfig, target: FrozenTarget, vocabulary: torch.Tensor, *, borrow: bool, seed: int
) -> DartHead:
    """A head in float32 that covers `vocabulary` (ascending target ids).

    borrow=True takes from the target what fits by shape: `lm_head` is the target's output matrix
    with its final norm folded in (so one norm pass or two make no difference at the start); fc
    passes the highest tap on; the layer is the target's last one, reading the tapped half of its
    input, while the embedding half of q, k, v starts small. All else is random: std 0.02,
    mask_rep standard normal.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        head = DartHead(config)
        for name, parameter in head.named_parameters():
            if name.endswith("mask_rep"):
                parameter.normal_()
            elif parameter.dim() == 2:
                parameter.normal_(std=0.02)
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    if borrow:
        _borrow_output(head, target, vocabulary)
        _borrow_layer(head, target)
    return head


def _borrow_output(head: DartHead, target: FrozenTarget, vocabulary: torch.Tensor) -> None:
    if head.config.hidden_size != head.config.target_hidden_size:
        return
    rows = target.lm_head[vocabulary.to(target.lm_head.device)].float()
    head.lm_head.weight.copy_(rows * target.decoder.norm.weight.float())


def _borrow_layer(head: DartHead, target: FrozenTarget) -> None:
    last = target.decoder.layers[-1]
    layer: Any = head.midlayer
    hidden = head.config.hidden_size
    if hidden == head.config.target_hidden_size:
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(layer.self_attn, name).weight[:, hidden:]
        _copy_if_fits(own, getattr(last.self_attn, name).weight)
    _copy_if_fits(layer.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    # Mixture-of-experts layers have no single MLP to borrow.
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(getattr(last.mlp, name, None), "weight", None)
        if weight is not None:
            _copy_if_fits(getattr(layer.mlp, name).weight, weight)


def _copy_if_fits(own: torch.Tensor, given: torch.Tensor) -> None:
    if own.shape == given.shape:
        own.copy_(given)
