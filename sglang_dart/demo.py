"""`sglang-dart demo`: the real server on this machine, plain and speculating, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_dart.cli import emit, run_tool
from sglang_dart.demo_target import cache_dir, prepare_target
from sglang_dart.draft.checkpoint import CONFIG, read_json
from sglang_dart.measure.client import Reply, chat
from sglang_dart.measure.metrics import Acceptance, micro_length
from sglang_dart.measure.server import serve

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 apples, buys 4 more and gives 2 away. How many apples are left? Explain.",
)
# Enough for the demo's few short requests; SGLang's default would claim most of the memory.
FLAGS = ("--max-total-tokens", "20000")
TRAINED = {"DART": "smollm2-135m-dart", "DARTREE": "smollm2-135m-domino"}
UNTRAINED = "UNTRAINED: random weights made to show the path, so hardly any draft can be right"
PLAIN = "plain"

app = typer.Typer(add_completion=False)
_progress = Console(stderr=True)


@dataclass(frozen=True)
class Drafter:
    """A folder or hub id, and where it comes from."""

    source: str
    note: str
    trained: bool


@dataclass(frozen=True)
class Arm:
    """The answers of one server."""

    name: str
    replies: list[Reply]

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after each answer's first, over the time they took."""
        timed = [reply for reply in self.replies if reply.tpot_s]
        tokens = sum(len(reply.ids) - 1 for reply in timed)
        seconds = sum(reply.latency_s - (reply.ttft_s or 0.0) for reply in timed)
        return tokens / seconds if seconds else 0.0

    @property
    def accept_length(self) -> float | None:
        return micro_length(Acceptance.of(reply.meta) for reply in self.replies)


