"""Raw results as JSON lines, and the tables that anyone can recompute from them.

The first line is {"record": "run"} with the settings. Every other line is an answer:
{"record": "answer", "arm", "set", "question", "turn", "prompt", "prompt_tokens", "cached_tokens",
"ids", "finish", "latency_s", "ttft_s", "histogram"}, or the logit gaps at a first difference:
{"record": "gap", "arm", "set", "question", "turn", "position", "top_gap", "got_gap"}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_dart.measure.client import Reply
from sglang_dart.measure.metrics import (
    Acceptance,
    Mismatch,
    first_difference,
    macro_length,
    micro_length,
    percentiles,
)
from sglang_dart.measure.question import Question

PLAIN = "plain"
Record = dict[str, Any]


class RawLog:
    """A results file that grows record by record; opening it again resumes the run."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises ValueError if the file holds a run with other settings."""
        self.path = path
        # As JSON gives them back, so that they compare equal.
        run = json.loads(json.dumps({"record": "run", **settings}))
        self.records: list[Record] = read(path) if path.exists() else []
        if not self.records:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            self.append(run)
        elif self.records[0] != run:
            old = self.records[0]
            other = sorted(key for key in old | run if old.get(key) != run.get(key))
            raise ValueError(
                f"{path}: holds a run with another {', '.join(other)}; name another --out"
            )

    @classmethod
    def reopen(cls, path: Path) -> RawLog:
        """Raises ValueError if the file is absent or holds no run."""
        records = read(path) if path.is_file() else []
        if not records:
            raise ValueError(f"{path}: no results file")
        settings = {name: value for name, value in records[0].items() if name != "record"}
        return cls(path, settings)

    def append(self, record: Record) -> None:
        """Add a record, on disk before this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)

    def answers(self, arm: str) -> dict[tuple, Record]:
        """The answers of an arm by (set, question, turn)."""
        return {key(r): r for r in self.records if r["record"] == "answer" and r["arm"] == arm}

    def gaps(self) -> dict[tuple, Record]:
        """The gap records by (arm, set, question, turn)."""
        return {(r["arm"], *key(r)): r for r in self.records if r["record"] == "gap"}


def read(path: Path) -> list[Record]:
    """The records of a results file; a last line cut short by a crash is dropped from the file.

    Raises ValueError if it is no results file.
    """
    text = path.read_text()
    whole, _, cut = text.rpartition("\n")
    if cut:
        path.write_text(whole + "\n" if whole else "")
    try:
        records = [json.loads(line) for line in whole.splitlines()]
        if records and records[0]["record"] != "run":
            raise KeyError("run")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a results file of this tool") from error
    return records


def key(record: Record) -> tuple:
    """What a record is about: (set, question, turn)."""
    return record["set"], record["question"], record["turn"]


def prompt_hash(input_ids: Sequence[int]) -> str:
    """A short name of a prompt, equal for equal token ids alone."""
    return hashlib.sha256(json.dumps(list(input_ids)).encode()).hexdigest()[:16]


def answer_record(
    arm: str, question: Question, turn: int, input_ids: Sequence[int], reply: Reply
) -> Record:
    """The record of one reply."""
    return {
        "record": "answer",
        "arm": arm,
        "set": question.set,
        "question": question.id,
        "turn": turn,
        "prompt": prompt_hash(input_ids),
        "prompt_tokens": len(input_ids),
        "cached_tokens": reply.meta.get("cached_tokens", 0),
        "ids": list(reply.ids),
        "finish": reply.finish,
        "latency_s": reply.latency_s,
        "ttft_s": reply.ttft_s,
        "histogram": Acceptance.of(reply.meta).histogram,
    }


def acceptance_summary(answers: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Figures per set, and over all under "together"."""
    groups: dict[str, list[Record]] = {}
    for record in answers:
        groups.setdefault(record["set"], []).append(record)
    if len(groups) > 1:
        groups["together"] = [record for group in list(groups.values()) for record in group]
    return {name: _acceptance(group) for name, group in groups.items()}


def _acceptance(group: Sequence[Record]) -> dict[str, Any]:
    parts = [Acceptance(record["histogram"]) for record in group]
    total = sum(parts, Acceptance())
    tpot = [
        (record["latency_s"] - record["ttft_s"]) / (len(record["ids"]) - 1)
        for record in group
        if record["ttft_s"] is not None and len(record["ids"]) > 1
    ]
    return {
        "answers": len(group),
        "tokens": sum(len(record["ids"]) for record in group),
        "rounds": total.rounds,
        "accept_length_micro": micro_length(parts),
        "accept_length_macro": macro_length(parts),
        "reach": total.reach(),
        "histogram": total.histogram,
        "tpot_ms_p50": percentiles(tpot, [50])[0] * 1e3 if tpot else None,
    }


