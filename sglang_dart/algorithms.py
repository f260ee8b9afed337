"""What the names DART and DARTREE mean: drafter, scorer, recipe.

A method is read from the drafter's config.json, long before any weight is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from sglang_dart.draft import scripted
from sglang_dart.draft.checkpoint import CONFIG, read_config, read_json, validate
from sglang_dart.draft.dart import DartDrafter, check_target, dart_taps, load_head
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.dflash_config import DFlashConfig, read_dflash_config
from sglang_dart.draft.dflash_config import check_target as check_dflash_target
from sglang_dart.draft.domino import DominoDrafter, load_block_model
from sglang_dart.draft.drafter import Drafter
from sglang_dart.ngram_model import Vocabulary, find_file, open_ngram
from sglang_dart.options import (
    DartOptions,
    DartreeOptions,
    Variant,
    load_dart_options,
    load_dartree_options,
)
from sglang_dart.tree import recipe
from sglang_dart.tree.plan import HOST, RecipeOf, TreePlanner

NAMES = ("DART", "DARTREE")

# Widest tree on a CPU if the user says nothing: wider ones cost more than they bring.
CPU_WIDTH = 32

# Nodes of a tree, beside the root.
DEFAULT_BUDGET = 60
DARTREE_BUDGET = 64


def _no_tokenizer(_: str) -> int | None:
    return None


@dataclass(frozen=True)
class Target:
    """What a drafter must know of its target.

    embed maps ids [...] to rows [..., H]; lm_head maps rows [..., H] after the final norm to logits
    [..., V]. token_id: the id of a token by its text, None if there is none or no tokenizer.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    device: torch.device
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    token_id: Callable[[str], int | None] = _no_tokenizer


@dataclass(frozen=True)
class Method:
    """A drafter that is known but not loaded, and how its trees are scored and kept.

    levels: what it predicts at once; budget: nodes of a tree by default; chain: whether trees are
    chains by default. check_target(hidden_size=…, vocab_size=…, layers=…): raises ValueError for a
    target that it was not made for. load_drafter(target, levels=None): loads the weights, for all
    levels or as many as are wanted. plan: see `planner`.
    """

    levels: int
    budget: int
    chain: bool
    options: DartOptions | DartreeOptions
    check_target: Callable[..., None]
    load_drafter: Callable[..., Drafter]
    plan: Callable[..., TreePlanner]

    def default_width(self, device: str) -> int:
        """Rows of a verify step, root included, if the user says nothing."""
        if self.options.budget is not None:
            return self.options.budget + 1
        if device == "cpu":
            return min(self.budget + 1, self.options.cpu_rows or CPU_WIDTH)
        return self.budget + 1

    def planner(
        self,
        drafter: Drafter,
        levels: int,
        *,
        chain: bool,
        vocabulary: Vocabulary,
        device: torch.device = HOST,
    ) -> TreePlanner:
        """What grows the drafter's trees, at most `levels` deep; chains if asked for.

        device: the drafter's. Raises ValueError if the n-gram model is not of the target's
        vocabulary.
        """
        name = self.options.ngram
        ngram = None if chain or name is None else open_ngram(name, vocabulary)
        return self.plan(
            drafter,
            levels,
            chain=chain,
            device=device,
            ngram=ngram,
            ngram_weight=self.options.ngram_weight,
            threads=self.options.threads,
        )


def load_method(name: str, source: str | None, revision: str | None) -> Method:
    """Read a drafter's config.json and the options. Raises ValueError, one line."""
    if source is None:
        raise ValueError(
            f"{name} needs a drafter: give --speculative-draft-model-path a folder or a hub id"
        )
    raw = read_json(source, CONFIG, revision)
    is_dart = name.upper() == "DART"
    options = (load_dart_options if is_dart else load_dartree_options)(raw, source)
    if options.ngram is not None:
        find_file(options.ngram)
    if scripted.ARCHITECTURE in raw.get("architectures", ()):
        return _scripted_method(source, raw, options)
    if isinstance(options, DartOptions):
        return _dart_method(source, revision, options)
    return _dartree_method(source, revision, options)


# ---------------------------------------------------------------- DART


def dart_recipe(options: DartOptions, budget: int) -> recipe.TreeRecipe:
    """What DART keeps of a tree."""
    return recipe.beam(budget, options.beam, options.level_exponent)


