"""Time n-gram lookups: nanoseconds a candidate, on one thread.

    python -m benchmarks.ngram_lookup [MODEL] [--candidates 25] [--rounds 200] [--realtime]

Without a model it makes one of about 5 million nodes.

A query is a context met in the model and candidates as a drafter proposes them: some that followed
the context, most of them frequent tokens. Two regimes, both with all pages in memory:
`same round`: the 140 queries of one decode round again and again (processor caches warm);
`new rounds`: every round asks about other contexts, as decoding does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.growth import scheduled
from benchmarks.ngram_generate import DOCUMENT_TOKENS, VOCAB_SIZE, token_stream
from sglang_dart import _core
from sglang_dart.ngram_build.count import WindowKey

QUERIES_PER_ROUND = 140


def make_queries(
    model: _core.NgramModel, rounds: int, candidates: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Contexts [rounds * 140, order - 1] and candidates [rounds * 140, candidates], int32."""
    random = np.random.default_rng(seed)
    n = rounds * QUERIES_PER_ROUND
    vocab_size = model.vocab_size or model.highest_token + 1
    # Zipf's law over ids, as in a vocabulary ordered by merges.
    frequent = (vocab_size ** random.random((n, candidates)) - 1).astype(np.int32)
    contexts = np.empty((n, model.order - 1), np.int32)
    for row in range(n):
        path: list[int] = [int(vocab_size ** random.random() - 1)]
        for _ in range(2, model.order):
            token, count, _ = model.continuations(path)
            path.append(_draw(token, count, random) if len(token) else 0)
        contexts[row] = path
        token, count, _ = model.continuations(path)
        if len(token):
            likely = token[np.argsort(count)[::-1][: candidates // 3]]
            frequent[row, : len(likely)] = likely
    return contexts, random.permuted(frequent, axis=1)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--candidates", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--realtime", action="store_true", help="let nothing disturb the timing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or make_model(Path(folder) / "generated.ngram")
        result = measure(path, arguments.rounds, arguments.candidates, arguments.realtime)
        print(json.dumps(result))


def make_model(path: Path, tokens: int = 5_000_000) -> str:
    """Count a generated stream; return the path."""
    key = WindowKey(3, VOCAB_SIZE)
    stream = token_stream(tokens)
    length = np.full(len(stream) // DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    window, count = np.unique(key.pack(stream, length)[0], return_counts=True)
    builder = _core.NgramBuilder(3, VOCAB_SIZE)
    builder.append(key.unpack([window]), count)
    builder.write(str(path))
    return str(path)


def measure(path: str, rounds: int, candidates_each: int, realtime: bool) -> dict[str, Any]:
    start = time.perf_counter()
    model = _core.NgramModel.open(path)
    open_ms = (time.perf_counter() - start) * 1e3
    contexts, candidates = make_queries(model, rounds, candidates_each)
    one = slice(0, QUERIES_PER_ROUND)
    _, length = model.query_batch(contexts, candidates)
    with scheduled(realtime):
        same_ns = time_queries(model, contexts[one], candidates[one], 200)
        new_ns = time_queries(model, contexts, candidates, 9)
    return {
        "model": path,
        "nodes": model.node_count,
        "bytes_per_node": round(model.file_bytes / model.node_count, 2),
        "open_ms": round(open_ms, 3),
        "candidates": candidates_each,
        "found_by_context_length": np.bincount(length.ravel(), minlength=model.order).tolist(),
        "same_round_ns": round(same_ns, 1),
        "new_rounds_ns": round(new_ns, 1),
    }


if __name__ == "__main__":
    main()
