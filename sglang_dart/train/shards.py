"""Training texts on disk: parquet shards of token ids and assistant masks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIX = ".parquet"
META = b"sglang_dart"
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        # 1 for the tokens of an answer, its end-of-turn token included.
        ("assistant_mask", pa.list_(pa.int8())),
        # Of the prompt's tokens, those that the target wrote.
        ("question_tokens", pa.int32()),
        ("temperature", pa.float32()),
        ("source", pa.string()),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One conversation: ids, a mask of the same length, and where they come from."""

    input_ids: list[int]
    assistant_mask: list[int]
    question_tokens: int
    temperature: float
    source: str


def write_shard(path: Path, samples: Sequence[Sample], meta: Mapping[str, Any]) -> None:
    """Write a shard in one rename, `meta` (JSON) in its schema."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    schema = SCHEMA.with_metadata({META: json.dumps(meta).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.table(columns, schema=schema), scratch, compression="zstd")
    os.replace(scratch, path)


def shard_files(folders: Iterable[str | Path]) -> list[Path]:
    """All shards of these folders (or shard files), in order of name.

    Raises ValueError for a place without shards.
    """
    files: list[Path] = []
    for place in map(Path, folders):
        found = [place] if place.is_file() else sorted(place.glob(f"*{SUFFIX}"))
        if not found:
            raise ValueError(
                f"{place}: no *{SUFFIX} shards here; make some with `sglang-dart train data`"
            )
        files += found
    return files


def read_meta(path: Path) -> dict[str, Any]:
    """What `write_shard` was given as `meta`; empty for a foreign file."""
    return json.loads((_schema(path).metadata or {}).get(META, b"{}"))


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """Columns of one shard. Raises ValueError naming the file if it is no shard."""
    missing = set(names) - set(_schema(path).names)
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(sorted(missing))}; a shard has {', '.join(SCHEMA.names)}"
        )
    return pq.read_table(path, columns=list(names))


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of one shard, one by one."""
    for row in read_columns(path, SCHEMA.names).to_pylist():
        yield Sample(**row)


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from error
