"""Time `sglang-dart ngram build` on token ids: tokens a second, and the memory it keeps to.

    python -m benchmarks.ngram_build [--tokens 100e6] [--memory 1.1GB --memory 4GB]

The stream is generated once. Order 3, a vocabulary of 151,936, two processes. The rate covers all
of the command: start, counting, adding up, writing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cache import cached
from benchmarks.ngram_generate import EOS, VOCAB_SIZE, write_tokens
from benchmarks.process import run_watched
from benchmarks.result import write_result


def measure(tokens: Path, memory: str, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=tokens.parent) as folder:
        command = [sys.executable, "-m", "sglang_dart.ngram", "build", str(tokens)]
        command += ["--output", f"{folder}/model.ngram", "--token-ids", "--memory", memory]
        command += ["--vocab-size", str(VOCAB_SIZE), "--eos-id", str(EOS)]
        usage = run_watched([*command, "--workers", str(workers)])
    figures = asdict(usage)
    answer = figures.pop("answer")
    return {
        "memory": memory,
        "workers": workers,
        "tokens": answer["tokens"],
        "nodes": answer["nodes"],
        "tokens_per_s": round(answer["tokens"] / usage.wall_s),
        "tokens_per_cpu_s": round(answer["tokens"] / usage.cpu_s),
        "bytes_per_node": answer["bytes_per_node"],
        **figures,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"ngram build, {rows[0]['tokens']:,} tokens, {rows[0]['nodes']:,} nodes")
    columns = ("memory", "wall_s", "cpu_s", "tokens_per_s", "private_mib", "resident_mib")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{row[c]:,}" if c != "memory" else row[c] for c in columns))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=100e6)
    parser.add_argument("--memory", action="append", help="bound; repeatable")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="the fastest counts")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/ngram_build.json"))
    arguments = parser.parse_args()
    size = int(arguments.tokens)
    tokens = cached(f"{size}-tokens", lambda path: write_tokens(size, path))
    rows = [
        min(
            (measure(tokens, memory, arguments.workers) for _ in range(arguments.repeat)),
            key=lambda row: row["wall_s"],
        )
        for memory in arguments.memory or ["1.1GB", "4GB"]
    ]
    show(rows)
    write_result(
        arguments.output, f"python -m benchmarks.ngram_build --tokens {size}", {"rows": rows}
    )


if __name__ == "__main__":
    main()
