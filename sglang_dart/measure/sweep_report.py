"""Tables of a sweep: the same ones for the screen and, as Markdown, for a file."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dart.measure.rounds import RoundRow
from sglang_dart.measure.throughput import Row, Spread, Summary


def rows_table(rows: Sequence[Row]) -> Table:
    """One line an arm, set and concurrency."""
    table = _table(
        f"Median of {_repeats(rows)} (lowest-highest); to plain: ratio of tokens/s in a repeat",
        ["set", "arm"],
        ["at a time", "tokens/s", "to plain"],
        ["TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "τ", "GPU MiB"],
        ["requests", "errors"],
    )
    for row in sorted(rows, key=lambda row: (row.set, row.concurrency)):
        table.add_row(
            row.set,
            row.arm,
            str(row.concurrency),
            spread(row.tokens_per_s, 1),
            spread(row.speedup, 2),
            *(
                number(value, 1)
                for value in (row.ttft_ms_p50, row.ttft_ms_p99, row.tpot_ms_p50, row.tpot_ms_p99)
            ),
            number(row.tau, 2),
            number(row.gpu_memory_mib, 0),
            str(row.requests),
            str(row.errors),
        )
    return table


def summary_table(summaries: Sequence[Summary]) -> Table:
    """One line an arm and concurrency."""
    table = _table(
        "Tokens/s to plain over all sets",
        ["arm"],
        ["at a time", "sets", "geometric mean", "least"],
    )
    for row in sorted(summaries, key=lambda row: row.concurrency):
        table.add_row(
            row.arm,
            str(row.concurrency),
            str(row.sets),
            number(row.speedup_mean, 2),
            number(row.speedup_least, 2),
        )
    return table


def rounds_table(rows: Sequence[RoundRow]) -> Table:
    """One line an arm and batch."""
    table = _table(
        f"Random weights, simulated accept length; median of {_repeats(rows)} (lowest-highest); "
        "last column: a projection, published accept length / ratio",
        ["arm"],
        ["batch", "ms a round or plain step", "ratio to plain step"],
        ["simulated τ", "tokens/s", "tokens/s to plain", "published τ", "projected speed-up"],
    )
    for row in rows:
        table.add_row(
            row.arm,
            str(row.batch),
            spread(row.round_ms, 2),
            spread(row.ratio, 2),
            number(row.tau, 2),
            spread(row.tokens_per_s, 1),
            spread(row.to_plain, 2),
            number(row.published, 2),
            spread(row.projected, 2),
        )
    return table


def markdown(sections: Iterable[str | Table]) -> str:
    """Text and tables as one Markdown document."""
    parts = []
    for section in sections:
        if isinstance(section, str):
            parts.append(section)
            continue
        title, section.title = section.title, None
        # Wide enough that no cell is wrapped.
        text = io.StringIO()
        Console(file=text, width=1000).print(section)
        section.title = title
        lines = (line.rstrip() for line in text.getvalue().splitlines())
        parts.append(f"**{title}**\n\n" + "\n".join(line for line in lines if line))
    return "\n\n".join(parts) + "\n"


def number(value: float | None, digits: int) -> str:
    """`-` for what is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def spread(value: Spread | None, digits: int) -> str:
    """`median (lowest-highest)`, or the one value that there is."""
    if value is None:
        return "-"
    if value.low == value.high:
        return number(value.median, digits)
    ends = f"{number(value.low, digits)}-{number(value.high, digits)}"
    return f"{number(value.median, digits)} ({ends})"


def _repeats(rows: Sequence[Row] | Sequence[RoundRow]) -> str:
    most = max((row.repeats for row in rows), default=0)
    return "1 repeat" if most == 1 else f"{most} repeats"


def _table(title: str, names: Sequence[str], *figures: Sequence[str]) -> Table:
    table = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for heading in names:
        table.add_column(heading)
    for heading in (heading for group in figures for heading in group):
        table.add_column(heading, justify="right")
    return table
