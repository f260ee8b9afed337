"""Read a corpus: files → units of work → documents, with bad ones counted and left out."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

JSON_LINES = "json lines"
TEXT = "text"
PARQUET = "parquet"
ARRAY = "array"

_FORMATS = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".txt": TEXT,
    ".text": TEXT,
    ".parquet": PARQUET,
    ".npy": ARRAY,
}
TEXT_FORMATS = frozenset({JSON_LINES, TEXT, PARQUET})
TOKEN_FORMATS = frozenset({PARQUET, ARRAY})
TOKEN_COLUMNS = ("token_ids", "input_ids", "tokens")

_UNIT_BYTES = 64 << 20
_UNIT_TOKENS = 1 << 22
# Also bounds the memory that one document takes on its way to counts, about 60 bytes a character.
_LONGEST_LINE = 16 << 20
# Of a parquet file, held at a time.
_ROWS = 128
_BOM = b"\xef\xbb\xbf"

Message = dict[str, str]
Document = str | list[Message]


@dataclass(frozen=True)
class Unit:
    """What one worker reads at a time: a part of one file, cut where documents are.

    start and stop: bytes of a plain file, row groups of a parquet file, tokens of an array;
    a compressed file is one unit, and stop is its size.
    """

    path: str
    format: str
    start: int
    stop: int
    weight: int
    """How much work this is, in bytes or so."""


def find_units(inputs: Sequence[Path], formats: frozenset[str]) -> list[Unit]:
    """Cut the files, and all files in the folders, into units; in a fixed order.

    Raises ValueError if there is nothing to read, or a file is of another format.
    """
    units = [unit for path in _files(inputs, formats) for unit in _units_of(path, _format_of(path))]
    if not units:
        raise ValueError(f"no documents in {', '.join(map(str, inputs))}: all files are empty")
    return units


def _files(inputs: Sequence[Path], formats: frozenset[str]) -> Iterator[Path]:
    known = " ".join(suffix for suffix, name in _FORMATS.items() if name in formats)
    for given in inputs:
        if given.is_dir():
            found = sorted(
                path for path in given.rglob("*") if path.is_file() and _format_of(path) in formats
            )
            if not found:
                raise ValueError(f"{given}: holds no file of a known format ({known}, also .gz)")
            yield from found
        elif not given.exists():
            raise ValueError(f"{given}: no such file or folder")
        elif _format_of(given) not in formats:
            raise ValueError(f"{given}: not a format that can be read here ({known}, also .gz)")
        else:
            yield given


def _format_of(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    found = _FORMATS.get(plain.suffix.lower(), "")
    # Only lines can be read from a compressed stream.
    return "" if path.suffix == ".gz" and found not in (JSON_LINES, TEXT) else found


def _units_of(path: Path, format: str) -> list[Unit]:
    if format == PARQUET:
        metadata = pq.ParquetFile(path).metadata
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        return [Unit(str(path), format, i, i + 1, size) for i, size in enumerate(sizes)]
    size, step = path.stat().st_size, _UNIT_BYTES
    if format == ARRAY:
        size, step = len(_load_array(path)), _UNIT_TOKENS
    elif path.suffix == ".gz":
        step = max(size, 1)
    cuts = [(at, min(size, at + step)) for at in range(0, size, step)]
    return [Unit(str(path), format, start, stop, stop - start) for start, stop in cuts]


def read_texts(unit: Unit, bad: Counter[str]) -> Iterator[Document]:
    """The documents of a unit. Each one that cannot be read adds to `bad` under its reason."""
    if unit.format == PARQUET:
        yield from _read_parquet_texts(unit, bad)
        return
    for line in _lines(unit, bad):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            bad["invalid UTF-8"] += 1
            continue
        document = _parse(text, bad) if unit.format == JSON_LINES else text
        if document is not None and _is_usable(document, bad):
            yield document


def _lines(unit: Unit, bad: Counter[str]) -> Iterator[bytes]:
    """The lines that begin in the unit, without their ends; empty ones are left out."""
    with _open(unit) as file:
        if unit.start > 0:
            # The line that reaches into this unit belongs to the one before.
            file.seek(unit.start - 1)
            _skip_line(file)
        compressed = isinstance(file, gzip.GzipFile)
        while compressed or file.tell() < unit.stop:
            at_start = file.tell() == 0
            line = _read_line(file, bad)
            if line is None:
                return
            line = line.removeprefix(_BOM) if at_start else line
            if line := line.rstrip(b"\r\n"):
                yield line


def _open(unit: Unit) -> BinaryIO:
    if unit.path.endswith(".gz"):
        return gzip.open(unit.path, "rb")  # type: ignore[return-value]
    return Path(unit.path).open("rb")


def _read_line(file: BinaryIO, bad: Counter[str]) -> bytes | None:
    """The next line, b"" if it was bad, None at the end of the file."""
    try:
        line = file.readline(_LONGEST_LINE)
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            bad[f"line above {_LONGEST_LINE >> 20} MiB"] += 1
            _skip_line(file)
            return b""
    except (EOFError, gzip.BadGzipFile):
        bad["damaged .gz stream (rest of the file)"] += 1
        return None
    return line or None


def _skip_line(file: BinaryIO) -> None:
    while True:
        part = file.readline(io.DEFAULT_BUFFER_SIZE)
        if not part or part.endswith(b"\n"):
            return


def _parse(text: str, bad: Counter[str]) -> Document | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        bad["invalid JSON"] += 1
        return None
    return _document_of(record if isinstance(record, dict) else {}, bad)


def _document_of(record: dict[str, Any], bad: Counter[str]) -> Document | None:
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str):
        return text
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    bad["no field `text` or `messages`"] += 1
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _is_usable(document: Document, bad: Counter[str]) -> bool:
    parts = [document] if isinstance(document, str) else [part["content"] for part in document]
    if not any(parts):
        bad["empty text"] += 1
        return False
    if sum(map(len, parts)) > _LONGEST_LINE:
        bad[f"text above {_LONGEST_LINE >> 20} Mi characters"] += 1
        return False
    try:
        for part in parts:
            part.encode()
    except UnicodeEncodeError:
        # JSON can spell half a surrogate pair, which is no text.
        bad["invalid UTF-8"] += 1
        return False
    return True


def _read_parquet_texts(unit: Unit, bad: Counter[str]) -> Iterator[Document]:
    file = pq.ParquetFile(unit.path)
    columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
    if not columns:
        raise ValueError(f"{unit.path}: no column `text` or `messages`; it has {_names(file)}")
    groups = range(unit.start, unit.stop)
    for batch in file.iter_batches(_ROWS, row_groups=list(groups), columns=columns):
        for record in batch.to_pylist():
            document = _document_of(record, bad)
            if document is not None and _is_usable(document, bad):
                yield document


def read_tokens(unit: Unit, eos: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids of a unit that is encoded already, as blocks of (token [n], document length [m]).

    Parquet: one document a row; `eos` is appended unless it ends with it. Array: one stream whose
    documents end with `eos`.
    """
    if unit.format == PARQUET:
        yield from _read_parquet_tokens(unit, eos)
        return
    stream = _load_array(Path(unit.path))
    # A document belongs to the unit in which it begins.
    start = _next_document(stream, unit.start, eos, unit) if unit.start else 0
    stop = _next_document(stream, unit.stop, eos, unit)
    token = np.array(stream[start:stop])
    end = np.flatnonzero(token == eos) + 1
    if len(token) and (len(end) == 0 or end[-1] != len(token)):
        end = np.append(end, len(token))
    yield token, np.diff(end, prepend=0)


