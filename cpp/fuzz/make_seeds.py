"""Write seed inputs for the fuzzers: golden and damaged .trie files, small compact ones.

python cpp/fuzz/make_seeds.py FOLDER        # FOLDER/trie, FOLDER/ngram
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from sglang_dart import _core

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "dart" / "ngram_corrupt"


def main(folder: Path) -> None:
    for path in sorted(GOLDEN.glob("*.trie")):
        # The first byte chooses how the fuzzer treats the rest.
        for mode in range(4):
            write(folder / "trie" / f"{path.stem}-{mode}", bytes([mode]) + path.read_bytes())
    for order in range(2, 7):
        for vocab_size in (10, 300, 1 << 22):
            data = model(order, vocab_size)
            for mode in range(4):
                write(folder / "ngram" / f"{order}-{vocab_size}-{mode}", bytes([mode]) + data)


def model(order: int, vocab_size: int) -> bytes:
    random = np.random.default_rng(order)
    gram = random.integers(0, min(vocab_size, 60), (80, order), dtype=np.int32)
    # Some n-grams are cut short, some lists of children span several cache lines.
    gram[::5, 1:] = -1
    gram[1::2, 0] = 3
    gram = np.unique(gram, axis=0)
    builder = _core.NgramBuilder(order, vocab_size)
    builder.append(gram, random.integers(1, 1000, len(gram)))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "seed.ngram"
        builder.write(str(path))
        return path.read_bytes()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
