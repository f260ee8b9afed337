"""A training run from shards to a drafter in the published layout, whatever the method."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.card import Card, model_card
from sglang_dart.train.corpus import Corpus, load_corpus
from sglang_dart.train.export import write_checkpoint
from sglang_dart.train.loop import Loop, LoopSettings, Progress, claim_folder, newest_checkpoint
from sglang_dart.train.record import Scores, as_fields, draw

logger = logging.getLogger(__name__)

OnStep = Callable[[Progress, float, Scores | None], None]


@dataclass(frozen=True)
class Settings:
    """What every run has. `precision`: "bf16" (autocast, float32 master weights) or "fp32"."""

    model: str
    data: tuple[str, ...]
    loop: LoopSettings
    precision: str
    max_length: int = 2048
    held_out: float = 0.01
    start: str | None = None
    """A drafter to begin from, folder or hub id: what it fixes must be set to the same."""

    @classmethod
    def fixed_by(cls, start: str) -> dict[str, Any]:
        """Settings that follow from beginning at this drafter. Raises ValueError if it is unfit."""
        raise NotImplementedError

    def check_start(self) -> None:
        """Raise ValueError, naming both values, if a setting is not what `start` fixes."""
        if self.start is None:
            return
        for name, fixed in self.fixed_by(self.start).items():
            if (own := getattr(self, name)) != fixed:
                raise ValueError(
                    f"{_option(name, own)}: the drafter {self.start} has {_option(name, fixed)}; "
                    "leave the option out or start from another drafter"
                )


@dataclass(frozen=True)
class Ready:
    """A drafter about to be trained.

    method: fulfils `Method`, on the target's device. config: its config.json. tensors: gives what
    the published file holds, when training is over. facts: what the data decided, for the card.
    """

    method: nn.Module
    config: Mapping[str, Any]
    tensors: Callable[[], Mapping[str, torch.Tensor]]
    card: Card
    facts: Mapping[str, Any] = field(default_factory=dict)


class Recipe(Protocol):
    """Makes a drafter for a target."""

    def taps(self, layers: int) -> Sequence[int]:
        """Target layers that the drafter reads, ascending."""

    def prepare(self, target: FrozenTarget, train: Corpus) -> Ready:
        """The untrained drafter. Raises ValueError for settings that do not fit."""


@dataclass(frozen=True)
class Trained:
    """What a run gave. head: folder in the published layout; held_out: texts it never saw."""

    head: Path
    scores: Scores
    held_out: Corpus
    summary: dict[str, Any]


def train(
    folder: Path,
    settings: Settings,
    recipe: Recipe,
    *,
    device: str,
    command: str,
    on_step: OnStep = lambda *_: None,
) -> Trained:
    """Run or resume a training run in `folder` and export its drafter to `folder`/head.

    Raises ValueError for data that cannot be trained on and settings that differ from those the
    folder began with; RuntimeError as `Loop.run`.
    """
    # Its kernels are planned anew for every batch shape, which takes longer than they save.
    torch.backends.cuda.enable_cudnn_sdp(False)
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision="bf16" if settings.precision == "bf16" else "no"
    )
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    target = FrozenTarget.load(settings.model, recipe.taps, dtype=dtype, device=accelerator.device)
    corpus = load_corpus(settings.data, target.config.vocab_size, settings.max_length)
    texts, held_out = corpus.split(settings.held_out)
    facts = _data_facts(corpus, texts, held_out)
    ready = recipe.prepare(target, texts)
    if accelerator.is_main_process:
        claimed = asdict(settings) | {"data_facts": facts}
        if settings.start is not None:
            # A resumed run must not begin from what has since been put in the same place.
            claimed["start_crc32"] = _crc32(ready.tensors())
        claim_folder(folder, claimed)
    accelerator.wait_for_everyone()

    facts |= ready.facts
    resumed = newest_checkpoint(folder)
    if accelerator.is_main_process:
        logger.info("data: %s; %s", facts, f"resuming from {resumed}" if resumed else "new run")
    loop = Loop(accelerator, ready.method, target, texts, held_out, settings.loop, folder, on_step)
    scores = loop.run()
    summary = {
        "target": settings.model,
        "command": command,
        "parameters": sum(p.numel() for p in ready.method.parameters()),
        **asdict(loop.progress),
        "data": facts,
        "held_out": as_fields(scores),
        "device": _device_name(accelerator.device),
        "date": time.strftime("%Y-%m-%d"),
    }
    if accelerator.is_main_process:
        head = folder / "head"
        write_checkpoint(head, ready.config, _as_published(ready.tensors()))
        draw(folder / "log.csv", folder / "curves.png")
        (head / "README.md").write_text(model_card(ready.card, summary, asdict(settings)))
    accelerator.wait_for_everyone()
    return Trained(folder / "head", scores, held_out, summary)


def _option(name: str, value: Any) -> str:
    """A setting as on the command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _crc32(tensors: Mapping[str, torch.Tensor]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].detach().cpu().numpy().tobytes(), found)
    return found


def _as_published(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _data_facts(corpus: Corpus, train: Corpus, held_out: Corpus) -> dict[str, Any]:
    return {
        "texts": len(train),
        "held_out_texts": len(held_out),
        "dropped_texts": corpus.dropped,
        "tokens": int(corpus.start[-1]),
        "answer_tokens": corpus.trained_tokens,
        "answer_share": round(corpus.trained_tokens / int(corpus.start[-1]), 4),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
