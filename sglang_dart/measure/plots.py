"""Figures of a sweep as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_dart.measure.report import PLAIN
from sglang_dart.measure.rounds import RoundRow
from sglang_dart.measure.throughput import Row

Draw = Callable[[Any, str, list[Row], Any], None]


def throughput_against_latency(rows: Sequence[Row], path: Path) -> None:
    """Output tokens/s against median time per output token: a panel a set, a curve an arm."""

    def draw(axes: Any, arm: str, found: list[Row], colour: Any) -> None:
        found = [row for row in found if row.tpot_ms_p50 is not None]
        x = [row.tpot_ms_p50 for row in found]
        y = [row.tokens_per_s.median for row in found]
        error = _error([(s.median, s.low, s.high) for s in (row.tokens_per_s for row in found)])
        axes.errorbar(x, y, yerr=error, marker="o", capsize=2, label=arm, color=colour)
        for row, *at in zip(found, x, y, strict=True):
            axes.annotate(str(row.concurrency), at, textcoords="offset points", xytext=(4, 4))

    labels = ("ms per output token, median", "output tokens/s")
    _panels(rows, path, draw, labels, arms=_arms(rows), title="numbers: requests at a time")


def speedup_against_concurrency(rows: Sequence[Row], path: Path) -> None:
    """Throughput over plain decoding's, against concurrency: a panel a set, a curve an arm."""

    def draw(axes: Any, arm: str, found: list[Row], colour: Any) -> None:
        spreads = [row.speedup for row in found if row.speedup is not None]
        x = [row.concurrency for row in found if row.speedup is not None]
        y = [s.median for s in spreads]
        error = _error([(s.median, s.low, s.high) for s in spreads])
        axes.errorbar(x, y, yerr=error, marker="o", capsize=2, label=arm, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(value) for value in x])
        axes.axhline(1.0, color="grey", linewidth=0.8, zorder=0)

    compared = [row for row in rows if row.speedup is not None and row.arm != PLAIN]
    labels = ("requests at a time", "output tokens/s over plain decoding's")
    _panels(compared, path, draw, labels, arms=_arms(rows))


def round_ratio_against_batch(rows: Sequence[RoundRow], path: Path) -> None:
    """Time of a round over the plain step's, against batch size: a curve an arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for arm in dict.fromkeys(row.arm for row in rows):
        found = [(row.batch, row.ratio) for row in rows if row.arm == arm and row.ratio is not None]
        error = _error([(s.median, s.low, s.high) for _, s in found])
        y = [s.median for _, s in found]
        axes.errorbar([b for b, _ in found], y, yerr=error, marker="o", capsize=2, label=arm)
    batches = sorted({row.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="batch", ylabel="time of a round over a plain step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _panels(
    rows: Sequence[Row],
    path: Path,
    draw: Draw,
    labels: tuple[str, str],
    *,
    arms: Sequence[str],
    title: str = "",
) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    sets = sorted({row.set for row in rows})
    colours = matplotlib.colormaps["tab10"]
    figure = Figure(figsize=(4.2 * max(1, len(sets)), 3.8), layout="constrained")
    panels = figure.subplots(1, max(1, len(sets)), squeeze=False)[0]
    for axes, name in zip(panels, sets, strict=False):
        for index, arm in enumerate(arms):
            found = [row for row in rows if (row.set, row.arm) == (name, arm)]
            if found:
                found.sort(key=lambda row: row.concurrency)
                draw(axes, arm, found, colours(index % 10))
        axes.set(title=name, xlabel=labels[0], ylabel=labels[1])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    if title:
        figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=120)


def _arms(rows: Sequence[Row]) -> list[str]:
    """All arms in the order of the rows, so that each has one colour in every figure."""
    return list(dict.fromkeys(row.arm for row in rows))


def _error(spreads: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    return [
        [median - low for median, low, _ in spreads],
        [high - median for median, _, high in spreads],
    ]
