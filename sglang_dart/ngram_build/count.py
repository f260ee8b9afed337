"""Tokens → windows → sorted counts in parquet parts → one sorted stream of counts.

A part holds the distinct windows of some millions of tokens. DuckDB adds the parts up and sorts
the sums; it writes to disk what its memory limit cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# Peak bytes per buffered token while a part is made: ids, keys, their sort and their counts.
BYTES_PER_TOKEN = 64
_SMALLEST_BUFFER = 1 << 16
_LARGEST_BUFFER = 1 << 23
_KEY_BITS = 63
_ROWS = 1 << 20


@dataclass(frozen=True)
class WindowKey:
    """How a window of `order` tokens becomes one or two int64 columns that sort like the window.

    A token takes `bits` bits as id + 1; 0 stands after the end of a document.
    """

    order: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.bits * 3 > _KEY_BITS:
            raise ValueError(
                f"vocabulary of {self.vocab_size} tokens: the limit is {(1 << 21) - 1}"
            )

    @property
    def bits(self) -> int:
        return self.vocab_size.bit_length()

    @property
    def split(self) -> tuple[int, ...]:
        """Tokens in each column."""
        if self.order * self.bits <= _KEY_BITS:
            return (self.order,)
        return (self.order - self.order // 2, self.order // 2)

    @property
    def columns(self) -> list[str]:
        return [f"key{i}" for i in range(len(self.split))]

    def pack(self, token: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
        """Keys [n] of the window at every token of documents that stand one after another."""
        filled = np.zeros(len(token) + self.order, np.int64)
        filled[: len(token)] = token
        filled[: len(token)] += 1
        end = np.cumsum(length)
        left = np.repeat(end, length) - np.arange(len(token))
        keys, place = [], 0
        for tokens in self.split:
            key = np.zeros(len(token), np.int64)
            for _ in range(tokens):
                key <<= self.bits
                key |= np.where(left > place, filled[place : place + len(token)], 0)
                place += 1
            keys.append(key)
        return keys

    def unpack(self, keys: list[np.ndarray]) -> np.ndarray:
        """Windows [n, order] int32, -1 after the end of a document."""
        gram = np.empty((len(keys[0]), self.order), np.int32)
        place = 0
        for key, tokens in zip(keys, self.split, strict=True):
            for i in range(tokens):
                shift = (tokens - 1 - i) * self.bits
                gram[:, place] = ((key >> shift) & ((1 << self.bits) - 1)) - 1
                place += 1
        return gram


class PartWriter:
    """Counts windows, and writes a sorted part whenever the buffer is full."""

    def __init__(self, key: WindowKey, prefix: Path, memory: int) -> None:
        """`prefix` begins the names of the parts; `memory` bounds the buffer, in bytes."""
        self.parts = 0
        self._key = key
        self._prefix = prefix
        self._limit = min(max(memory // BYTES_PER_TOKEN, _SMALLEST_BUFFER), _LARGEST_BUFFER)
        self._token: list[np.ndarray] = []
        self._length: list[np.ndarray] = []
        self._buffered = 0

    def add(self, token: np.ndarray, length: np.ndarray) -> None:
        """Documents of length [m] in token [n]. Raises ValueError for a token out of range."""
        if len(token) == 0:
            return
        low, high = int(token.min()), int(token.max())
        if low < 0 or high >= self._key.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token {bad} is outside the vocabulary of {self._key.vocab_size}")
        self._token.append(token.astype(np.int32, copy=False))
        self._length.append(length)
        self._buffered += len(token)
        if self._buffered >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if not self._token:
            return
        keys = self._key.pack(np.concatenate(self._token), np.concatenate(self._length))
        self._token, self._length, self._buffered = [], [], 0
        columns, count = _count(keys)
        arrays = dict(zip(self._key.columns, columns, strict=True)) | {"n": count}
        pq.write_table(
            pa.table(arrays),
            f"{self._prefix}-{self.parts:05d}.parquet",
            compression="lz4",
            use_dictionary=False,
            # Sorted keys differ little.
            column_encoding=dict.fromkeys(arrays, "DELTA_BINARY_PACKED"),
        )
        self.parts += 1


def _count(keys: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Distinct keys, ascending, and how often each occurs."""
    if len(keys) == 1:
        keys[0].sort()
    else:
        order = np.lexsort(keys[::-1])
        keys = [key[order] for key in keys]
    first = np.zeros(len(keys[0]), bool)
    first[0] = True
    for key in keys:
        first[1:] |= key[1:] != key[:-1]
    start = np.flatnonzero(first)
    return [key[start] for key in keys], np.diff(start, append=len(first))


def merge_parts(
    key: WindowKey, parts: Path, memory: int, threads: int, spill: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Add up the parts in the folder `parts`: (windows [n, order] int32, count [n] int64), sorted.

    DuckDB holds about `memory` bytes and spills into the folder `spill`.
    """
    columns = ", ".join(key.columns)
    with duckdb.connect() as connection:
        connection.execute(f"SET memory_limit = '{memory}B'")
        connection.execute(f"SET threads = {threads}")
        connection.execute("SET temp_directory = ?", [str(spill)])
        reader = connection.sql(
            f"SELECT {columns}, sum(n)::BIGINT AS n FROM read_parquet($parts) "
            f"GROUP BY {columns} ORDER BY {columns}",
            params={"parts": str(parts / "*.parquet")},
        ).to_arrow_reader(_ROWS)
        for batch in reader:
            arrays = [column.to_numpy() for column in batch.columns]
            yield key.unpack(arrays[:-1]), np.ascontiguousarray(arrays[-1])
