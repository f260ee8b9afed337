"""`sglang-dart train`: make data with a target, train a drafter on it."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from sglang_dart.cli import emit

app = typer.Typer(add_completion=False, no_args_is_help=True)
_terminal = Console(stderr=True)
# Without a terminal, progress is a line every so many seconds.
_QUIET_S = 10.0


@app.command()
def data(
    model: Annotated[str, typer.Option(help="Target: a folder or a hub id.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards; continued if it has some.")],
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens to keep.")] = 30_000_000,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so long.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines or parquet with messages, turns or text; repeatable."),
    ] = None,
    openings: Annotated[
        Path | None, typer.Option(help="First words of questions, one a line, to vary topics.")
    ] = None,
    opening_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of questions with such an opening.")
    ] = 0.5,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Evaluation set (JSON lines with `turns`) to keep out; repeatable."),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Of answers, drawn evenly. [0, 0.7]")
    ] = None,
    question_temperature: Annotated[float, typer.Option(min=0, help="Of questions.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 384,
    max_length: Annotated[int, typer.Option(min=16, help="Longest text.")] = 2048,
    shard_samples: Annotated[int, typer.Option(min=1, help="Conversations of a shard.")] = 1000,
    min_tokens: Annotated[int, typer.Option(min=1, help="Shortest answer kept.")] = 8,
    min_distinct: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of distinct 4-grams in an answer.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(help="Of prompts, temperatures and sampling.")] = 0,
    engine: Annotated[str, typer.Option(help="sglang, or transformers (slow).")] = "sglang",
    replicas: Annotated[int, typer.Option(min=1, help="Engines that share the device.")] = 1,
    concurrent: Annotated[int, typer.Option(min=1, help="Requests in flight per engine.")] = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    """Let the target answer prompts, or write the questions as well; store what is fit to train on.

    Without --prompts the target gets the user header of its chat template and writes the question.
    """
    from sglang_dart.train.generate import generate_data
    from sglang_dart.train.loop import claim_folder
    from sglang_dart.train.writer import DataSettings, Machine

    if engine not in ("sglang", "transformers"):
        raise ValueError(f"--engine {engine}: must be sglang or transformers")
    settings = DataSettings(
        model=model,
        prompts=tuple(map(str, prompts or ())),
        openings=_lines(openings),
        opening_share=opening_share,
        temperatures=tuple(temperature or (0.0, 0.7)),
        question_temperature=question_temperature,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        shard_samples=shard_samples,
        min_tokens=min_tokens,
        min_distinct=min_distinct,
        seed=seed,
    )
    claim_folder(out, settings.__dict__)
    with _Bar("data") as bar:

        def show(totals: Any, sieve: Any) -> None:
            refused = sum(sieve.refused.values())
            bar.show(
                totals.generated_tokens / tokens,
                f"{totals.generated_tokens / 1e6:.2f} M tokens, {totals.samples} kept, "
                f"{refused} refused, {totals.written_tokens / max(totals.seconds, 1e-9):.0f} tok/s",
            )

        machine = Machine(engine, replicas, concurrent, dtype)
        summary = generate_data(
            out, settings, machine, exclude or [], tokens=tokens, minutes=minutes, on_progress=show
        )
    refused = summary["refused"]
    _terminal.print(f"refused: {refused or 'nothing'}")
    if exclude:
        count = refused.get("evaluation overlap", 0)
        _terminal.print(f"removed for overlap with the evaluation sets (13-gram): {count}")
    emit({name: summary[name] for name in _DATA_FIGURES} | {"out": str(out)})


_DATA_FIGURES = (
    "samples",
    "generated_tokens",
    "answer_tokens",
    "written_tokens",
    "seconds",
    "tokens_per_s",
    "refused",
)


@app.command(context_settings={"allow_extra_args": True})
def dart(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Target: a folder or a hub id.")],
    data: Annotated[list[Path], typer.Option(help="Shards from `train data`; repeatable.")],
    out: Annotated[Path, typer.Option(help="Run folder; a run in it is resumed.")],
    minutes: Annotated[float | None, typer.Option(min=0, help="Train for so long.")] = None,
    epochs: Annotated[float, typer.Option(min=0, help="Passes over the data.")] = 3.0,
    max_steps: Annotated[int | None, typer.Option(min=1)] = None,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-3,
    batch_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of a step on each device.")
    ] = 32768,
    warmup_steps: Annotated[int, typer.Option(min=0)] = 100,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.0,
    clip: Annotated[float, typer.Option(min=0, help="Largest gradient norm.")] = 0.5,
    gamma: Annotated[float, typer.Option(min=0, max=1, help="Level j weighs gamma**j.")] = 0.6,
    draft_length: Annotated[int, typer.Option(min=1, max=63, help="Mask rows.")] = 7,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Most frequent tokens.")] = 32000,
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="MLP width. Default: the target's.")
    ] = None,
    final_norm_passes: Annotated[int, typer.Option(min=1, max=2)] = 2,
    borrow: Annotated[
        bool, typer.Option(help="Start from the target's weights where they fit.")
    ] = True,
    max_length: Annotated[int, typer.Option(min=8, help="Texts are cut here.")] = 2048,
    held_out: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of texts for validation.")
    ] = 0.01,
    log_interval: Annotated[int, typer.Option(min=1)] = 20,
    save_interval: Annotated[int, typer.Option(min=1)] = 500,
    eval_interval: Annotated[int, typer.Option(min=1)] = 500,
    seed: Annotated[int, typer.Option()] = 0,
    chunk: Annotated[
        int, typer.Option(min=1, help="Teacher positions at a time in the loss: bounds memory.")
    ] = 512,
    gate: Annotated[
        bool, typer.Option(help="At the end, decode held-out prompts by reference and server.")
    ] = True,
    gate_server: Annotated[bool, typer.Option(help="Ask the server as well.")] = True,
    gate_prompts: Annotated[int, typer.Option(min=1)] = 16,
    gate_tokens: Annotated[int, typer.Option(min=2)] = 128,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="bf16, fp32 or auto (fp32 on a CPU).")] = "auto",
) -> None:
    """Train a DART head; on several GPUs start it with `accelerate launch -m sglang_dart.train`.

    Words after `--` go to the server of the parity gate. Exit code 1 if the gate fails.
    """
    import torch

    from sglang_dart.train.dart import DartSettings, train_dart
    from sglang_dart.train.loop import LoopSettings

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    if precision not in ("bf16", "fp32") or device not in ("cuda", "cpu"):
        raise ValueError(f"--device {device} --precision {precision}: cuda or cpu, bf16 or fp32")
    settings = DartSettings(
        model=model,
        data=tuple(map(str, data)),
        loop=LoopSettings(
            lr=lr,
            epochs=epochs,
            max_steps=max_steps,
            minutes=minutes,
            batch_tokens=batch_tokens,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            clip=clip,
            seed=seed,
            log_interval=log_interval,
            save_interval=save_interval,
            eval_interval=eval_interval,
        ),
        precision=precision,
        draft_length=draft_length,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        gamma=gamma,
        final_norm_passes=final_norm_passes,
        borrow=borrow,
        max_length=max_length,
        held_out=held_out,
        chunk=chunk,
    )
    if _main_process():
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        # One line a file at every checkpoint.
        logging.getLogger("accelerate").setLevel(logging.WARNING)
    with _Bar("train") as bar:
        trained = train_dart(
            out,
            settings,
            device=device,
            command=_command_line(),
            on_step=_show_step(bar),
        )
    if not _main_process():
        return
    result = trained.summary | {"head": str(trained.head)}
    if not gate:
        emit(result)
        return
    from sglang_dart.train.card import gate_section
    from sglang_dart.train.gate import check_parity

    _terminal.print("parity gate: decoding held-out prompts")
    found = check_parity(
        trained.head,
        model,
        trained.held_out,
        device=device,
        prompts=gate_prompts,
        new_tokens=gate_tokens,
        with_server=gate_server,
        server_flags=context.args,
    )
    for line in (*found.failures, *([found.note] if found.note else [])):
        _terminal.print(f"[bold red]PARITY GATE: {line}", highlight=False)
    with (trained.head / "README.md").open("a") as card:
        card.write(gate_section(asdict(found)))
    emit(result | {"gate": asdict(found)})
    if found.failures:
        raise typer.Exit(1)


def _show_step(bar: _Bar) -> Callable[[Any, float, Any], None]:
    best = ""

    def show(progress: Any, done: float, scores: Any) -> None:
        nonlocal best
        if scores:
            hits = "/".join(f"{100 * hit:.0f}" for hit in scores.accuracy)
            best = f", held-out loss {scores.loss:.3f}, accuracy {hits} %"
        rate = progress.tokens / max(progress.seconds, 1e-9)
        bar.show(done, f"step {progress.step}, {rate:.0f} tok/s{best}")

    return show


class _Bar:
    """A progress bar on a terminal, a line now and then elsewhere; only in the main process."""

    def __init__(self, name: str) -> None:
        self._bar = Progress(
            TextColumn(name),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=_terminal,
            disable=not _terminal.is_terminal or not _main_process(),
        )
        self._task = self._bar.add_task("", total=1.0)
        self._said = -_QUIET_S

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: float, text: str) -> None:
        """Show the share done, 0 .. 1, and a text."""
        self._bar.update(self._task, completed=min(done, 1.0), description=text)
        now = self._bar.get_time()
        if self._bar.disable and _main_process() and now - self._said >= _QUIET_S:
            self._said = now
            _terminal.print(f"{100 * min(done, 1.0):5.1f} %  {text}", highlight=False)


def _command_line() -> str:
    program = Path(sys.argv[0])
    called = "python -m sglang_dart.train" if program.stem == "__main__" else program.name
    return f"{called} {shlex.join(sys.argv[1:])}"


def _main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _lines(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read it as UTF-8 text ({error})") from error
    found = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not found:
        raise ValueError(f"{path}: holds no opening")
    return found
