"""Build a model: units shared out to processes, their parts kept on disk, then added up.

The folder of work holds `plan.json` (what is built from what), `parts/` and one file in `done/`
for each finished unit. The same command finds it and goes on with the units that are missing.
The result depends on the inputs alone, since adding counts up does not care for their order.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dart import _core
from sglang_dart.exclusion import Exclusion
from sglang_dart.ngram_build.count import PartWriter, WindowKey, merge_parts
from sglang_dart.ngram_build.documents import (
    Document,
    Unit,
    append_eos,
    read_texts,
    read_tokens,
)
from sglang_dart.ngram_build.encode import Encoder, TokenizerSource
from sglang_dart.ngram_model import Vocabulary

SMALLEST_MEMORY = 1 << 30
# Under which evaluation texts are counted among the documents that were left out.
OVERLAP = "evaluation overlap"
# What a process takes before it buffers tokens: interpreter, libraries, tokenizer.
_PROCESS_BYTES = 300 << 20
_RULES = 1

# Called with the work done and the whole, of one stage.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What is built. `tokenizer` is None where the inputs are token ids already.

    exclude: files of evaluation sets (see exclusion.py), whose texts are left out.
    """

    units: tuple[Unit, ...]
    order: int
    vocabulary: Vocabulary
    eos: int
    tokenizer: TokenizerSource | None
    exclude: tuple[str, ...] = ()

    @property
    def key(self) -> WindowKey:
        return WindowKey(self.order, self.vocabulary.size)

    def identity(self) -> dict[str, Any]:
        """All that the result depends on, files by size and time of change."""
        paths = [*(unit.path for unit in self.units), *self.exclude]
        files = {path: os.stat(path) for path in paths}
        encoding = json.dumps(asdict(self.tokenizer) if self.tokenizer else None)
        return {
            "rules": _RULES,
            "order": self.order,
            "vocab_size": self.vocabulary.size,
            "eos": self.eos,
            "tokenizer": hashlib.sha256(encoding.encode()).hexdigest(),
            "files": {path: [stat.st_size, stat.st_mtime_ns] for path, stat in files.items()},
            "exclude": list(self.exclude),
            "units": [[unit.path, unit.start, unit.stop] for unit in self.units],
        }


@dataclass(frozen=True)
class Result:
    """What a build counted; `bad` documents were left out, by reason."""

    bytes: int
    documents: int
    tokens: int
    bad: dict[str, int]


def build(
    plan: Plan, output: Path, work: Path, workers: int, memory: int, progress: Progress
) -> Result:
    """Count, add up and write `output`, with at most about `memory` bytes in all processes.

    Raises ValueError for inputs that no document can be read from, or if `work` holds another
    build or one that is running; RuntimeError if a worker dies.
    """
    if memory < SMALLEST_MEMORY:
        raise ValueError(f"memory of {memory / 1e9:.2f} GB: a build needs at least 1 GiB")
    # A bad file is an error here rather than the death of a worker.
    Exclusion.from_files(map(Path, plan.exclude))
    with _opened(plan, work):
        return _build(plan, output, work, workers, memory, progress)


