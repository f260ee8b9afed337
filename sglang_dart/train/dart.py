"""Train a DART head for a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dart.draft.checkpoint import DartConfig, read_config
from sglang_dart.draft.dart import DartHead, dart_taps
from sglang_dart.options import load_dart_options
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.card import Card
from sglang_dart.train.corpus import Corpus, count_tokens
from sglang_dart.train.export import dart_config
from sglang_dart.train.initial import draft_vocabulary, given_config, given_head, initial_head
from sglang_dart.train.method import DartMethod
from sglang_dart.train.run import OnStep, Ready, Settings, Trained, train


@dataclass(frozen=True)
class DartSettings(Settings):
    """What to train."""

    draft_length: int = 7
    draft_vocab_size: int = 32000
    intermediate_size: int | None = None
    gamma: float = 0.6
    final_norm_passes: int = 2
    borrow: bool = True
    chunk: int = 512

    @classmethod
    def fixed_by(cls, start: str) -> dict[str, Any]:
        """The head's sizes, and how often its final norm is applied."""
        config = read_config(start)
        return {
            "draft_length": config.draft_length,
            "draft_vocab_size": config.draft_vocab_size,
            "intermediate_size": config.intermediate_size,
            "final_norm_passes": load_dart_options(config.raw, start).final_norm_passes,
        }


def train_dart(
    folder: Path,
    settings: DartSettings,
    *,
    device: str,
    command: str,
    on_step: OnStep = lambda *_: None,
) -> Trained:
    """Run or resume the training of a DART head, as `train`."""
    recipe = DartRecipe(settings)
    return train(folder, settings, recipe, device=device, command=command, on_step=on_step)


@dataclass(frozen=True)
class DartRecipe:
    """Prepares a DART head: see `Recipe`."""

    settings: DartSettings

    def __post_init__(self) -> None:
        self.settings.check_start()

    def taps(self, layers: int) -> Sequence[int]:
        """The head's three layers."""
        return dart_taps(layers)

    def prepare(self, target: FrozenTarget, train: Corpus) -> Ready:
        """The head over the most frequent answer tokens, or over those of the one given."""
        settings, vocab_size = self.settings, target.config.vocab_size
        if settings.start is None:
            config, vocabulary = _head_config(settings, target, train)
            known = DartConfig.__dataclass_fields__.keys() & config.keys()
            head = initial_head(
                DartConfig(**{name: config[name] for name in known}),
                target,
                vocabulary,
                borrow=settings.borrow,
                seed=settings.loop.seed,
            )
        else:
            head = given_head(settings.start, target)
            config, vocabulary = given_config(head.config.raw), head.target_id()
        # The head must be served as it was trained, whatever the default is.
        own = {"final_norm_passes": settings.final_norm_passes}
        config["dart_config"] = config.get("dart_config", {}) | own
        count = torch.from_numpy(count_tokens(train, vocab_size))
        coverage = round(float(count[vocabulary].sum() / count.sum()), 5)
        method = DartMethod(
            head.to(target.lm_head.device),
            target.model.get_input_embeddings().weight,
            target.lm_head,
            gamma=settings.gamma,
            final_norm_passes=settings.final_norm_passes,
            chunk=settings.chunk,
        )
        return Ready(
            method,
            config,
            lambda: _tensors(head, vocab_size),
            _card(config, coverage, settings.start),
            {"vocabulary_coverage": coverage},
        )


def _tensors(head: DartHead, vocab_size: int) -> Mapping[str, torch.Tensor]:
    """The head's own, and `t2d` beside `d2t`."""
    covered = torch.zeros(vocab_size, dtype=torch.bool)
    covered[head.target_id().cpu()] = True
    return head.state_dict() | {"t2d": covered}


def _head_config(
    settings: DartSettings, target: FrozenTarget, train: Corpus
) -> tuple[dict[str, Any], torch.Tensor]:
    """The head's config.json and its draft vocabulary."""
    given = target.config.to_dict()
    ends = given.get("eos_token_id")
    always = set(ends if isinstance(ends, list) else [ends]) - {None}
    vocab_size = given["vocab_size"]
    size = min(settings.draft_vocab_size, vocab_size)
    vocabulary = draft_vocabulary(count_tokens(train, vocab_size), size, always)
    config = dart_config(given, draft_length=settings.draft_length, draft_vocab_size=size)
    config["intermediate_size"] = settings.intermediate_size or config["intermediate_size"]
    config["dtype"] = "bfloat16"
    return config, vocabulary


def _card(config: Mapping[str, Any], coverage: float, start: str | None) -> Card:
    size = config["draft_vocab_size"]
    chosen = f"the {size} most frequent answer tokens" if start is None else f"`{start}`'s"
    return Card(
        kind="DART head",
        algorithm="DART",
        tags=("dart",),
        drafts=config["draft_length"] + 1,
        hits="whose best draft token is the target's",
        data=f"The draft vocabulary is {chosen}, {coverage:.2%} of all answer tokens.",
    )
