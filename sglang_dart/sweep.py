"""`sglang-dart sweep`: throughput, latency and accept length of several algorithms side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_dart.cli import emit, run_tool
from sglang_dart.measure import cells, plots, sweep_report, throughput
from sglang_dart.measure.arms import ALGORITHMS, RECORD, Arm, parse_arms
from sglang_dart.measure.client import server_facts
from sglang_dart.measure.datasets import load_questions
from sglang_dart.measure.hardware import hardware
from sglang_dart.measure.report import RawLog
from sglang_dart.measure.sweeping import run, unmended, visits
from sglang_dart.options import ENVIRONMENT

SERVING = "serving"

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True})
def sweep(
    context: typer.Context,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="[NAME:]ALGORITHM[=DRAFTER] [VARIABLE=VALUE ...] [--speculative-... ...], quoted "
            f"as one word; repeatable. Algorithms: {', '.join(ALGORITHMS)}."
        ),
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="NAME=http://host:port of a running server.")
    ] = None,
    model: Annotated[str, typer.Option(help="Target: a folder or a hub id.")] = "",
    data: Annotated[
        list[Path] | None, typer.Option(help="Prompts: JSON lines with `turns`; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each file.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the questions.")] = 0,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, one cell each.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, help="How often all is measured.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 256,
    warmup_tokens: Annotated[int, typer.Option(min=1, help="Of the answers before a cell.")] = 32,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for a server.")] = 1800.0,
    out: Annotated[Path | None, typer.Option(help="Raw results; if it exists, resumes.")] = None,
    report: Annotated[Path | None, typer.Option(help="Recompute from raw results.")] = None,
) -> None:
    """Serve the target once an arm, with the same flags, and drive each server alike.

    Words after `--` go to every server. Tables and figures are written beside the raw results.
    Exit code 1 if an arm failed; the same command then takes up where it was left.
    """
    if report:
        _finish(RawLog.reopen(report))
        return
    shared = tuple(context.args)
    mine = [word for word in shared if word.startswith("--speculative-")]
    if mine:
        raise ValueError(f"{mine[0]}: flags of speculation belong to an arm, not to all")
    arms = parse_arms(arm or [], url or [])
    files = data or []
    questions = load_questions(files, limit, seed)
    load = cells.Load(new_tokens, temperature, warmup_tokens)
    settings = {
        "kind": SERVING,
        "model": _model(model, arms),
        "data": {file.stem: _digest(file) for file in files},
        **{"limit": limit, "seed": seed, **dataclasses.asdict(load)},
        **_surroundings(shared),
    }
    _print_commands(settings["model"], shared, arms)
    log = RawLog(out or Path(f"sweep-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"), settings)

    def measure(address: str, place: cells.Place) -> list[dict[str, Any]]:
        asked = [question for question in questions if question.set == place.set]
        return cells.ask(address, asked, place.concurrency, load)

    sets = list(dict.fromkeys(question.set for question in questions))
    plan = visits(arms, sets, _numbers(concurrency), repeats)
    failures = run(
        log,
        plan,
        lambda one: one.serving(settings["model"], shared, timeout_s=start_timeout),
        measure,
        _say,
    )
    _finish(log)
    if failures:
        raise typer.Exit(1)


def _model(given: str, arms: Sequence[Arm]) -> str:
    """The target: the one named, and what running servers serve. Raises ValueError."""
    served = {arm.name: server_facts(arm.url)["model"] for arm in arms if arm.url}
    models = {*served.values(), *([given] if given else [])}
    if len(models) > 1:
        raise ValueError(f"the arms have different targets: {', '.join(sorted(models))}")
    if not models or (not given and len(served) < len(arms)):
        raise ValueError("give --model FOLDER_OR_ID: the target that every arm serves")
    return models.pop()


def _surroundings(shared: Sequence[str]) -> dict[str, Any]:
    """What else may change the figures."""
    return {
        "flags": list(shared),
        "dart_config": os.environ.get(ENVIRONMENT, ""),
        "hardware": hardware(),
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch")},
    }


def _print_commands(model: str, shared: Sequence[str], arms: Sequence[Arm]) -> None:
    for one in arms:
        _say(f"{one.name}: {one.command(model, shared)}")


def _finish(log: RawLog) -> None:
    """Print the tables, write them and the figures beside the raw results, emit the JSON line."""
    settings, console = log.records[0], Console()
    found = throughput.rows(cells.finished(log))
    if not found:
        raise RuntimeError(f"{log.path}: no cell has been measured")
    summaries = throughput.summaries(found)
    base = log.path.with_suffix("")
    figures = [base.with_name(f"{base.name}-throughput.png")]
    plots.throughput_against_latency(found, figures[0])
    if summaries:
        figures.append(base.with_name(f"{base.name}-speedup.png"))
        plots.speedup_against_concurrency(found, figures[1])
    tables = [sweep_report.rows_table(found)]
    tables += [sweep_report.summary_table(summaries)] if summaries else []
    for table in tables:
        console.print(table)
    document = log.path.with_suffix(".md")
    images = [f"![]({figure.name})" for figure in figures]
    sections: list[str | Table] = [*_described(log), *tables, *images]
    document.write_text(sweep_report.markdown(sections))
    emit(
        {
            "tool": "sweep",
            "kind": settings["kind"],
            "raw": str(log.path),
            "report": str(document),
            "figures": [str(figure) for figure in figures],
            "rows": [dataclasses.asdict(row) for row in found],
            "summary": [dataclasses.asdict(row) for row in summaries],
            "failures": unmended(log),
        }
    )


def _described(log: RawLog) -> list[str]:
    """What was measured, in words: hardware, versions, settings, one command an arm."""
    settings = log.records[0]
    versions = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    arms = [Arm.of(record) for record in log.records if record["record"] == RECORD]
    commands = [f"{one.name}: {one.command(settings['model'], settings['flags'])}" for one in arms]
    return [
        f"{settings['hardware']}; {versions}. Answers of at most {settings['new_tokens']} tokens, "
        f"temperature {settings['temperature']:g}.",
        "```\n" + "\n".join(commands) + "\n```",
        *(f"{name} failed: {reason}" for name, reason in unmended(log).items()),
    ]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"--concurrency {text}: expected positive numbers, such as 1,4,16")
    return numbers


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.sweep"))
