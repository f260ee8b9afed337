"""The order in which a sweep visits its cells, and how it goes on where it was left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sglang_dart.measure.arms import RECORD, Arm
from sglang_dart.measure.cells import CELL, Place, cell_records, finished
from sglang_dart.measure.client import server_facts
from sglang_dart.measure.hardware import gpu_memory_mib
from sglang_dart.measure.report import RawLog, Record

FAILURE = "failure"

# Serve an arm; measure a cell at a URL: the records of its parts.
Serve = Callable[[Arm], AbstractContextManager[str]]
Measure = Callable[[str, Place], Sequence[Mapping[str, Any]]]
Say = Callable[[str], None]


def visits(
    arms: Sequence[Arm], sets: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[tuple[Arm, list[Place]]]:
    """Servers to start in turn, each with its cells.

    Every repeat serves all arms, so that what else the machine does meets all of them, and begins
    with another arm, so that none always comes first.
    """
    for repeat in range(repeats):
        first = repeat % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield arm, [Place(arm.name, repeat, s, c) for s in sets for c in concurrencies]


def run(
    log: RawLog,
    plan: Iterator[tuple[Arm, list[Place]]],
    serve: Serve,
    measure: Measure,
    say: Say,
) -> list[Record]:
    """Measure every cell of the plan that does not stand in the log, and add it.

    An arm that fails is recorded and passed over, the others go on. Returns the failures of this
    run. Raises ValueError if an arm stands in the log with other flags.
    """
    failures: list[Record] = []
    visited = list(plan)
    for arm, _ in visited:
        _remember(log, arm)
    for arm, places in visited:
        done = finished(log)
        left = [place for place in places if place not in done]
        if not left:
            continue
        say(f"{arm.name}, repeat {left[0].repeat + 1}: starting")
        try:
            with serve(arm) as url:
                _visit(log, url, left, measure, say, local=not arm.url)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            failures.append({"record": FAILURE, "arm": arm.name, "reason": reason})
            log.append(failures[-1])
            say(f"{arm.name}: failed: {reason}")
    return failures


def _visit(
    log: RawLog, url: str, places: Sequence[Place], measure: Measure, say: Say, *, local: bool
) -> None:
    server = server_facts(url)
    for place in places:
        started = time.time()
        parts = measure(url, place)
        # Somebody else's machine has other GPUs.
        memory = gpu_memory_mib() if local else None
        facts = {"gpu_memory_mib": memory, "server": server}
        for record in cell_records(place, parts, facts, started):
            log.append(record)
        say(
            f"{place.arm}, repeat {place.repeat + 1}: {place.set} at {place.concurrency} "
            f"after {time.time() - started:.0f} s"
        )


def _remember(log: RawLog, arm: Arm) -> None:
    known = [r for r in log.records if r["record"] == RECORD and r["arm"] == arm.name]
    if not known:
        log.append(arm.record())
    elif known[0] != arm.record():
        raise ValueError(
            f"{log.path}: {arm.name} was served otherwise there "
            f"({' '.join(Arm.of(known[0]).flags) or 'plain'}); give this arm another NAME, or "
            "name another --out"
        )


def unmended(log: RawLog) -> dict[str, str]:
    """The arms whose last attempt failed, and why."""
    failed: dict[str, str] = {}
    for record in log.records:
        if record["record"] == FAILURE:
            failed[record["arm"]] = record["reason"]
        elif record["record"] == CELL:
            failed.pop(record["arm"], None)
    return failed
