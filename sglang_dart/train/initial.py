"""Where drafters start: vocabulary, mask token, weights of the target or of another drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sglang_dart.draft import dart, dflash_config
from sglang_dart.draft.checkpoint import DartConfig, read_config
from sglang_dart.draft.dart import DartHead
from sglang_dart.draft.dflash import DFlashModel
from sglang_dart.draft.dflash_config import DFlashConfig, read_dflash_config
from sglang_dart.draft.domino import DominoModel, load_block_model
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


def given_head(source: str, target: FrozenTarget) -> DartHead:
    """The head in the published layout at `source`, in float32.

    Raises ValueError if its files do not match or it belongs to another target.
    """
    config = read_config(source)
    dart.check_target(
        source,
        config,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
    )
    return dart.load_head(source, config)


def mask_token(count: np.ndarray, named: int, spare: Collection[int]) -> int:
    """A token that texts do not use, to stand for what a block drafter should predict.

    count [V]: occurrences in the training texts; named: tokens of the tokenizer, beyond which rows
    of the embedding are padding; spare: tokens that only templates could use. The first padding
    row is best, then the last spare one. Raises ValueError if there is neither.
    """
    if named < len(count):
        return named
    unused = [token for token in spare if not count[token]]
    if not unused:
        raise ValueError(
            "no unused token can stand for masks: every row of the target's embedding has a name "
            "and every added token is in the texts; name one with --mask-token-id"
        )
    return max(unused)


@torch.no_grad()
def initial_block_model(
    config: DFlashConfig, target: FrozenTarget, *, borrow: bool, seed: int
) -> DFlashModel:
    """A block drafter in float32; its Domino head, if any, corrects nothing yet.

    borrow=True takes from the target what fits by shape: the layers are the target's last ones
    (without their norms of queries and keys), fc passes the highest tap on, `norm` is the target's.
    All else is random with std 0.02, norms are 1.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = DominoModel(config) if config.domino else DFlashModel(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
    if isinstance(model, DominoModel):
        nn.init.zeros_(list(model.embed_proj.parameters())[-1])
    if borrow:
        decoder, hidden = target.decoder, config.hidden_size
        layers: list[Any] = list(model.layers)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
        model.hidden_norm.weight.copy_(decoder.layers[-1].input_layernorm.weight)
        model.norm.weight.copy_(decoder.norm.weight)
        count = min(len(layers), len(decoder.layers))
        for own, given in zip(layers[-count:], decoder.layers[-count:], strict=True):
            own.input_layernorm.weight.copy_(given.input_layernorm.weight)
            own.post_attention_layernorm.weight.copy_(given.post_attention_layernorm.weight)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                _copy_if_fits(
                    getattr(own.self_attn, name).weight, getattr(given.self_attn, name).weight
                )
            _borrow_mlp(own.mlp, given.mlp)
    return model


def given_block_model(source: str, target: FrozenTarget) -> DFlashModel:
    """The block drafter in the published layout at `source`, in float32. Raises as `given_head`."""
    config = read_dflash_config(source)
    dflash_config.check_target(
        source,
        config,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        layers=target.config.num_hidden_layers,
    )
    return load_block_model(source, config)


def given_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a drafter that began from one with config.json `raw`."""
    # What describes the weights of that one alone; they are written anew.
    spent = ("torch_dtype", "transformers_version", "trained")
    kept = {name: value for name, value in raw.items() if name not in spent}
    # The path of its n-gram model begins in its folder, not in the new one.
    for key in ("dart_config", "dartree_config"):
        if key in kept:
            kept[key] = {name: value for name, value in kept[key].items() if name != "ngram"}
    return kept | {"dtype": "bfloat16"}


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
    _borrow_mlp(layer.mlp, last.mlp)


def _borrow_mlp(own: Any, given: Any) -> None:
    # Mixture-of-experts layers have no single MLP to borrow.
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(getattr(given, name, None), "weight", None)
        if weight is not None:
            _copy_if_fits(getattr(own, name).weight, weight)


def _copy_if_fits(own: torch.Tensor, given: torch.Tensor) -> None:
    if own.shape == given.shape:
        own.copy_(given)
