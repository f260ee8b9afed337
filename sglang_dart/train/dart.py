"""Train a DART head for a target, from shards to the published layout."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.draft.dart import DartHead, dart_taps
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.card import model_card
from sglang_dart.train.corpus import Corpus, count_tokens, load_corpus
from sglang_dart.train.export import dart_config, write_checkpoint
from sglang_dart.train.initial import draft_vocabulary, initial_head
from sglang_dart.train.loop import Loop, LoopSettings, Progress, claim_folder, newest_checkpoint
from sglang_dart.train.method import DartMethod
from sglang_dart.train.record import Scores, as_fields, draw

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DartSettings:
    """What to train. `precision`: "bf16" (autocast, float32 master weights) or "fp32"."""

    model: str
    data: tuple[str, ...]
    loop: LoopSettings
    precision: str
    draft_length: int = 7
    draft_vocab_size: int = 32000
    intermediate_size: int | None = None
    gamma: float = 0.6
    final_norm_passes: int = 2
    borrow: bool = True
    max_length: int = 2048
    held_out: float = 0.01
    chunk: int = 512


@dataclass(frozen=True)
class Trained:
    """What a run gave. head: folder in the published layout; held_out: texts it never saw."""

    head: Path
    scores: Scores
    held_out: Corpus
    summary: dict[str, Any]


def train_dart(
    folder: Path,
    settings: DartSettings,
    *,
    device: str,
    command: str,
    on_step: Callable[[Progress, float, Scores | None], None] = lambda *_: None,
) -> Trained:
    """Run or resume a training run in `folder` and export its head to `folder`/head.

    Raises ValueError for data that cannot be trained on and settings that differ from those the
    folder began with; RuntimeError as `Loop.run`.
    """
    # Its kernels are planned anew for every batch shape, which takes longer than they save.
    torch.backends.cuda.enable_cudnn_sdp(False)
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision="bf16" if settings.precision == "bf16" else "no"
    )
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    target = FrozenTarget.load(settings.model, dart_taps, dtype=dtype, device=accelerator.device)
    vocab_size = target.config.vocab_size
    corpus = load_corpus(settings.data, vocab_size, settings.max_length)
    train, held_out = corpus.split(settings.held_out)
    facts = _data_facts(corpus, train, held_out)
    if accelerator.is_main_process:
        claim_folder(folder, asdict(settings) | {"data_facts": facts})
    accelerator.wait_for_everyone()

    config, vocabulary = _head_config(settings, target, train)
    count = torch.from_numpy(count_tokens(train, vocab_size))
    facts["vocabulary_coverage"] = round(float(count[vocabulary].sum() / count.sum()), 5)
    head = initial_head(
        DartConfig(**{k: config[k] for k in DartConfig.__dataclass_fields__ if k in config}),
        target,
        vocabulary,
        borrow=settings.borrow,
        seed=settings.loop.seed,
    )
    method = DartMethod(
        head.to(accelerator.device),
        target.model.get_input_embeddings().weight,
        target.lm_head,
        gamma=settings.gamma,
        final_norm_passes=settings.final_norm_passes,
        chunk=settings.chunk,
    )
    resumed = newest_checkpoint(folder)
    if accelerator.is_main_process:
        logger.info("data: %s; %s", facts, f"resuming from {resumed}" if resumed else "new run")
    loop = Loop(accelerator, method, target, train, held_out, settings.loop, folder, on_step)
    scores = loop.run()
    summary = {
        "target": settings.model,
        "command": command,
        "parameters": sum(p.numel() for p in head.parameters()),
        **asdict(loop.progress),
        "data": facts,
        "held_out": as_fields(scores),
        "device": _device_name(accelerator.device),
        "date": time.strftime("%Y-%m-%d"),
    }
    if accelerator.is_main_process:
        export(folder / "head", config, head, vocab_size)
        draw(folder / "log.csv", folder / "curves.png")
        (folder / "head" / "README.md").write_text(model_card(summary, config, asdict(settings)))
    accelerator.wait_for_everyone()
    return Trained(folder / "head", scores, held_out, summary)


def export(folder: Path, config: dict[str, Any], head: DartHead, vocab_size: int) -> None:
    """Write the head in bfloat16, with `t2d` beside `d2t`."""
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
    tensors["t2d"][head.target_id().cpu()] = True
    write_checkpoint(folder, config, tensors)


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
