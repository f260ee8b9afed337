"""Arms of one evaluation beside each other: accept lengths, and what their drafters know.

A results file of several arms may also hold {"record": "slots", "arm", "set", "right", "asked"}:
how often each level of the arm's drafter was asked and right, after the true tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from sglang_dart.measure.report import RawLog, percents

SLOTS = "slots"
TOGETHER = "together"
# Share of right drafts by level of the published head for Qwen3-4B on HumanEval, arXiv 2601.19278.
PUBLISHED = (0.75, 0.45, 0.29, 0.19, 0.14, 0.11)

Hits = dict[str, dict[str, tuple[list[int], list[int]]]]


def slot_hits(log: RawLog) -> Hits:
    """Right and asked, by arm and set."""
    found: Hits = {}
    for record in log.records:
        if record["record"] == SLOTS:
            sets = found.setdefault(record["arm"], {})
            sets[record["set"]] = record["right"], record["asked"]
    return found


def slot_summary(hits: Hits) -> dict[str, dict[str, list[float]]]:
    """Share of right drafts by level, for each arm and set, and over all sets together."""
    return {
        arm: {name: _shares([pair]) for name, pair in sets.items()}
        | ({TOGETHER: _shares(list(sets.values()))} if len(sets) > 1 else {})
        for arm, sets in hits.items()
    }


def _shares(pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    right = [sum(level) for level in zip(*(pair[0] for pair in pairs), strict=True)]
    asked = [sum(level) for level in zip(*(pair[1] for pair in pairs), strict=True)]
    return [r / max(a, 1) for r, a in zip(right, asked, strict=True)]


def slots_table(summary: Mapping[str, Mapping[str, list[float]]]) -> Table:
    """Show `slot_summary` beside the published figures."""
    table = Table(title="Share of right drafts after the true tokens, by level, %")
    for heading in ("arm", "set", "levels 0, 1, ..."):
        table.add_column(heading)
    for arm, sets in summary.items():
        for name, row in sets.items():
            table.add_row(arm, name, percents(row))
    table.add_row("DART's paper", "humaneval", percents(PUBLISHED), style="dim")
    return table


def lengths_table(summaries: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Mean accept length over answers, a row a set, a column an arm."""
    table = Table(title="Accept length τ, mean over answers (in brackets: over rounds)")
    table.add_column("set")
    for arm in summaries:
        table.add_column(arm, justify="right")
    sets = list(dict.fromkeys(name for summary in summaries.values() for name in summary))
    for name in sets:
        table.add_row(name, *(_lengths(summary.get(name)) for summary in summaries.values()))
    return table


def _lengths(row: Mapping[str, Any] | None) -> str:
    if row is None or row["accept_length_macro"] is None:
        return "-"
    return f"{row['accept_length_macro']:.3f} ({row['accept_length_micro']:.3f})"
