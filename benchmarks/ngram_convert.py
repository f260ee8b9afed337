"""Time `sglang-dart ngram convert` on a large .trie: seconds, memory, and with little memory.

    python -m benchmarks.ngram_convert [--nodes 60e6] [--limit]

The file is generated once, which takes 14 GB of memory at 60 million nodes. --limit (as root)
converts it a second time with the memory that 24 GB would be for the published file of 1.3 billion
nodes, cached pages of files included.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cache import cached
from benchmarks.ngram_generate import write_trie
from benchmarks.process import run_watched
from benchmarks.result import write_result

PUBLISHED_NODES = 1.3e9
PUBLISHED_HOST_BYTES = 24e9


def measure(trie: Path, limit: int) -> dict[str, Any]:
    # Only what the conversion itself reads may be in memory.
    with trie.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with tempfile.TemporaryDirectory(dir=trie.parent) as folder:
        command = [sys.executable, "-m", "sglang_dart.ngram", "convert", str(trie)]
        usage = run_watched([*command, f"{folder}/model.ngram"], limit)
    figures = asdict(usage)
    answer = figures.pop("answer")
    return {
        "limit_mib": limit >> 20,
        "nodes": answer["nodes"],
        "trie_bytes": trie.stat().st_size,
        "compact_bytes": answer["bytes"],
        "bytes_per_node": answer["bytes_per_node"],
        "nodes_per_s": round(answer["nodes"] / usage.wall_s),
        **figures,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"ngram convert, {rows[0]['nodes']:,} nodes")
    columns = ("limit_mib", "wall_s", "cpu_s", "nodes_per_s", "private_mib", "resident_mib")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{row[column]:,}" for column in columns))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=float, default=60e6)
    parser.add_argument("--limit", action="store_true", help="also with little memory")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/ngram_convert.json"))
    arguments = parser.parse_args()
    nodes = int(arguments.nodes)
    trie = cached(f"{nodes}.trie", lambda path: write_trie(nodes, path))
    rows = [measure(trie, 0)]
    if arguments.limit:
        rows.append(measure(trie, int(PUBLISHED_HOST_BYTES * rows[0]["nodes"] / PUBLISHED_NODES)))
    show(rows)
    command = f"python -m benchmarks.ngram_convert --nodes {nodes}"
    write_result(arguments.output, command + " --limit" * arguments.limit, {"rows": rows})


if __name__ == "__main__":
    main()
