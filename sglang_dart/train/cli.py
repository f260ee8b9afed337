"""`sglang-dart train`: make data with a target, train a drafter on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dart.cli import emit
from sglang_dart.train import commands
from sglang_dart.train.terminal import Bar, terminal

app = typer.Typer(add_completion=False, no_args_is_help=True)


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
    with Bar("data") as bar:

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
    terminal.print(f"refused: {refused or 'nothing'}")
    if exclude:
        count = refused.get("evaluation overlap", 0)
        terminal.print(f"removed for overlap with the evaluation sets (13-gram): {count}")
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


for _command in (commands.dart, commands.dflash, commands.domino):
    # Words after `--` go to the server of the parity gate.
    app.command(context_settings={"allow_extra_args": True})(_command)


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
