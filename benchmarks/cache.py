"""What a benchmark is run on: generated once, kept and used again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

FOLDER = Path.home() / ".cache" / "sglang-dart" / "benchmarks"


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The file `name` in FOLDER; `make(path)` writes it if it is not there."""
    path = FOLDER / name
    if not path.exists():
        print(f"generating {path}, which later runs use again", file=sys.stderr, flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        # It gets its name when it is complete.
        part = path.with_name(f"part-{name}")
        make(part)
        part.replace(path)
    return path