def acceptance_table(summary: Mapping[str, Mapping[str, Any]], arm: str = "") -> Table:
    """Show `acceptance_summary`; last, the share of rounds that accepted each level."""
    title = "Accept length τ: tokens committed per round, bonus token included"
    table = Table(title=f"{arm}: {title}" if arm else title)
    for heading in ("set", "answers", "tokens", "rounds", "τ micro", "τ macro", "ms/token p50"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    table.add_column("accepted by level, %")
    for name, row in summary.items():
        table.add_row(
            name,
            str(row["answers"]),
            str(row["tokens"]),
            str(row["rounds"]),
            _figure(row["accept_length_micro"]),
            _figure(row["accept_length_macro"]),
            _figure(row["tpot_ms_p50"]),
            percents(row["reach"]),
        )
    return table


def percents(shares: Sequence[float]) -> str:
    """Shares as "75/45/29"."""
    return "/".join(f"{100 * share:.0f}" for share in shares)


def mismatches(log: RawLog, arm: str) -> dict[tuple, Mismatch]:
    """First difference of each answer of `arm` from plain decoding, with gaps where known.

    Raises ValueError if plain decoding lacks an answer, or had another prompt.
    """
    plain, gaps = log.answers(PLAIN), log.gaps()
    found = {}
    for place, record in log.answers(arm).items():
        reference = plain.get(place)
        if reference is None or reference["prompt"] != record["prompt"]:
            raise ValueError(f"{log.path}: no plain answer to the prompt of {'/'.join(place[:2])}")
        difference = first_difference(
            reference["ids"], record["ids"], (reference["finish"], record["finish"])
        )
        if difference is None:
            continue
        gap = gaps.get((arm, *place), {})
        found[place] = Mismatch(
            difference.position,
            difference.expected,
            difference.got,
            gap.get("top_gap"),
            gap.get("got_gap"),
        )
    return found


def exactness_summary(log: RawLog, arms: Sequence[str], tolerance: float) -> dict[str, Any]:
    """Counts per arm, and over all arms under "together"."""
    rows: dict[str, Any] = {}
    for arm in arms:
        answers, different = log.answers(arm), mismatches(log, arm)
        near = sum(mismatch.near_tie(tolerance) for mismatch in different.values())
        parts = [Acceptance(record["histogram"]) for record in answers.values()]
        rows[arm] = {
            "answers": len(answers),
            "tokens": sum(len(record["ids"]) for record in answers.values()),
            "cached_tokens": sum(record["cached_tokens"] for record in answers.values()),
            "equal": len(answers) - len(different),
            "near_ties": near,
            "clear": len(different) - near,
            "accept_length": micro_length(parts),
        }
    together = micro_length(
        Acceptance(record["histogram"]) for arm in arms for record in log.answers(arm).values()
    )
    counts = ("answers", "tokens", "cached_tokens", "equal", "near_ties", "clear")
    rows["together"] = {name: sum(rows[arm][name] for arm in arms) for name in counts}
    rows["together"]["accept_length"] = together
    return rows


def vacuous_arms(summary: Mapping[str, Any]) -> list[str]:
    """Arms in which no draft was accepted: plain decoding in all but name."""
    arms = {arm: row["accept_length"] for arm, row in summary.items() if arm != "together"}
    return [arm for arm, length in arms.items() if length in (None, 1.0)]


def exactness_tables(
    log: RawLog, arms: Sequence[str], tolerance: float, summary: Mapping[str, Any]
) -> list[Table]:
    """Show `exactness_summary`, and every first difference if there is one."""
    counts = Table(title=f"Answers against plain decoding; near-tie: logit gap ≤ {tolerance:g}")
    headings = ("arm", "answers", "tokens", "from cache", "equal", "near-ties", "clear", "τ")
    for heading in headings:
        counts.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, row in summary.items():
        cells = ("answers", "tokens", "cached_tokens", "equal", "near_ties", "clear")
        counts.add_row(name, *(str(row[cell]) for cell in cells), _figure(row["accept_length"]))
    places = Table(title="First differences")
    for heading in ("arm", "question", "at", "plain", "got", "gap of best two", "gap to got", ""):
        places.add_column(heading)
    for arm in arms:
        for place, found in mismatches(log, arm).items():
            places.add_row(
                arm,
                f"{place[0]}/{place[1]}",
                str(found.position),
                str(found.expected),
                str(found.got),
                _figure(found.top_gap, 5),
                _figure(found.got_gap, 5),
                "near-tie" if found.near_tie(tolerance) else "clear",
            )
    return [counts, places] if places.row_count else [counts]


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
