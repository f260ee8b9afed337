"""Train a DART head for a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.draft.dart import DartHead, dart_taps
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.card import Card
from sglang_dart.train.corpus import Corpus, count_tokens
from sglang_dart.train.export import dart_config
from sglang_dart.train.initial import draft_vocabulary, initial_head
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

    def taps(self, layers: int) -> Sequence[int]:
        """The head's three layers."""
        return dart_taps(layers)

    def prepare(self, target: FrozenTarget, train: Corpus) -> Ready:
        """The head over the most frequent answer tokens."""
        settings, vocab_size = self.settings, target.config.vocab_size
        config, vocabulary = _head_config(settings, target, train)
        count = torch.from_numpy(count_tokens(train, vocab_size))
        coverage = round(float(count[vocabulary].sum() / count.sum()), 5)
        head = initial_head(
            DartConfig(**{k: config[k] for k in DartConfig.__dataclass_fields__ if k in config}),
            target,
            vocabulary,
            borrow=settings.borrow,
            seed=settings.loop.seed,
        )
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
            _card(config, coverage),
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
    # The head must be served as it was trained, whatever the default is.
    config["dart_config"] = {"final_norm_passes": settings.final_norm_passes}
    return config, vocabulary


def _card(config: Mapping[str, Any], coverage: float) -> Card:
    return Card(
        kind="DART head",
        algorithm="DART",
        tags=("dart",),
        drafts=config["draft_length"] + 1,
        hits="whose best draft token is the target's",
        data=f"The draft vocabulary is the {config['draft_vocab_size']} most frequent answer "
        f"tokens, {coverage:.2%} of all.",
    )
