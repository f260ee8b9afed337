"""The training loop: optimiser, schedule, checkpoints, held-out evaluation."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from sglang_dart.train.capture import Capture, FrozenTarget
from sglang_dart.train.corpus import Corpus, batch_stream, collate, epoch_batches
from sglang_dart.train.method import Batch, Method
from sglang_dart.train.record import Log, Scores, Tally

_STEP = "step-"
# Held-out texts that an evaluation reads at most.
_EVALUATED = 512


@dataclass(frozen=True)
class LoopSettings:
    """How to train. A run resumes only under the settings that it began with."""

    lr: float
    epochs: float = 3.0
    max_steps: int | None = None
    minutes: float | None = None
    """Wall-clock limit; the schedule then follows the clock where that is further on."""
    batch_tokens: int = 32768
    """Tokens of one step and process, padding included."""
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 0.5
    seed: int = 0
    log_interval: int = 20
    save_interval: int = 500
    eval_interval: int = 500


@dataclass
class Progress:
    """What a checkpoint must remember beside weights and optimiser."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """For `accelerate`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For `accelerate`."""
        self.__dict__.update(state)


class Loop:
    """Trains `method`, a module on the accelerator's device, against a frozen target."""

    def __init__(
        self,
        accelerator: Accelerator,
        method: Any,
        target: FrozenTarget,
        train: Corpus,
        held_out: Corpus,
        settings: LoopSettings,
        folder: Path,
        on_step: Callable[[Progress, float, Scores | None], None] = lambda *_: None,
    ) -> None:
        """Prepare a run in `folder`, continuing from its newest checkpoint if there is one.

        `on_step(progress, done, held-out scores or None)` is called after each step; `done` is
        the share of the run, 0 .. 1.
        """
        self.accelerator = accelerator
        self.target, self.train_corpus, self.held_out = target, train, held_out
        self.settings, self.folder, self.on_step = settings, folder, on_step
        self.method: Method = method
        self.progress = Progress()
        optimizer = torch.optim.AdamW(
            method.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=accelerator.device.type == "cuda",
        )
        self.model, self.optimizer = accelerator.prepare(method, optimizer)
        accelerator.register_for_checkpointing(self.progress)
        batches = len(epoch_batches(train.lengths, settings.batch_tokens, settings.seed, 0))
        self.epoch_steps = batches / accelerator.num_processes
        self.total_steps = max(1, math.ceil(self.epoch_steps * settings.epochs))
        if settings.max_steps is not None:
            self.total_steps = min(self.total_steps, settings.max_steps)
        found = newest_checkpoint(folder)
        if found:
            accelerator.load_state(str(found))

    def run(self) -> Scores:
        """Train to the end of the schedule. Returns the held-out scores of the last step.

        Raises RuntimeError at a loss or gradient that is not finite, naming the step, the texts
        and the last good checkpoint.
        """
        levels, device = self.method.levels, self.accelerator.device
        log = Log(self.folder / "log.csv", levels, self.progress.step) if self._main else None
        tally, scores = Tally(levels, device), None
        work = self._work()
        coming = next(work)
        began = time.monotonic() - self.progress.seconds
        while (done := self._done(began)) < 1:
            lr = self._set_lr(done)
            self.method.schedule(done)
            batch, capture = coming
            coming, norm = self._step(batch, capture, tally, work)
            self.progress.step += 1
            self.progress.tokens += batch.ids.numel() * self.accelerator.num_processes
            self.progress.seconds = time.monotonic() - began
            step, last = self.progress.step, self._done(began) >= 1
            fields = {"step": step, "tokens": self.progress.tokens, "lr": f"{lr:.3e}"}
            fields |= {"epoch": f"{step / self.epoch_steps:.3f}", "grad_norm": f"{norm:.4f}"}
            fields["seconds"] = f"{self.progress.seconds:.1f}"
            if log and (last or step % self.settings.log_interval == 0):
                log.add(tally.scores(), split="train", **fields)
                tally = Tally(levels, device)
            evaluated = last or step % self.settings.eval_interval == 0
            scores = self.evaluate() if evaluated else None
            if log and scores:
                log.add(scores, split="held-out", **fields)
            if last or step % self.settings.save_interval == 0:
                self._save()
            self.on_step(self.progress, self._done(began), scores)
        return scores or self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> Scores:
        """Scores on the held-out texts, the same at every call."""
        count = min(len(self.held_out), _EVALUATED)
        tally = Tally(self.method.levels, self.accelerator.device)
        self.method.schedule(1.0)
        lengths = self.held_out.lengths[:count]
        for texts in epoch_batches(lengths, self.settings.batch_tokens, seed=0, epoch=0):
            batch = collate(self.held_out, texts, self.method).to(self.accelerator.device)
            with self.accelerator.autocast():
                found = self.method(batch, self.target.capture(batch.ids))
            tally.add(found, batch.rows, batch.ids.numel())
        return tally.scores()

    @property
    def _main(self) -> bool:
        return self.accelerator.is_main_process

    def _batches(self) -> Iterator[Batch]:
        world = self.accelerator.num_processes
        first = self.progress.step * world + self.accelerator.process_index
        settings = self.settings
        return batch_stream(
            self.train_corpus, self.method, settings.batch_tokens, settings.seed, first, world
        )

    def _done(self, began: float) -> float:
        """Share of the run that is behind us; the main process's clock counts."""
        done = self.progress.step / self.total_steps
        if self.settings.minutes is None:
            return done
        clock = (time.monotonic() - began) / (60 * self.settings.minutes)
        if self.accelerator.num_processes > 1:
            clock = float(broadcast(torch.tensor([clock], device=self.accelerator.device))[0])
        return max(done, clock)

    def _set_lr(self, done: float) -> float:
        warm = min(1.0, (self.progress.step + 1) / max(1, self.settings.warmup_steps))
        lr = self.settings.lr * warm * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _work(self) -> Iterator[tuple[Batch, Capture]]:
        """Batches on the device, and what the target makes of them."""
        for batch in self._batches():
            batch = batch.to(self.accelerator.device)
            yield batch, self.target.capture(batch.ids)

    def _step(
        self, batch: Batch, capture: Capture, tally: Tally, work: Iterator[tuple[Batch, Capture]]
    ) -> tuple[tuple[Batch, Capture], float]:
        """Change the weights by one batch. Gives the next batch's work and the gradient's norm."""
        found = self.model(batch, capture)
        self.accelerator.backward(found.loss)
        gradient = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        read_norm = _read_later(gradient.detach())
        # The target's weights do not change: a GPU is busy with its next pass while we wait, and
        # while we queue what comes after.
        coming = next(work)
        norm = read_norm()
        if not math.isfinite(norm):
            raise RuntimeError(self._describe_failure(batch, float(found.loss.detach()), norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tally.add(found, batch.rows, batch.ids.numel())
        return coming, norm

    @torch.no_grad()
    def _describe_failure(self, batch: Batch, loss: float, norm: float) -> str:
        culprits = []
        for text in batch.sample:
            alone = collate(self.train_corpus, [text], self.method, batch.seed)
            alone = alone.to(self.accelerator.device)
            with self.accelerator.autocast():
                value = self.method(alone, self.target.capture(alone.ids)).loss
            if not torch.isfinite(value):
                culprits.append(text)
        where = f"texts with such a loss: {culprits}" if culprits else "no text alone shows it"
        return (
            f"step {self.progress.step + 1}: loss {loss}, gradient norm {norm}: not finite; "
            f"{where}; last good checkpoint: {newest_checkpoint(self.folder) or 'none yet'}"
        )

    def _save(self) -> None:
        """Write a checkpoint in one rename; the one before it is kept."""
        final = self.folder / "checkpoints" / f"{_STEP}{self.progress.step:08d}"
        scratch = final.with_name(f".{final.name}")
        self.accelerator.wait_for_everyone()
        if self._main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(scratch))
        self.accelerator.wait_for_everyone()
        if self._main:
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
            for old in checkpoints(self.folder)[:-2]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()


def _read_later(scalar: torch.Tensor) -> Callable[[], float]:
    """What gives a scalar's value, waiting for it but not for what is queued after this call."""
    if scalar.device.type != "cuda":
        return scalar.item
    host = torch.empty((), dtype=scalar.dtype, pin_memory=True)
    host.copy_(scalar, non_blocking=True)
    known = torch.cuda.Event()
    known.record()

    def read() -> float:
        known.synchronize()
        return host.item()

    return read


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob(f"{_STEP}*"))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a run would continue from."""
    found = checkpoints(folder)
    return found[-1] if found else None


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Make a run folder, or check that the run in it began with the same settings.

    Raises ValueError naming the first setting that differs.
    """
    path = folder / "run.json"
    settings = json.loads(json.dumps(settings))
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
        return
    before = json.loads(path.read_text())
    for name in sorted(before.keys() | settings.keys()):
        if before.get(name) != settings.get(name):
            raise ValueError(
                f"{folder}: its run has {name} = {before.get(name)!r}, now {settings.get(name)!r}; "
                "resume with the same settings or give another --out"
            )
