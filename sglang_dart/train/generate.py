"""Make training data: workers let the target write, the main process sieves and stores."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.dummy
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_dart.exclusion import Exclusion
from sglang_dart.measure.datasets import load_tokenizer
from sglang_dart.train.filters import Sieve
from sglang_dart.train.prompts import read_prompts, user_header
from sglang_dart.train.shards import Sample, read_samples, write_shard
from sglang_dart.train.writer import (
    ENDED,
    FAILED,
    Conversation,
    DataSettings,
    Machine,
    Shards,
    work,
)

# Shards that sampled data may have: far more than anybody generates.
_MOST_SHARDS = 100_000


@dataclass
class Totals:
    """What a folder holds and what was refused. Tokens and samples: kept ones."""

    samples: int = 0
    generated_tokens: int = 0
    answer_tokens: int = 0
    written_tokens: int = 0
    """Tokens that the target wrote in this run, kept or not."""
    seconds: float = 0.0


def generate_data(
    folder: Path,
    settings: DataSettings,
    machine: Machine,
    exclude: list[Path],
    *,
    tokens: int,
    minutes: float | None,
    on_progress: Callable[[Totals, Sieve], None] = lambda *_: None,
) -> dict[str, Any]:
    """Fill `folder` with shards until they hold `tokens` generated tokens, time or prompts run out.

    Finished shards stay; what was in flight is lost. Returns a summary, also in summary.json.
    """
    # Fail here rather than in a worker, whose error nobody sees in one line.
    user_header(load_tokenizer(settings.model))
    sieve = Sieve(
        Exclusion.from_files(exclude),
        min_tokens=settings.min_tokens,
        min_distinct=settings.min_distinct,
    )
    totals = Totals()
    have = _read_existing(folder, sieve, totals)
    # SGLang's engine wants the main thread of a process; transformers gains nothing from one.
    context: Any = (
        multiprocessing.dummy
        if machine.engine == "transformers"
        else multiprocessing.get_context("spawn")
    )
    count = _shard_count(settings)
    shards = Shards(context.Value("q", 0), context.Lock(), count, frozenset(have))
    results, stop = context.Queue(), context.Event()
    workers = [
        context.Process(target=work, args=(settings, machine, index, shards, results, stop))
        for index in range(machine.replicas if totals.generated_tokens < tokens else 0)
        # No engine starts for shards that are all there.
        if len(have) < count
    ]
    for worker in workers:
        worker.start()
    store = _Store(folder, settings, sieve, totals)
    began = time.monotonic()
    try:
        for shard, event in _events(workers, results):
            store.take(shard, event)
            totals.seconds = time.monotonic() - began
            on_progress(totals, sieve)
            if totals.generated_tokens >= tokens:
                break
            if minutes is not None and totals.seconds >= 60 * minutes:
                break
    finally:
        stop.set()
        store.flush()
        _end(workers, results)
    summary = asdict(settings) | asdict(totals) | {"refused": dict(sieve.refused)}
    summary["tokens_per_s"] = round(totals.written_tokens / max(totals.seconds, 1e-9), 1)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _shard_count(settings: DataSettings) -> int:
    if not settings.prompts:
        return _MOST_SHARDS
    return -(-len(read_prompts(map(Path, settings.prompts))) // settings.shard_samples)


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:06d}.parquet"


def _read_existing(folder: Path, sieve: Sieve, totals: Totals) -> set[int]:
    """Count what is there already; give the shards that are complete."""
    have = set()
    for path in sorted(folder.glob("shard-*.parquet")):
        have.add(int(path.stem.removeprefix("shard-")))
        for sample in read_samples(path):
            answer = sum(sample.assistant_mask)
            sieve.remember(sample.input_ids[: len(sample.input_ids) - answer])
            totals.samples += 1
            totals.answer_tokens += answer
            totals.generated_tokens += sample.question_tokens + answer
    return have


class _Store:
    """Sieves conversations and writes each shard once it is complete."""

    def __init__(self, folder: Path, settings: DataSettings, sieve: Sieve, totals: Totals) -> None:
        self._folder, self._settings = folder, settings
        self._sieve, self._totals = sieve, totals
        self._open: dict[int, list[Sample]] = defaultdict(list)

    def take(self, shard: int, event: Conversation | str | None) -> None:
        """A conversation, the reason why there is none, or None: the shard is complete."""
        if event is None:
            self._write(shard)
        elif isinstance(event, str):
            self._sieve.refused[event] += 1
        else:
            self._add(shard, event)

    def flush(self) -> None:
        """Write the shards that are not complete; they count as complete from now on."""
        for shard in sorted(self._open):
            self._write(shard)

    def _add(self, shard: int, talk: Conversation) -> None:
        totals = self._totals
        generated = talk.question_tokens + len(talk.answer_ids)
        totals.written_tokens += generated
        if not self._sieve.keeps(talk.prompt_ids, talk.answer_ids, talk.prompt, talk.answer):
            return
        mask = [0] * len(talk.prompt_ids) + [1] * len(talk.answer_ids)
        self._open[shard].append(
            Sample(
                talk.prompt_ids + talk.answer_ids,
                mask,
                talk.question_tokens,
                talk.job.temperature,
                talk.job.source,
            )
        )
        totals.samples += 1
        totals.answer_tokens += len(talk.answer_ids)
        totals.generated_tokens += generated

    def _write(self, shard: int) -> None:
        samples = self._open.pop(shard, [])
        write_shard(_shard_path(self._folder, shard), samples, asdict(self._settings))


def _events(workers: list[Any], results: Any) -> Iterator[tuple[int, Conversation | str | None]]:
    """What the workers report, until all have ended. Raises RuntimeError if one of them fails."""
    ended = 0
    while ended < len(workers):
        try:
            shard, event = results.get(timeout=1.0)
        except queue.Empty:
            failed = [w for w in workers if w.exitcode not in (None, 0)]
            if failed:
                raise RuntimeError(
                    f"a generation worker died (exit code {failed[0].exitcode})"
                ) from None
            continue
        if shard == ENDED:
            ended += 1
        elif shard == FAILED:
            raise RuntimeError(f"a generation worker failed: {event}")
        else:
            yield shard, event


def _end(workers: list[Any], results: Any) -> None:
    """Let the workers close their engines; end those that do not."""
    patience = time.monotonic() + 20
    while any(w.is_alive() for w in workers) and time.monotonic() < patience:
        # A worker cannot end while its reports fill the pipe.
        try:
            results.get(timeout=0.1)
        except queue.Empty:
            continue
    for worker in workers:
        if worker.is_alive() and isinstance(worker, multiprocessing.process.BaseProcess):
            worker.terminate()
        worker.join()