@app.command(context_settings={"allow_extra_args": True})
def demo(
    context: typer.Context,
    algorithm: Annotated[str, typer.Option(help="DART or DARTREE.")] = "DART",
    model: Annotated[
        str, typer.Option(help="Target: a folder or a hub id. Default: SmolLM2-135M-Instruct.")
    ] = "",
    drafter: Annotated[str, typer.Option(help="Drafter: a folder or a hub id.")] = "",
    prompt: Annotated[
        list[str] | None, typer.Option(help="A question of your own; repeatable.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    prepare: Annotated[
        Path | None, typer.Option(help="Write the default target to this folder, and stop.")
    ] = None,
) -> None:
    """Ask the real server the same questions without and with speculation.

    Everything runs on this machine, without a GPU too. Words after `--` go to both servers.
    """
    algorithm = algorithm.upper()
    if algorithm not in TRAINED:
        raise ValueError(f"--algorithm {algorithm}: must be one of {', '.join(TRAINED)}")
    target, chosen = prepare_models(algorithm, prepare, model, drafter)
    if prepare:
        emit({"tool": "demo", "target": target} | _described(chosen))
        return
    questions = prompt or list(PROMPTS)
    speculation = ["--speculative-algorithm", algorithm]
    speculation += ["--speculative-draft-model-path", chosen.source]
    flags = (*FLAGS, *context.args)
    arms = [
        _ask(name, target, (*flags, *extra), port, questions, max_new_tokens)
        for name, extra in ((PLAIN, []), (algorithm, speculation))
    ]
    _show(arms, questions, chosen)
    emit(_result(arms, target, chosen))


def prepare_models(
    algorithm: str = "DART", folder: Path | None = None, model: str = "", drafter: str = ""
) -> tuple[str, Drafter]:
    """Give a target and a drafter for it, by default the demo's, made at the first call.

    folder: where the default target shall be. model, drafter: folders or hub ids to take instead.
    Raises ValueError if no drafter for `model` is at hand.
    """
    target = model
    if not model:
        with _progress.status("preparing SmolLM2-135M-Instruct (at the first call only)"):
            target = str(prepare_target(folder))
    if drafter:
        trained = read_json(drafter, CONFIG).get("trained") is not False
        return target, Drafter(drafter, "as given" if trained else UNTRAINED, trained)
    return target, _drafter(algorithm, target, default_target=not model)


def _drafter(algorithm: str, target: str, *, default_target: bool) -> Drafter:
    """The trained drafter of the default target if it is at hand, else an untrained one."""
    name = TRAINED[algorithm]
    if default_target:
        for home in (Path.cwd() / "models", Path(__file__).parents[1] / "models", cache_dir()):
            if (home / name / "config.json").is_file():
                return Drafter(str(home / name), "trained for this target", trained=True)
    if not Path(target).is_dir():
        raise ValueError(f"no {algorithm} drafter for {target} at hand: give --drafter")
    from sglang_dart.train import export

    folder = cache_dir() / f"untrained-{algorithm.lower()}-for-{Path(target).name}"
    write = {
        "DART": export.write_untrained_dart_head,
        "DARTREE": export.write_untrained_domino_drafter,
    }
    write[algorithm](Path(target), folder)
    return Drafter(str(folder), UNTRAINED, trained=False)


def _ask(
    name: str, target: str, flags: Sequence[str], port: int, questions: Sequence[str], length: int
) -> Arm:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": length}
    with _progress.status(f"{name}: starting the server") as status:

        def wait(elapsed_s: float) -> None:
            status.update(f"{name}: starting the server, {elapsed_s:.0f} s")

        with serve(target, flags, port=port, on_wait=wait) as server:
            status.update(f"{name}: answering {len(questions)} questions")
            # The first request of a server pays for what is set up once.
            chat(
                server.url, [[{"role": "user", "content": "Hello!"}]], {**sampling, "max_tokens": 8}
            )
            return Arm(name, chat(server.url, conversations, sampling))


def _show(arms: Sequence[Arm], questions: Sequence[str], drafter: Drafter) -> None:
    console = Console()
    plain, speculative = arms
    console.rule("answers")
    for question, reply, other in zip(questions, speculative.replies, plain.replies, strict=True):
        console.print(f"[bold]{question}[/bold]", highlight=False)
        console.print(reply.text.strip(), markup=False, highlight=False)
        if reply.ids != other.ids:
            console.print("[italic]plain decoding said:[/italic]")
            console.print(other.text.strip(), markup=False, highlight=False)
        console.print()
    table = Table(title="One request at a time, temperature 0")
    for heading in ("", "tokens/s", "tokens", "accept length τ"):
        table.add_column(heading, justify="left" if not heading else "right")
    for arm in arms:
        tau = arm.accept_length
        tokens = sum(len(reply.ids) for reply in arm.replies)
        table.add_row(
            arm.name,
            f"{arm.tokens_per_s:.1f}",
            str(tokens),
            "-" if tau is None else f"{tau:.2f}",
        )
    console.print(table)
    console.print(f"speed ratio {_ratio(arms):.2f}; drafter {drafter.source} ({drafter.note})")
    same = _same(arms)
    if same < len(questions):
        console.print(
            f"{same} of {len(questions)} answers are token-identical. In 16 bits near-ties may "
            "fall either way; `sglang-dart eval --exactness` tells them from errors."
        )


def _ratio(arms: Sequence[Arm]) -> float:
    plain, speculative = arms
    return speculative.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else float("nan")


def _same(arms: Sequence[Arm]) -> int:
    plain, speculative = arms
    return sum(a.ids == b.ids for a, b in zip(plain.replies, speculative.replies, strict=True))


def _described(drafter: Drafter) -> dict[str, Any]:
    return {"drafter": drafter.source, "drafter_trained": drafter.trained}


def _result(arms: Sequence[Arm], target: str, drafter: Drafter) -> dict[str, Any]:
    plain, speculative = arms
    return {
        "tool": "demo",
        "algorithm": speculative.name,
        "target": target,
        **_described(drafter),
        "answers": [reply.text for reply in speculative.replies],
        "identical": _same(arms),
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": speculative.tokens_per_s,
        "speed_ratio": _ratio(arms),
        "accept_length": speculative.accept_length,
    }


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.demo"))