def _load_array(path: Path) -> np.ndarray:
    stream = np.load(path, mmap_mode="r")
    if stream.ndim != 1 or stream.dtype.kind not in "iu":
        raise ValueError(f"{path}: expected integers [n], got {stream.dtype} {stream.shape}")
    return stream


def _next_document(stream: np.ndarray, at: int, eos: int, unit: Unit) -> int:
    """The first place >= `at` where a document begins, or the end of the stream."""
    if at >= len(stream):
        return len(stream)
    end = np.flatnonzero(stream[at - 1 : at + _UNIT_TOKENS] == eos)
    if len(end):
        return at + int(end[0])
    if at + _UNIT_TOKENS < len(stream):
        raise ValueError(
            f"{unit.path}: no end-of-sequence token {eos} in {_UNIT_TOKENS} tokens; "
            f"is --eos-id right?"
        )
    return len(stream)


def _read_parquet_tokens(unit: Unit, eos: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    file = pq.ParquetFile(unit.path)
    column = next((name for name in TOKEN_COLUMNS if name in file.schema_arrow.names), None)
    if column is None:
        wanted = " or ".join(f"`{name}`" for name in TOKEN_COLUMNS)
        raise ValueError(f"{unit.path}: no column {wanted}; it has {_names(file)}")
    groups = list(range(unit.start, unit.stop))
    for batch in file.iter_batches(4096, row_groups=groups, columns=[column]):
        lists = batch.column(0).cast(pa.large_list(pa.int64()))
        length = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        yield append_eos(lists.flatten().to_numpy(), length[length > 0], eos)


def append_eos(token: np.ndarray, length: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """End each document, of length [m] > 0 in token [n], with `eos` unless it does: the same."""
    end = np.cumsum(length)
    open_ended = token[end - 1] != eos
    return np.insert(token, end[open_ended], eos), length + open_ended


def _names(file: pq.ParquetFile) -> str:
    return ", ".join(file.schema_arrow.names)
