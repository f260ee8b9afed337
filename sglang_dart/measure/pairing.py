"""Does a drafter fit a target, and what would make its accept length low?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from sglang_dart.algorithms import dartree_variant
from sglang_dart.draft.checkpoint import CONFIG, DartConfig, read_config, read_json
from sglang_dart.draft.dart import DartHead, check_target, dart_taps, load_head
from sglang_dart.draft.dflash_config import NESTED, DFlashConfig, read_dflash_config
from sglang_dart.draft.dflash_config import check_target as check_block_target
from sglang_dart.draft.domino import load_block_model
from sglang_dart.options import load_dart_options, load_dartree_options

Line = tuple[Literal["good", "note", "wrong"], str]


def pairing(model: str, drafter: str) -> Iterator[Line]:
    """Check a drafter of either algorithm against a target, both a folder or a hub id.

    Yields (level, text): "wrong" would not serve, "note" is a likely reason of few accepted drafts.
    """
    target = read_json(model, CONFIG)
    try:
        raw = read_json(drafter, CONFIG)
    except (ValueError, RuntimeError) as error:
        yield "wrong", str(error)
        return
    # DART heads have no block; everything else in the two layouts may coincide.
    if NESTED in raw or "block_size" in raw:
        yield from block_pairing(target, drafter)
    else:
        yield from dart_pairing(target, drafter)


def dart_pairing(target: dict[str, Any], drafter: str) -> Iterator[Line]:
    """Check a DART head against a target's config.json."""
    try:
        config = read_config(drafter)
        options = load_dart_options(config.raw)
    except (ValueError, RuntimeError) as error:
        yield "wrong", str(error)
        return
    yield "good", "a DART head: serve it with --speculative-algorithm DART"
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
    yield from _same_text(target, config)
    if target.get("tie_word_embeddings"):
        yield "good", "the target ties its embeddings; the head brings its own lm_head"


def block_pairing(target: dict[str, Any], drafter: str) -> Iterator[Line]:
    """Check a DFlash or Domino drafter against a target's config.json."""
    try:
        config = read_dflash_config(drafter)
        options = load_dartree_options(config.raw)
        variant = dartree_variant(options, causal=config.domino is not None)
        layers = target["num_hidden_layers"]
        check_block_target(
            drafter,
            config,
            hidden_size=target["hidden_size"],
            vocab_size=target["vocab_size"],
            layers=layers,
        )
    except KeyError as error:
        yield "wrong", f"the target's {CONFIG} has no {error}"
        return
    except (ValueError, RuntimeError) as error:
        yield "wrong", str(error)
        return
    yield "good", "a block drafter: serve it with --speculative-algorithm DARTREE"
    taps = ", ".join(map(str, config.taps(layers)))
    yield "good", f"hidden size {config.hidden_size}, vocabulary {config.vocab_size}"
    yield "good", f"taps: outputs of layers {taps} of {layers} (from 0)"
    yield from _same_text(target, config)
    yield from _block(config)
    try:
        model = load_block_model(drafter, config)
    except ValueError as error:
        yield "wrong", str(error)
        return
    yield from _trained(config.raw, model)
    yield "good", f"variant {variant}: {VARIANTS[variant]}"


VARIANTS = {
    "pruned": "the best nodes of a tree that the causal head grew level by level",
    "fixed": "equally many nodes at every level",
    "chain": "one path, no tree",
    "marginal": "best first by each level's own probabilities",
}


def _block(config: DFlashConfig) -> Iterator[Line]:
    rows = f"a block of {config.block_size} rows: {config.levels} levels"
    if config.domino is None:
        yield "good", f"{rows}; no causal head"
    else:
        label = str(config.domino.shift_label).lower()
        yield (
            "good",
            f"{rows}; a causal head; shift_label {label}, which a server holds against the first "
            "texts that it reads",
        )
    if config.mask_token_id is None:
        yield (
            "note",
            f"no mask_token_id: a server must find {config.mask_token} in the target's tokenizer",
        )


def _same_text(target: dict[str, Any], config: DartConfig | DFlashConfig) -> Iterator[Line]:
    """What would be odd of a drafter that was trained on the target's text."""
    rope = target.get("rope_parameters") or target
    theta = rope.get("rope_theta")
    if theta is not None and theta != config.rope_theta:
        yield (
            "note",
            f"rope_theta {config.rope_theta:g}, the target's is {theta:g}: unusual, since heads "
            "copy it; was it left out of the drafter's config.json?",
        )
    for name in ("bos_token_id", "eos_token_id"):
        mine, other = config.raw.get(name), target.get(name)
        if None not in (mine, other) and mine != other:
            yield "note", f"{name} {mine}, the target's is {other}: perhaps another tokenizer"


def _trained(raw: Mapping[str, Any], model: torch.nn.Module) -> Iterator[Line]:
    """What the weights show by themselves."""
    broken = [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if broken:
        yield "wrong", f"not finite: {', '.join(broken)}"
    norms = [tensor for name, tensor in model.named_parameters() if "norm" in name]
    if raw.get("trained") is False or all((norm == 1).all() for norm in norms):
        yield "note", "this head is untrained: its drafts are noise"


def _weights(config: DartConfig, head: DartHead) -> Iterator[Line]:
    yield from _trained(config.raw, head)
    share = config.draft_vocab_size / config.vocab_size
    yield (
        "good",
        f"draft vocabulary {config.draft_vocab_size} ({share:.0%} of the target's), ids in range",
    )
