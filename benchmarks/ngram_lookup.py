"""Time n-gram lookups: nanoseconds a candidate, on one thread.

    python -m benchmarks.ngram_lookup [--realtime] [--large] [MODEL ...]

Without a model it generates two of about 1 and 5 million nodes, once; --large adds one of 60
million, which takes 14 GB of memory to generate.

The queries are those of DART's tree search, recorded: 140 contexts a round, 25 candidates each.
Two regimes, both with all pages in memory: `same round`: the queries of one round again and again;
`new rounds`: hundreds of rounds of other texts, so that each finds little of its own in the
processor's caches.

Opening is timed twice: with the file in memory, and after the system was asked to forget it.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cache import cached
from benchmarks.growth import DECAY, WEIGHT, make_requests, scheduled
from benchmarks.ngram_generate import DOCUMENT_TOKENS, VOCAB_SIZE, token_stream, write_trie
from benchmarks.result import write_result
from sglang_dart import _core
from sglang_dart.ngram_build.count import WindowKey
from sglang_dart.ngram_model import convert
from sglang_dart.score.continuity import Continuity
from sglang_dart.score.marginal import Marginal
from sglang_dart.tree.grow import grow
from sglang_dart.tree.recipe import beam


class Recorder:
    """An n-gram model for the torch scorer that keeps what it is asked."""

    def __init__(self, model: _core.NgramModel) -> None:
        self.order = model.order
        self.contexts: list[np.ndarray] = []
        self.candidates: list[np.ndarray] = []
        self._model = model

    def probability(self, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        rows = [x.flatten(0, -2).to(torch.int32).contiguous().numpy() for x in (context, token)]
        self.contexts.append(rows[0])
        self.candidates.append(rows[1])
        found, _ = self._model.query_batch(*rows)
        return torch.from_numpy(found).view(token.shape)


def make_queries(model: _core.NgramModel, rounds: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the search of DART asks in each round: contexts [140, order - 1], candidates [140, 25].

    It drafts places in a text that the model itself has drawn.
    """
    queries = []
    for request in make_requests(draw_text(model, 50_000), 1)[:rounds]:
        recorder = Recorder(model)
        tail = request.tail[:, -(model.order - 1) :]
        scorer = Continuity(Marginal(request.candidates, DECAY), recorder, tail, WEIGHT)
        grow(scorer, beam(), request.root, request.end)
        # The first level has a context of what was committed alone, which may be short.
        contexts = [_padded(rows, model.order - 1) for rows in recorder.contexts]
        queries.append((np.concatenate(contexts), np.concatenate(recorder.candidates)))
    return queries


def _padded(contexts: np.ndarray, width: int) -> np.ndarray:
    return np.pad(contexts, ((0, 0), (width - contexts.shape[1], 0)), constant_values=-1)


def draw_text(model: _core.NgramModel, tokens: int, seed: int = 0) -> np.ndarray:
    """A text in which each token follows as often as the model has seen it follow."""
    random = np.random.default_rng(seed)
    vocab_size = model.vocab_size or model.highest_token + 1
    text: list[int] = []
    while len(text) < tokens:
        token, count, _ = model.continuations(text[-model.order + 1 :])
        # Where nothing is known to follow: Zipf's law over ids, as in an order of merges.
        known = _draw(token, count, random) if len(token) else vocab_size ** random.random() - 1
        text.append(int(known))
    return np.array(text)


def _draw(token: np.ndarray, count: np.ndarray, random: np.random.Generator) -> int:
    return int(token[np.searchsorted(np.cumsum(count), random.integers(count.sum()), "right")])


def time_queries(
    model: _core.NgramModel, contexts: np.ndarray, candidates: np.ndarray, repeats: int
) -> float:
    """Processor time a candidate in nanoseconds: median of `repeats` passes after a first one."""
    passes = []
    for _ in range(repeats + 1):
        start = time.thread_time_ns()
        model.query_batch(contexts, candidates)
        passes.append((time.thread_time_ns() - start) / candidates.size)
    return float(np.median(passes[1:]))


def make_model(path: Path, tokens: int) -> None:
    """Count a generated stream into an order-3 model."""
    key = WindowKey(3, VOCAB_SIZE)
    stream = token_stream(tokens)
    length = np.full(len(stream) // DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    window, count = np.unique(key.pack(stream, length)[0], return_counts=True)
    builder = _core.NgramBuilder(3, VOCAB_SIZE)
    builder.append(key.unpack([window]), count)
    builder.write(str(path))


def time_open(path: Path, *, forget: bool, repeats: int = 15) -> float:
    """Median milliseconds from a path to a model that answers."""
    times = []
    for _ in range(repeats):
        if forget:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        _core.NgramModel.open(str(path))
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def measure(path: Path, rounds: int, realtime: bool) -> dict[str, Any]:
    open_ms, cold_open_ms = (time_open(path, forget=forget) for forget in (False, True))
    model = _core.NgramModel.open(str(path))
    queries = make_queries(model, rounds)
    contexts, candidates = (np.concatenate(part) for part in zip(*queries, strict=True))
    _, length = model.query_batch(contexts, candidates)
    with scheduled(realtime):
        same_ns = [time_queries(model, *queries[i], 100) for i in range(9)]
        new_ns = time_queries(model, contexts, candidates, 15)
    return {
        "model": path.name,
        "nodes": model.node_count,
        "bytes_per_node": round(model.file_bytes / model.node_count, 2),
        "open_ms": round(open_ms, 3),
        "cold_open_ms": round(cold_open_ms, 3),
        "queries": len(contexts),
        "found_by_context_length": np.bincount(length.ravel(), minlength=model.order).tolist(),
        "same_round_ns": round(float(np.median(same_ns)), 1),
        "new_rounds_ns": round(new_ns, 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="n-gram lookups, CPU ns a candidate")
    columns = ("nodes", "bytes_per_node", "open_ms", "cold_open_ms")
    columns += ("same_round_ns", "new_rounds_ns")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{row[column]:,}" for column in columns))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", type=Path, help="compact files")
    parser.add_argument("--rounds", type=int, default=500, help="each of 140 queries")
    parser.add_argument("--realtime", action="store_true", help="let nothing disturb the timing")
    parser.add_argument("--large", action="store_true", help="also a model of 60 million nodes")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/ngram_lookup.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = arguments.model or [
        cached(f"{tokens}-tokens.ngram", partial(make_model, tokens=tokens))
        for tokens in (750_000, 5_000_000)
    ]
    if arguments.large:
        trie = cached("60000000.trie", partial(write_trie, 60_000_000))
        models.append(cached("60000000.ngram", partial(convert, trie)))
    rows = [measure(path, arguments.rounds, arguments.realtime) for path in models]
    show(rows)
    command = ["python -m benchmarks.ngram_lookup", *["--realtime"] * arguments.realtime]
    command += ["--large"] * arguments.large
    command += [path.name for path in arguments.model]
    write_result(arguments.output, " ".join(command), {"rows": rows})


if __name__ == "__main__":
    main()
