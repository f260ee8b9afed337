"""What the names DART and DARTREE mean: drafter, scorer, recipe.

A method is read from the drafter's config.json, long before any weight is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dart.draft import scripted
from sglang_dart.draft.checkpoint import CONFIG, DartConfig, read_config, read_json, validate
from sglang_dart.draft.dart import DartDrafter, check_target, load_head
from sglang_dart.draft.drafter import Drafter
from sglang_dart.ngram_model import Vocabulary, find_file, open_ngram
from sglang_dart.options import DartOptions, load_dart_options
from sglang_dart.tree.plan import TreePlanner

# Rows that a verify step on two CPU cores holds before it costs much more than a plain step:
# a matrix product of few rows is bound by reading the weights in bfloat16, much less in float32.
CPU_ROWS = {torch.bfloat16: 16, torch.float32: 8}

# Nodes of DART's trees, beside the root.
DEFAULT_BUDGET = 60


@dataclass(frozen=True)
class Target:
    """What a drafter must know of its target. `embed` maps ids [...] to rows [..., H]."""

    layers: int
    hidden_size: int
    vocab_size: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Method:
    """A drafter that is known but not loaded, and how its trees are scored and kept.

    levels: what it predicts at once. check_target(hidden_size=…, vocab_size=…): raises ValueError
    for a target that it was not made for. load_drafter: loads the weights.
    """

    levels: int
    options: DartOptions
    check_target: Callable[..., None]
    load_drafter: Callable[[Target], Drafter]

    def default_width(self, device: str) -> int:
        """Rows of a verify step, root included, if the user says nothing."""
        if self.options.budget is not None:
            return self.options.budget + 1
        if device == "cpu":
            return self.options.cpu_rows or max(CPU_ROWS.values())
        return DEFAULT_BUDGET + 1

    def rows_per_step(self, device: str, dtype: torch.dtype) -> int | None:
        """Rows that a verify step may hold, all requests together; None where they are constant."""
        if device != "cpu":
            return None
        return self.options.cpu_rows or CPU_ROWS.get(dtype, 8)

    def planner(self, levels: int, *, chain: bool, vocabulary: Vocabulary) -> TreePlanner:
        """What grows the trees, at most `levels` deep; chains if asked for.

        Raises ValueError if the n-gram model is not of the target's vocabulary.
        """
        name = self.options.ngram
        ngram = None if chain or name is None else open_ngram(name, vocabulary)
        return TreePlanner(self.options, levels, chain=chain, ngram=ngram)


def load_method(name: str, source: str | None, revision: str | None) -> Method:
    """Read a drafter's config.json and the options. Raises ValueError, one line."""
    if source is None:
        raise ValueError(
            f"{name} needs a drafter: give --speculative-draft-model-path a folder or a hub id"
        )
    raw = read_json(source, CONFIG, revision)
    options = load_dart_options(raw)
    if options.ngram is not None:
        find_file(options.ngram)
    if scripted.ARCHITECTURE in raw.get("architectures", ()):
        return _scripted_method(source, raw, options)
    return _dart_method(source, revision, read_config(source, revision), options)


def _dart_method(
    source: str, revision: str | None, config: DartConfig, options: DartOptions
) -> Method:
    def load(target: Target) -> DartDrafter:
        head = load_head(
            source, config, revision=revision, dtype=target.dtype, device=target.device
        )
        return DartDrafter(
            head,
            target.embed,
            target.layers,
            final_norm_passes=options.final_norm_passes,
        )

    return Method(
        config.draft_length + 1, options, functools.partial(check_target, source, config), load
    )


def _scripted_method(source: str, raw: dict[str, object], options: DartOptions) -> Method:
    config = validate(scripted.ScriptedConfig, raw, f"{source}/{CONFIG}")

    def load(target: Target) -> scripted.ScriptedDrafter:
        return scripted.ScriptedDrafter(config, scripted.Script.read(source), target.layers)

    def check(**_: int) -> None:
        """A script fits any target."""

    return Method(config.levels, options, check, load)
