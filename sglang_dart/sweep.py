"""`sglang-dart sweep`: throughput, latency and accept length of several algorithms side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from sglang_dart.cli import emit, run_tool
from sglang_dart.demo_target import cache_dir
from sglang_dart.measure import plots, sweep_report, throughput
from sglang_dart.measure.arms import ALGORITHMS, RECORD, Arm, parse_arms
from sglang_dart.measure.cells import Cell, Load, Place, ask, finished
from sglang_dart.measure.client import server_facts
from sglang_dart.measure.datasets import load_questions, set_name
from sglang_dart.measure.hardware import hardware
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import RawLog
from sglang_dart.measure.rounds import RoundLoad, round_rows, time_rounds
from sglang_dart.measure.shapes import SIMULATE, Shape, published_length, simulated
from sglang_dart.measure.sweeping import run, unmended, visits
from sglang_dart.options import ENVIRONMENT

SERVING, ROUNDS = "serving", "rounds"

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
        list[str] | None,
        typer.Option(help="Prompts: JSON lines with `turns`, or a set by name; repeatable."),
    ] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Questions of each set.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the questions.")] = 0,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, one cell each.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, help="How often all is measured.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 256,
    warmup_tokens: Annotated[int, typer.Option(min=1, help="Of the answers before a cell.")] = 32,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    shapes: Annotated[
        str,
        typer.Option(
            help="Time rounds with random weights instead: Qwen3-1.7B, -4B, -8B, -14B, -32B, or "
            "the path of a config.json. Drafters are made; --concurrency is the batch."
        ),
    ] = "",
    accept_length: Annotated[
        float | None, typer.Option(min=1, help="With --shapes; default: as published.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="With --shapes.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="With --shapes: timed in a pair.")] = 64,
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
    concurrencies = _numbers(concurrency)
    if shapes:
        made = Shape.of(shapes)
        timed = RoundLoad(made.config["vocab_size"], prompt_tokens, rounds)
        plan = _rounds(made, arms, shared, max(concurrencies), timed, accept_length)
    else:
        sources = data or []
        load = Load(max_new_tokens, temperature, warmup_tokens)
        questions = load_questions(sources, max_samples, seed)
        plan = _serving(model, arms, shared, sources, questions, load)
        plan.settings |= {"limit": max_samples, "seed": seed}
    log = RawLog(out or Path(f"sweep-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"), plan.settings)
    target, flags = plan.settings["model"], plan.settings["flags"]
    for one in plan.arms:
        _say(f"{one.name}: {one.command(target, flags)}")
    failures = run(
        log,
        visits(plan.arms, plan.sets, concurrencies, repeats),
        lambda one: one.serving(target, flags, timeout_s=start_timeout),
        plan.measure,
        _say,
    )
    _finish(log)
    if failures:
        raise typer.Exit(1)


@dataclasses.dataclass
class Plan:
    """What a sweep measures and how; `settings` stand first in the results file."""

    settings: dict[str, Any]
    arms: list[Arm]
    sets: list[str]
    measure: Callable[[str, Place], list[dict[str, Any]]]


def _serving(
    model: str,
    arms: list[Arm],
    shared: Sequence[str],
    sources: Sequence[str],
    questions: Sequence[Question],
    load: Load,
) -> Plan:
    """Prompt sets over the OpenAI API."""
    names = [set_name(source) for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"--data: two sets are called {max(names, key=names.count)}")

    def measure(url: str, place: Place) -> list[dict[str, Any]]:
        asked = [question for question in questions if question.set == place.set]
        return ask(url, asked, place.concurrency, load)

    settings = {
        "kind": SERVING,
        "model": _model(model, arms),
        "data": {name: _digest(q for q in questions if q.set == name) for name in names},
        **dataclasses.asdict(load),
        **_surroundings(shared),
    }
    return Plan(settings, arms, list(dict.fromkeys(q.set for q in questions)), measure)


def _rounds(
    shape: Shape,
    arms: Sequence[Arm],
    shared: Sequence[str],
    batch: int,
    load: RoundLoad,
    accept_length: float | None,
) -> Plan:
    """Rounds of models with random weights; `batch` is the largest."""
    running = [one.name for one in arms if one.url]
    if running:
        raise ValueError(f"--url {running[0]}: --shapes starts its own servers")
    folder = cache_dir() / "shapes" / shape.name
    made = [simulated(one, shape, folder, accept_length) for one in arms]
    lengths = {one.name: float(one.env.get(SIMULATE, 1.0)) for one in made}

    def measure(url: str, place: Place) -> list[dict[str, Any]]:
        return time_rounds(url, place.concurrency, lengths[place.arm], load)

    # A batch must run as a whole, in a captured graph; SGLang's algorithms take 48 otherwise.
    whole = ("--max-running-requests", str(batch), "--cuda-graph-max-bs-decode", str(batch))
    flags = ("--load-format", "dummy", "--skip-tokenizer-init", *whole, *shared)
    settings = {
        "kind": ROUNDS,
        "shape": shape.name,
        "model": str(shape.write_target(folder)),
        **dataclasses.asdict(load),
        **_surroundings(flags),
    }
    return Plan(settings, made, [f"{load.prompt_tokens} random tokens"], measure)


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


def _finish(log: RawLog) -> None:
    """Print the tables, write them and the figures beside the raw results, emit the JSON line."""
    settings = log.records[0]
    cells = finished(log)
    if not cells:
        raise RuntimeError(f"{log.path}: no cell has been measured")
    report = _rounds_report if settings["kind"] == ROUNDS else _serving_report
    tables, figures, result = report(log, cells)
    # As it is in the file: a terminal's width would cut the columns.
    print(sweep_report.markdown(tables))
    document = log.path.with_suffix(".md")
    images = [f"![]({figure.name})" for figure in figures]
    document.write_text(sweep_report.markdown([*_described(log), *tables, *images]))
    emit(
        {
            "tool": "sweep",
            "kind": settings["kind"],
            "raw": str(log.path),
            "report": str(document),
            "figures": [str(figure) for figure in figures],
            **result,
            "failures": unmended(log),
        }
    )


Report = tuple[list[Table], list[Path], dict[str, Any]]


def _serving_report(log: RawLog, cells: Mapping[Place, Cell]) -> Report:
    found = throughput.rows(cells)
    summaries = throughput.summaries(found)
    tables, figures = [sweep_report.rows_table(found)], [_beside(log, "throughput")]
    plots.throughput_against_latency(found, figures[0])
    if summaries:
        tables.append(sweep_report.summary_table(summaries))
        figures.append(_beside(log, "speedup"))
        plots.speedup_against_concurrency(found, figures[1])
    rows = [dataclasses.asdict(row) for row in found]
    return tables, figures, {"rows": rows, "summary": [dataclasses.asdict(s) for s in summaries]}


def _rounds_report(log: RawLog, cells: Mapping[Place, Cell]) -> Report:
    shape = log.records[0]["shape"]
    published = {one.name: published_length(shape, one) for one in _arms(log)}
    found = round_rows(cells, published)
    figures = []
    if any(row.ratio for row in found):
        figures.append(_beside(log, "rounds"))
        plots.round_ratio_against_batch(found, figures[0])
    rows = [dataclasses.asdict(row) for row in found]
    return [sweep_report.rounds_table(found)], figures, {"rows": rows}


def _beside(log: RawLog, figure: str) -> Path:
    return log.path.with_name(f"{log.path.stem}-{figure}.png")


def _arms(log: RawLog) -> list[Arm]:
    return [Arm.of(record) for record in log.records if record["record"] == RECORD]


def _described(log: RawLog) -> list[str]:
    """What was measured, in words: hardware, versions, settings, one command an arm."""
    settings = log.records[0]
    versions = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    if settings["kind"] == ROUNDS:
        what = f"{settings['shape']}, random weights, prompts of {settings['prompt_tokens']} tokens"
    else:
        what = f"Answers of at most {settings['new_tokens']} tokens"
        what += f", temperature {settings['temperature']:g}"
    commands = [
        f"{one.name}: {one.command(settings['model'], settings['flags'])}" for one in _arms(log)
    ]
    return [
        f"{settings['hardware']}; {versions}. {what}.",
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


def _digest(questions: Iterable[Question]) -> str:
    asked = json.dumps([dataclasses.astuple(question) for question in questions])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.sweep"))
