"""Does a drafter fit a target, and what would make its accept length low?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from sglang_dart.draft.checkpoint import CONFIG, DartConfig, read_config, read_json
from sglang_dart.draft.dart import DartHead, check_target, dart_taps, load_head
from sglang_dart.options import load_dart_options

Line = tuple[Literal["good", "note", "wrong"], str]


def pairing(model: str, drafter: str) -> Iterator[Line]:
    """Check a DART head against a target, both a folder or a hub id.

    Yields (level, text): "wrong" would not serve, "note" is a likely reason of few accepted drafts.
    """
    target = read_json(model, CONFIG)
    try:
        config = read_config(drafter)
        options = load_dart_options(config.raw)
    except (ValueError, RuntimeError) as error:
        yield "wrong", str(error)
        return
    yield from _sizes(target, drafter, config)
    try:
        head = load_head(drafter, config)
    except ValueError as error:
        yield "wrong", str(error)
        return
    yield from _weights(config, head)
    if options.ngram is None:
        yield "note", "no n-gram model is set (dart_config.ngram): deeper levels draft worse"
    passes = options.final_norm_passes
    yield (
        "good",
        f"final norm applied {passes} x, as published heads expect it"
        if passes == 2
        else "final norm applied once: right only for a head trained so",
    )


def _sizes(target: dict[str, Any], drafter: str, config: DartConfig) -> Iterator[Line]:
    try:
        check_target(
            drafter, config, hidden_size=target["hidden_size"], vocab_size=target["vocab_size"]
        )
        taps = dart_taps(target["num_hidden_layers"])
    except KeyError as error:
        yield "wrong", f"the target's {CONFIG} has no {error}"
        return
    except ValueError as error:
        yield "wrong", str(error)
        return
    yield "good", f"hidden size {config.hidden_size}, vocabulary {config.vocab_size}"
    layers = target["num_hidden_layers"]
    yield "good", f"taps: outputs of layers {', '.join(map(str, taps))} of {layers} (from 0)"
    yield "good", f"{config.draft_length} mask rows: {config.draft_length + 1} levels"
    rope = target.get("rope_parameters") or target
    theta = rope.get("rope_theta")
    if theta is not None and theta != config.rope_theta:
        yield (
            "note",
            f"rope_theta {config.rope_theta:g}, the target's is {theta:g}: unusual, since heads "
            "copy it; was it left out of the drafter's config.json?",
        )
    if target.get("tie_word_embeddings"):
        yield "good", "the target ties its embeddings; the head brings its own lm_head"
    for name in ("bos_token_id", "eos_token_id"):
        mine, other = config.raw.get(name), target.get(name)
        if None not in (mine, other) and mine != other:
            yield "note", f"{name} {mine}, the target's is {other}: perhaps another tokenizer"


def _weights(config: DartConfig, head: DartHead) -> Iterator[Line]:
    broken = [
        name
        for name, tensor in head.state_dict().items()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if broken:
        yield "wrong", f"not finite: {', '.join(broken)}"
    norms = [tensor for name, tensor in head.named_parameters() if "norm" in name]
    if config.raw.get("trained") is False or all((norm == 1).all() for norm in norms):
        yield "note", "this head is untrained: its drafts are noise"
    share = config.draft_vocab_size / config.vocab_size
    yield (
        "good",
        f"draft vocabulary {config.draft_vocab_size} ({share:.0%} of the target's), ids in range",
    )
