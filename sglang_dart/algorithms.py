"""What the names DART and DARTREE mean: drafter, scorer, recipe.

A method is read from the drafter's config.json, long before any weight is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dart.draft.checkpoint import DartConfig, read_config
from sglang_dart.draft.dart import DartDrafter, check_target, load_head
from sglang_dart.options import DartOptions, load_dart_options
from sglang_dart.tree.plan import TreePlanner

# Rows that a verify step on two CPU cores holds before it costs much more than a plain step:
# a matrix product of few rows is bound by reading the weights in bfloat16, much less in float32.
CPU_ROWS = {torch.bfloat16: 16, torch.float32: 8}


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
    """DART on one drafter: a parallel head, continuity around marginal scores, the beam recipe."""

    source: str
    revision: str | None
    config: DartConfig
    options: DartOptions

    @property
    def levels(self) -> int:
        """Levels that the drafter predicts at once."""
        return self.config.draft_length + 1

    def default_width(self, device: str) -> int:
        """Rows of a verify step, root included, if the user says nothing."""
        width = self.options.budget + 1
        if device == "cpu":
            width = min(width, self.options.cpu_rows or max(CPU_ROWS.values()))
        return width

    def rows_per_step(self, device: str, dtype: torch.dtype) -> int | None:
        """Rows that a verify step may hold, all requests together; None where they are constant."""
        if device != "cpu":
            return None
        return self.options.cpu_rows or CPU_ROWS.get(dtype, 8)

    def load_drafter(self, target: Target) -> DartDrafter:
        """Load the weights. Raises ValueError if they do not belong to this target."""
        check_target(
            self.source,
            self.config,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
        )
        head = load_head(
            self.source,
            self.config,
            revision=self.revision,
            dtype=target.dtype,
            device=target.device,
        )
        return DartDrafter(
            head,
            target.embed,
            target.layers,
            final_norm_passes=self.options.final_norm_passes,
        )

    def planner(self, levels: int, *, chain: bool) -> TreePlanner:
        """What grows the trees, at most `levels` deep; a chain if asked for."""
        return TreePlanner(self.options, levels, chain=chain)


def load_method(name: str, source: str | None, revision: str | None) -> Method:
    """Read a drafter's config.json and the options. Raises ValueError, one line."""
    if source is None:
        raise ValueError(
            f"{name} needs a drafter: give --speculative-draft-model-path a folder or a hub id"
        )
    config = read_config(source, revision)
    return Method(source, revision, config, load_dart_options(config.raw))
