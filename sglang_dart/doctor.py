"""`sglang-dart doctor`: is everything here that speculation needs, and does a drafter fit?"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from sglang_dart.cli import emit, run_tool

# What the tests ran with. SGLang pins the others, so another one comes from a changed environment.
TESTED = {
    "sglang": "0.5.23",
    "torch": "2.14.1",
    "transformers": "5.19",
    "flashinfer-python": "0.7.2",
    "triton": "3.8",
}
ENTRY_POINTS = {
    "sglang.srt.plugins": ("sglang_dart", "sglang_dart.plugin:register"),
    "sglang.srt.platforms": ("sglang_dart_cpu", "sglang_dart.cpu_host:activate"),
}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Finding:
    """One line of the report. Only "wrong" makes the exit code 1."""

    area: str
    level: Literal["good", "note", "wrong"]
    text: str


@app.command()
def doctor(
    model: Annotated[
        str, typer.Option("--model-path", "--model", help="Target: a folder or a hub id.")
    ] = "",
    drafter: Annotated[str, typer.Option(help="Drafter: a folder or a hub id.")] = "",
) -> None:
    """Check versions, hardware, the hooks into SGLang, and a drafter's fit to its target.

    Exit code 1 if something is wrong.
    """
    if bool(model) != bool(drafter):
        raise ValueError("a fit needs both --model-path and --drafter")
    findings = [*versions(), *hardware(), *plugins(), *contract()]
    if drafter:
        from sglang_dart.measure.pairing import pairing

        findings += [Finding("fit", level, text) for level, text in pairing(model, drafter)]
    table = Table("area", "", "finding")
    signs = {"good": "[green]ok[/green]", "note": "[yellow]note[/yellow]"}
    for finding in findings:
        table.add_row(finding.area, signs.get(finding.level, "[red]WRONG[/red]"), finding.text)
    Console().print(table)
    wrong = [finding for finding in findings if finding.level == "wrong"]
    emit({"tool": "doctor", "ok": not wrong, "findings": [asdict(each) for each in findings]})
    if wrong:
        raise typer.Exit(1)


def versions() -> Iterator[Finding]:
    """Installed packages against those the tests ran with."""
    area, python = "versions", platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        area,
        "good" if supported else "wrong",
        f"Python {python}" + ("" if supported else "; supported are 3.11 and 3.12"),
    )
    for name, tested in TESTED.items():
        found = _version(name)
        if found is None:
            # Only GPU attention needs it.
            level: Literal["note", "wrong"] = "note" if name == "flashinfer-python" else "wrong"
            yield Finding(area, level, f"{name} is not installed; tested with {tested}")
        elif f"{found}.".startswith(f"{tested}.") or found.startswith(f"{tested}+"):
            yield Finding(area, "good", f"{name} {found}")
        else:
            supported = name != "sglang" or found.startswith("0.5.")
            text = f"{name} {found}; tested with {tested}"
            yield Finding(area, "note" if supported else "wrong", text)


def hardware() -> Iterator[Finding]:
    """GPUs and their compute capability, or the CPU path and what it will use."""
    import torch

    area = "hardware"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        text = f"GPU {index}: {torch.cuda.get_device_name(index)}, compute capability"
        yield Finding(
            area,
            "good" if major >= 8 else "note",
            f"{text} {major}.{minor}, {memory:.0f} GiB"
            + ("" if major >= 8 else "; tree attention is tested from 8.0 on"),
        )
    if torch.cuda.device_count():
        return
    from sglang_dart import cpu_host

    yield Finding(area, "good", f"no GPU. {cpu_host.describe()}")
    cores, threads = cpu_host.usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        text = f"OMP_NUM_THREADS={threads} exceeds the {cores} usable cores: lower it"
        yield Finding(area, "note", text)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "0":
        yield Finding(area, "wrong", "SGLANG_USE_CPU_ENGINE=0 forbids the CPU engine; unset it")


def plugins() -> Iterator[Finding]:
    """Entry points as SGLang sees them, what hides them, and what importing them says."""
    area = "plug-in"
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    for group, (name, value) in ENTRY_POINTS.items():
        found = [
            point
            for point in importlib.metadata.entry_points(group=group)
            if (point.name, point.value) == (name, value)
        ]
        if not found:
            text = f"no entry point {name} in {group}; install sglang-dart with pip"
            yield Finding(area, "wrong", text)
            continue
        if names and name not in names:
            text = f"SGLANG_PLUGINS={allowed} hides {name}; add it or unset the variable"
            yield Finding(area, "wrong", text)
            continue
        problem = _import_problem(found[0].module)
        text = f"{group}: {name}"
        yield Finding(area, "wrong" if problem else "good", f"{text}: {problem or 'visible'}")
    chosen = os.environ.get("SGLANG_PLATFORM")
    if chosen:
        text = f"SGLANG_PLATFORM={chosen} skips our preparation of hosts without a GPU"
        yield Finding(area, "note", text)
    problem = _import_problem("sglang_dart._core")
    text = f"compiled module: {problem or 'loads'}"
    yield Finding(area, "wrong" if problem else "good", text)


def contract() -> Iterator[Finding]:
    """Every symbol of SGLang that the engine relies on."""
    area = "SGLang's interfaces"
    problem = _import_problem("sglang_dart.engine.upstream")
    if problem:
        yield Finding(area, "wrong", problem)
        return
    from sglang_dart.engine import upstream

    problems = upstream.check()
    for line in problems:
        yield Finding(area, "wrong", line)
    if not problems:
        yield Finding(area, "good", f"all {len(upstream.SYMBOLS)} symbols are as tested")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_problem(module: str) -> str | None:
    """Why a module does not import, in one line; None if it does."""
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.doctor"))