def _build(
    plan: Plan, output: Path, work: Path, workers: int, memory: int, progress: Progress
) -> Result:
    workers = max(1, min(workers, memory // (2 * _PROCESS_BYTES)))
    share = memory // workers - _PROCESS_BYTES
    _count_units(plan, work, workers, share, progress)
    done = [
        json.loads((work / "done" / f"{i:06d}.json").read_text()) for i in range(len(plan.units))
    ]
    bad = sum((Counter(unit["bad"]) for unit in done), Counter())
    documents, tokens = (sum(unit[name] for unit in done) for name in ("documents", "tokens"))
    if tokens == 0:
        raise ValueError(f"no document could be read; left out: {dict(bad)}")
    metadata = {
        "source": "build",
        "tokenizer": plan.vocabulary.name,
        "eos": plan.eos,
        "documents": documents,
    }
    if plan.exclude:
        names = [Path(path).name for path in plan.exclude]
        metadata |= {"exclude": names, "excluded_documents": bad[OVERLAP]}
    size = _merge(plan, output, work, workers, memory - _PROCESS_BYTES, metadata, progress, tokens)
    shutil.rmtree(work)
    return Result(size, documents, tokens, dict(sorted(bad.items())))


@contextmanager
def _opened(plan: Plan, work: Path) -> Iterator[None]:
    """Make the folder of work, or take over what an interrupted build left in it."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{work}: a build is running here; give another --work") from error
        _take_over(plan, work)
        yield


def _take_over(plan: Plan, work: Path) -> None:
    file, identity = work / "plan.json", plan.identity()
    if file.exists() and json.loads(file.read_text()) != identity:
        raise ValueError(
            f"{work}: holds the unfinished build of other inputs or settings; "
            f"remove it, or give another --work"
        )
    for name in ("parts", "done", "spill"):
        (work / name).mkdir(exist_ok=True)
    _write_whole(file, identity)


def _write_whole(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def _count_units(plan: Plan, work: Path, workers: int, share: int, progress: Progress) -> None:
    whole = sum(unit.weight for unit in plan.units)
    done = {int(file.stem) for file in (work / "done").glob("*.json")}
    finished = sum(plan.units[i].weight for i in done)
    todo = [i for i in range(len(plan.units)) if i not in done]
    progress("count", finished, whole)
    for i in _run(plan, work, todo, workers, share):
        finished += plan.units[i].weight
        progress("count", finished, whole)


def _run(plan: Plan, work: Path, todo: list[int], workers: int, share: int) -> Iterator[int]:
    """Count the units, in this process or in others; yield each when it is done."""
    if workers == 1 or len(todo) <= 1:
        counter = _UnitCounter(plan, work, share)
        for i in todo:
            counter.count(i)
            yield i
        return
    # Not forked: the parent holds threads of tokenizers and DuckDB.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (plan, work, share))
    try:
        futures = {pool.submit(_count_in_worker, i): i for i in todo}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker died, perhaps for want of memory; the same command goes on from here, "
            "with fewer --workers it needs less"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _UnitCounter:
    """Counts units, one after another, in one process."""

    def __init__(self, plan: Plan, work: Path, share: int) -> None:
        self._plan = plan
        self._work = work
        self._share = share
        self._bad: Counter[str] = Counter()
        self._encoder = Encoder(plan.tokenizer, self._bad) if plan.tokenizer else None
        self._exclusion = Exclusion.from_files(map(Path, plan.exclude)) if plan.exclude else None

    def count(self, i: int) -> None:
        unit = self._plan.units[i]
        # What an interrupted run left of this unit.
        for stale in (self._work / "parts").glob(f"{i:06d}-*"):
            stale.unlink()
        self._bad.clear()
        parts = PartWriter(self._plan.key, self._work / "parts" / f"{i:06d}", self._share)
        documents = tokens = 0
        for token, length in self._documents(unit):
            try:
                parts.add(token, length)
            except ValueError as error:
                raise ValueError(f"{unit.path}: {error}") from error
            documents += len(length)
            tokens += len(token)
        parts.flush()
        done = {"documents": documents, "tokens": tokens, "bad": self._bad}
        _write_whole(self._work / "done" / f"{i:06d}.json", done)

    def _documents(self, unit: Unit) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self._encoder is None:
            yield from read_tokens(unit, self._plan.eos)
            return
        for batch in self._encoder.encode(self._texts(unit)):
            if batch:
                length = np.array([len(row) for row in batch])
                yield append_eos(np.concatenate(batch), length, self._plan.eos)

    def _texts(self, unit: Unit) -> Iterator[Document]:
        for document in read_texts(unit, self._bad):
            if self._exclusion is not None and overlaps(self._exclusion, document):
                self._bad[OVERLAP] += 1
            else:
                yield document


def overlaps(exclusion: Exclusion, document: Document) -> bool:
    """Does a document hold 13 words in a row of an evaluation text, or ask a short one?"""
    if isinstance(document, str):
        return exclusion.hits(document)
    asked = (message["content"] for message in document if message["role"] == "user")
    whole = " ".join(message["content"] for message in document)
    return any(map(exclusion.hits, asked)) or exclusion.hits("", whole)


_counter: _UnitCounter


def _start_worker(plan: Plan, work: Path, share: int) -> None:
    # A parent that is killed cannot end its workers.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _counter
    _counter = _UnitCounter(plan, work, share)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _count_in_worker(i: int) -> None:
    _counter.count(i)


def _merge(
    plan: Plan,
    output: Path,
    work: Path,
    threads: int,
    memory: int,
    metadata: dict[str, Any],
    progress: Progress,
    tokens: int,
) -> int:
    vocabulary = plan.vocabulary
    builder = _core.NgramBuilder(
        plan.order, vocabulary.size, vocabulary.sha256, str(work / "spill")
    )
    progress("add up", 0, tokens)
    added = 0
    for gram, count in merge_parts(plan.key, work / "parts", memory, threads, work / "spill"):
        builder.append(gram, count)
        added += int(count.sum())
        progress("add up", added, tokens)
    return builder.write(str(output), json.dumps(metadata, sort_keys=True))
