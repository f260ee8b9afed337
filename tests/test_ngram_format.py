"""The compact format as docs/ngram.md describes it, read without the core."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from sglang_dart import _core

ORDER, VOCAB = 3, 300
HEADER = struct.Struct("<8sIIQQII6I32sIII6II116sI")


def up_to_line(offset: int) -> int:
    return -(-offset // 64) * 64


def words_at(data: bytes, offset: int, size: int) -> tuple[np.ndarray, int]:
    """`size` words and the offset behind their padding, which is checked."""
    end = up_to_line(offset + 4 * size) + 64
    words = np.frombuffer(data, "<i4", (end - offset) // 4, offset)
    assert (words[size:] == 0x7FFFFFFF).all()
    return words[:size], end


def read_level(data: bytes, begin: int, size: int, deepest: bool):
    """Words, infos [n + 1, 2] or None, and the offset behind the level."""
    words, offset = words_at(data, begin, size)
    infos = None
    if not deepest:
        infos = np.frombuffer(data, "<u4", 2 * (size + 1), offset).reshape(-1, 2)
        end = up_to_line(offset + infos.nbytes)
        assert not any(data[offset + infos.nbytes : end])
        offset = end
    below = words
    for _ in range(5):
        if len(below) <= 16:
            break
        index, offset = words_at(data, offset, -(-len(below) // 16))
        assert np.array_equal(index, below[::16])
        below = index
    return words, infos, offset


@pytest.fixture(scope="module")
def counts() -> dict[tuple[int, ...], int]:
    """Distinct n-grams of up to ORDER tokens, some of them very frequent."""
    random = np.random.default_rng(1)
    gram = np.unique(
        np.minimum(random.zipf(1.2, (3000, ORDER)), VOCAB).astype(np.int32) - 1, axis=0
    )
    gram[::9, 2] = -1
    gram = np.unique(gram, axis=0)
    count = random.integers(1, 100, len(gram))
    # A word has 22 bits for a count.
    count[5::50] = (1 << 22) + np.arange(len(count[5::50]))
    rows = zip(gram.tolist(), count.tolist(), strict=True)
    return {tuple(t for t in row if t >= 0): n for row, n in rows}


def test_every_byte_is_as_documented(tmp_path: Path, counts: dict[tuple[int, ...], int]) -> None:
    path = tmp_path / "model.ngram"
    builder = _core.NgramBuilder(ORDER, VOCAB, bytes(range(32)))
    rows = [[*path, *[-1] * (ORDER - len(path))] for path in counts]
    builder.append(np.array(rows, np.int32), np.array(list(counts.values())))
    builder.write(str(path), '{"tokenizer": "tiny"}')
    data = path.read_bytes()

    fields = HEADER.unpack_from(data)
    magic, version, order, file_bytes, total, vocab_size, count_bits = fields[:7]
    sizes, sha256, large_counts, metadata_bytes, metadata_crc = fields[7:13], *fields[13:17]
    level_crc, large_crc, zeros, header_crc = fields[17:23], *fields[23:]
    assert magic == bytes.fromhex("894E4752414D0D0A")
    assert (version, order, file_bytes, vocab_size) == (1, ORDER, len(data), VOCAB)
    assert count_bits == 31 - (VOCAB - 1).bit_length() == 22
    assert total == sum(counts.values())
    assert sha256 == bytes(range(32))
    assert not any(zeros)
    assert header_crc == zlib.crc32(data[:252])
    metadata = data[256 : 256 + metadata_bytes]
    assert metadata == b'{"tokenizer": "tiny"}'
    assert metadata_crc == zlib.crc32(metadata)

    offset = up_to_line(256 + metadata_bytes)
    assert not any(data[256 + metadata_bytes : offset])
    levels = []
    for level in range(ORDER):
        words, infos, end = read_level(data, offset, sizes[level], level + 1 == ORDER)
        assert level_crc[level] == zlib.crc32(data[offset:end])
        levels.append((words, infos))
        offset = end
    assert sizes[ORDER:] == (0,) * (6 - ORDER)
    large = np.frombuffer(data, "<u4", 2 * large_counts, offset).reshape(-1, 2)
    assert large_crc == zlib.crc32(data[offset:])
    assert offset + large.nbytes == len(data)

    found = collect(levels, count_bits, dict(large.tolist()))
    expected: dict[tuple[int, ...], int] = {}
    for gram, count in counts.items():
        for size in range(1, len(gram) + 1):
            expected[gram[:size]] = expected.get(gram[:size], 0) + count
    assert found == expected
    assert large_counts > 10


def collect(levels, count_bits: int, large: dict[int, int]) -> dict[tuple[int, ...], int]:
    """Every n-gram and its count, by following the ranges of children."""
    found: dict[tuple[int, ...], int] = {}
    mask = (1 << count_bits) - 1

    def visit(level: int, node: int, above: tuple[int, ...]) -> None:
        words, infos = levels[level]
        if infos is None:
            code = int(words[node]) & mask
            count = large[node] if code == mask else code
            found[(*above, int(words[node]) >> count_bits)] = count
            return
        gram = (*above, int(words[node]))
        found[gram] = int(infos[node, 0])
        for child in range(infos[node, 1], infos[node + 1, 1]):
            visit(level + 1, child, gram)

    for node in range(len(levels[0][0])):
        visit(0, node, ())
    last = levels[0][1][-1]
    assert last.tolist() == [0, len(levels[1][0])]
    return found
