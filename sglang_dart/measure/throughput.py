"""Figures of a sweep, from its raw records: each cell, its repeats together, and against plain.

Throughput of a cell: output tokens over the seconds from its first request to its last answer.
A ratio compares with plain decoding in the same repeat; over repeats the median and both ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dart.measure.cells import Cell, Place
from sglang_dart.measure.metrics import Acceptance, micro_length, percentiles
from sglang_dart.measure.report import PLAIN, Record


@dataclass(frozen=True)
class Spread:
    """A figure over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no value."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Row:
    """An arm at a set and a concurrency, all repeats together.

    Times in milliseconds, percentiles over the requests of all repeats, None if no answer was long
    enough; tau as in metrics.py, None without speculation; speedup None without plain decoding in
    the same repeats.
    """

    set: str
    concurrency: int
    arm: str
    repeats: int
    requests: int
    errors: int
    tokens_per_s: Spread
    speedup: Spread | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p99: float | None
    tau: float | None
    gpu_memory_mib: int | None


@dataclass(frozen=True)
class Summary:
    """An arm at a concurrency over all sets: geometric mean and least of the median speed-ups."""

    arm: str
    concurrency: int
    sets: int
    speedup_mean: float
    speedup_least: float


def tokens_per_s(requests: Iterable[Record]) -> float:
    """Output tokens over wall time. Failed requests bring neither."""
    good = _good(requests)
    start = min(r["at_s"] for r in good)
    end = max(r["at_s"] + r["latency_s"] for r in good)
    return sum(r["tokens"] for r in good) / (end - start)


def rows(cells: Mapping[Place, Cell]) -> list[Row]:
    """All rows, in the order in which their first cells were measured."""
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    for place, cell in cells.items():
        groups.setdefault((place.set, place.concurrency, place.arm), []).append(cell)
    return [_row(group, cells) for group in groups.values()]


def summaries(found: Sequence[Row]) -> list[Summary]:
    """Speed-ups over the sets; nothing for plain decoding, nor without it."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in found:
        if row.speedup is not None and row.arm != PLAIN:
            groups.setdefault((row.arm, row.concurrency), []).append(row.speedup.median)
    return [
        Summary(arm, concurrency, len(ratios), statistics.geometric_mean(ratios), min(ratios))
        for (arm, concurrency), ratios in groups.items()
    ]


def ratios(group: Sequence[Cell], cells: Mapping[Place, Cell], figure: Any) -> list[float]:
    """figure(cell) over figure(plain cell of the same repeat), where there is one."""
    found = []
    for cell in group:
        place = cell.place
        plain = cells.get(Place(PLAIN, place.repeat, place.set, place.concurrency))
        if plain is not None:
            found.append(figure(cell) / figure(plain))
    return found


def _row(group: Sequence[Cell], cells: Mapping[Place, Cell]) -> Row:
    place = group[0].place
    requests = [request for cell in group for request in cell.parts]
    good = _good(requests)
    ttft = _percentiles_ms(request["ttft_s"] for request in good)
    tpot = _percentiles_ms(map(_tpot_s, good))
    memory = [cell.facts.get("gpu_memory_mib") for cell in group]
    return Row(
        set=place.set,
        concurrency=place.concurrency,
        arm=place.arm,
        repeats=len(group),
        requests=len(requests),
        errors=len(requests) - len(good),
        tokens_per_s=_spread(tokens_per_s(cell.parts) for cell in group),
        speedup=Spread.of(ratios(group, cells, lambda cell: tokens_per_s(cell.parts))),
        ttft_ms_p50=ttft[0],
        ttft_ms_p99=ttft[1],
        tpot_ms_p50=tpot[0],
        tpot_ms_p99=tpot[1],
        tau=micro_length(Acceptance(r["histogram"]) for r in good),
        gpu_memory_mib=max((m for m in memory if m is not None), default=None),
    )


def _percentiles_ms(seconds: Iterable[float | None]) -> Sequence[float | None]:
    """The 50th and the 99th of the values that there are."""
    values = [1e3 * value for value in seconds if value is not None]
    return percentiles(values, (50, 99)) if values else (None, None)


def _spread(values: Iterable[float]) -> Spread:
    spread = Spread.of(list(values))
    assert spread is not None, "a row has at least one cell"
    return spread


def _good(requests: Iterable[Record]) -> list[Record]:
    return [request for request in requests if "error" not in request]


def _tpot_s(request: Record) -> float | None:
    """Seconds per output token after the first."""
    if request["ttft_s"] is None or request["tokens"] < 2:
        return None
    return (request["latency_s"] - request["ttft_s"]) / (request["tokens"] - 1)
