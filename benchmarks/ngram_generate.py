"""Generate token streams and .trie files of any size with the statistics of text.

    python -m benchmarks.ngram_generate tokens 100e6 /tmp/tokens   # .npy shards
    python -m benchmarks.ngram_generate trie 50e6 /tmp/big.trie    # about 50 million nodes

Every context of two tokens has its own successors, drawn from one vocabulary whose frequencies
follow Zipf's law, so n-grams repeat as in text and the model grows with the stream. The .trie has
its nodes in the order in which a counting program would have met them, lists of children in no
order, as the published files have.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

VOCAB_SIZE = 151_936
DOCUMENT_TOKENS = 1024
EOS = VOCAB_SIZE - 1
_LANES = 4096
# As measured at 50 million nodes.
_TOKENS_PER_NODE = 1.5


def token_stream(tokens: int, seed: int = 0) -> np.ndarray:
    """About `tokens` token ids, int32: documents of DOCUMENT_TOKENS, each ended by EOS."""
    random = np.random.default_rng(seed)
    documents = max(1, tokens // DOCUMENT_TOKENS)
    parts = [
        _documents(min(_LANES, documents - start), random) for start in range(0, documents, _LANES)
    ]
    return np.concatenate(parts)


def _documents(lanes: int, random: np.random.Generator) -> np.ndarray:
    token = np.empty((DOCUMENT_TOKENS, lanes), np.uint64)
    token[:2] = random.integers(0, VOCAB_SIZE, (2, lanes))
    for i in range(2, DOCUMENT_TOKENS):
        # Rank of the successor within its context: a power law, so the first ones recur.
        rank = (random.random(lanes) ** -1.8).astype(np.uint64)
        # One time in three the older token does not matter, so bigrams recur on their own too.
        older = token[i - 2] * (random.random(lanes) < 0.67)
        uniform = _hash(older, token[i - 1], rank)
        # Inverse of Zipf's law: token id = rank in the vocabulary, as in a BPE by merges.
        token[i] = np.minimum(VOCAB_SIZE**uniform - 1, EOS - 1).astype(np.uint64)
    token[-1] = EOS
    return np.ascontiguousarray(token.T).reshape(-1).astype(np.int32)


def _hash(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Uniform in [0, 1) for each triple (splitmix64 rounds)."""
    x = a * np.uint64(0x9E3779B97F4A7C15) + b * np.uint64(0xC2B2AE3D27D4EB4F) + c
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(31))) * np.uint64(multiplier)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def write_tokens(tokens: int, folder: Path) -> None:
    """Write about `tokens` token ids as .npy shards."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = 1 << 25
    for i, start in enumerate(range(0, tokens, shard)):
        np.save(folder / f"{i:04d}.npy", token_stream(min(shard, tokens - start), seed=i))


def write_trie(nodes: int, path: Path, seed: int = 0) -> int:
    """Write an order-3 .trie of about `nodes` nodes; return how many it has."""
    stream = token_stream(int(nodes * _TOKENS_PER_NODE), seed)
    shift = 18
    parts = []
    for level in range(3):
        key = stream[: len(stream) - level].astype(np.int64)
        for next_token in range(1, level + 1):
            key = key << shift | stream[next_token : len(key) + next_token]
        # Windows do not cross a document's end.
        start = np.arange(len(key))
        start = start[start % DOCUMENT_TOKENS < DOCUMENT_TOKENS - level]
        unique, first, count = np.unique(key[start], return_index=True, return_counts=True)
        parts.append((unique << (2 - level) * shift, start[first] * 3 + level, count))
    return _write_nodes(parts, shift, path, len(stream))


def _write_nodes(
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], shift: int, path: Path, total: int
) -> int:
    sizes = [len(unique) for unique, _, _ in parts]
    # A node's id: 1 + how many nodes were met before it.
    met = np.concatenate([first for _, first, _ in parts])
    ids = np.empty(len(met), np.int64)
    ids[np.argsort(met, kind="stable")] = np.arange(1, len(met) + 1)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    count_of = len(met) + 1
    token, parent, freq, children = (np.zeros(count_of, np.int64) for _ in range(4))
    freq[0] = total
    for level, (unique, _, count) in enumerate(parts):
        own = ids[starts[level] : starts[level + 1]]
        token[own] = unique >> ((2 - level) * shift) & ((1 << shift) - 1)
        freq[own] = count
        if level:
            above = parts[level - 1][0]
            place = np.searchsorted(above, unique >> ((3 - level) * shift) << ((3 - level) * shift))
            parent[own] = ids[starts[level - 1] + place]
        children += np.bincount(parent[own], minlength=count_of)
    offset = 16 + np.concatenate([[0], np.cumsum(24 + 12 * children)])
    # Every field starts at a multiple of four bytes.
    data = np.memmap(path, np.uint32, "w+", shape=(int(offset[-1]) // 4,))
    data[:4] = np.array([3, count_of], "<u8").view(np.uint32)
    record = np.dtype([("t", "<i4"), ("p", "<u8"), ("f", "<i4"), ("c", "<u8")])
    entry = np.dtype([("t", "<i4"), ("i", "<u8")])
    rows = np.empty(count_of, record)
    rows["t"], rows["p"], rows["f"], rows["c"] = token, parent, freq, children
    _scatter(data, offset[:-1], rows)
    # The order of a hash map: by parent, then by a scrambled token.
    order = np.lexsort((token[1:] * 2654435761 % (1 << 32), parent[1:])) + 1
    first = np.concatenate([[0], np.cumsum(children)])[parent[order]]
    listed = np.empty(len(order), entry)
    listed["t"], listed["i"] = token[order], order
    at = offset[parent[order]] + 24 + 12 * (np.arange(len(order)) - first)
    _scatter(data, at, listed)
    data.flush()
    return count_of


def _scatter(data: np.ndarray, offset: np.ndarray, rows: np.ndarray) -> None:
    """Put row i at byte offset[i]."""
    words = rows.view(np.uint32).reshape(len(rows), -1)
    # In file order, a block at a time: random writes to a mapped file are slow.
    order = np.argsort(offset)
    for start in range(0, len(order), 1 << 20):
        block = order[start : start + (1 << 20)]
        for i in range(words.shape[1]):
            data[offset[block] // 4 + i] = words[block, i]


def main() -> None:
    kind, size, target = sys.argv[1], int(float(sys.argv[2])), Path(sys.argv[3])
    if kind == "trie":
        print(f"{write_trie(size, target):,} nodes, {target.stat().st_size:,} bytes")
        return
    write_tokens(size, target)


if __name__ == "__main__":
    main()