def _dart_method(source: str, revision: str | None, options: DartOptions) -> Method:
    config = read_config(source, revision)

    def load(target: Target, levels: int | None = None) -> DartDrafter:
        head = load_head(
            source, config, revision=revision, dtype=target.dtype, device=target.device
        )
        return DartDrafter(
            head,
            target.embed,
            target.layers,
            final_norm_passes=options.final_norm_passes,
            levels=levels,
        )

    def check(*, hidden_size: int, vocab_size: int, layers: int) -> None:
        check_target(source, config, hidden_size=hidden_size, vocab_size=vocab_size)
        dart_taps(layers)

    return Method(
        config.draft_length + 1,
        DEFAULT_BUDGET,
        False,
        options,
        check,
        load,
        functools.partial(_plan_dart, options),
    )


def _plan_dart(
    options: DartOptions,
    _: Drafter,
    levels: int,
    *,
    chain: bool,
    device: torch.device,
    **ngram: Any,
) -> TreePlanner:
    # The search reads n-grams on the host, so it stays there without them too.
    del device
    return TreePlanner(
        None if chain else functools.partial(dart_recipe, options),
        levels,
        options.candidates,
        logit_decay=options.logit_decay,
        **ngram,
    )


# ---------------------------------------------------------------- DARTREE


def dartree_variant(options: DartreeOptions, *, causal: bool) -> Variant:
    """The variant that these options mean for a drafter with or without a causal head.

    Raises ValueError for one that needs a head where there is none.
    """
    if options.variant is None:
        return "pruned" if causal else "marginal"
    if options.variant in ("pruned", "fixed") and not causal:
        raise ValueError(
            f"variant {options.variant} needs a drafter with a causal head (projector_type "
            "domino), and this one has none: use marginal or chain"
        )
    return options.variant


def dartree_recipe(options: DartreeOptions, variant: Variant, budget: int) -> recipe.TreeRecipe:
    """What a variant keeps of a tree; a chain is as deep as the budget."""
    match variant:
        case "pruned":
            width = min(options.width, options.candidates, budget)
            return recipe.pruned(budget, width, options.depth_bonus)
        case "fixed":
            return recipe.fixed(budget)
        case "marginal":
            return recipe.best_first(budget)
        case "chain":
            return recipe.chain(budget)


def _dartree_method(source: str, revision: str | None, options: DartreeOptions) -> Method:
    config = read_dflash_config(source, revision)
    try:
        variant = dartree_variant(options, causal=config.domino is not None)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return Method(
        config.levels,
        DARTREE_BUDGET,
        variant == "chain",
        options,
        functools.partial(check_dflash_target, source, config),
        functools.partial(_load_block_drafter, source, revision, config),
        functools.partial(_plan_dartree, options, variant, config.vocab_size),
    )


def _load_block_drafter(
    source: str,
    revision: str | None,
    config: DFlashConfig,
    target: Target,
    levels: int | None = None,
) -> DFlashDrafter:
    mask = config.mask_token_id
    if mask is None:
        mask = target.token_id(config.mask_token)
    kind: Callable[..., DFlashDrafter]
    kind = DFlashDrafter if config.domino is None else DominoDrafter
    model = load_block_model(
        source, config, revision=revision, dtype=target.dtype, device=target.device
    )
    return kind(
        model, target.embed, target.lm_head, target.layers, mask_token_id=mask, levels=levels
    )


def _plan_dartree(
    options: DartreeOptions,
    variant: Variant,
    vocab_size: int,
    drafter: Drafter,
    levels: int,
    *,
    chain: bool,
    device: torch.device,
    **ngram: Any,
) -> TreePlanner:
    keeps: RecipeOf | None = None
    if not chain and variant != "chain":
        keeps = functools.partial(dartree_recipe, options, variant)
    causal = isinstance(drafter, DominoDrafter) and variant != "marginal"
    return TreePlanner(
        keeps,
        levels,
        min(options.candidates, vocab_size),
        head=cast(DominoDrafter, drafter).path_head if causal else None,
        home=device,
        **ngram,
    )


# ---------------------------------------------------------------- scripts


def _scripted_method(
    source: str, raw: dict[str, object], options: DartOptions | DartreeOptions
) -> Method:
    config = validate(scripted.ScriptedConfig, raw, f"{source}/{CONFIG}")

    def load(target: Target, levels: int | None = None) -> scripted.ScriptedDrafter:
        script = scripted.Script.read(source)
        drafter = scripted.ScriptedDrafter(config, script, target.layers)
        drafter.levels = min(levels or config.levels, config.levels)
        return drafter

    def check(**_: int) -> None:
        """A script fits any target."""

    if isinstance(options, DartOptions):
        plan, budget, chain = functools.partial(_plan_dart, options), DEFAULT_BUDGET, False
    else:
        variant = dartree_variant(options, causal=False)
        plan = functools.partial(_plan_dartree, options, variant, config.vocab_size)
        budget, chain = DARTREE_BUDGET, variant == "chain"
    return Method(config.levels, budget, chain, options, check, load, plan)
