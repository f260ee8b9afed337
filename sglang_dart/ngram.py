"""`sglang-dart ngram`: build, convert, inspect, prune and query n-gram models."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sglang_dart import _core, ngram_model
from sglang_dart.cli import emit, run_tool
from sglang_dart.ngram_model import Vocabulary

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
_console = Console(stderr=True)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)

Source = Annotated[str, typer.Argument(help="A file, or `repo/id:file` from the hub.")]
TokenizerOption = Annotated[str, typer.Option(help="Tokenizer of the target: a folder or hub id.")]


@app.command()
def build(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help=".jsonl, .txt, .parquet files or folders of them; .gz of the first two."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model to write.")],
    tokenizer: TokenizerOption = "",
    order: Annotated[int, typer.Option(min=2, max=6, help="Longest n-gram.")] = 3,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: a core each.")] = 0,
    memory: Annotated[str, typer.Option(help="Bound on all processes together.")] = "4GB",
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Inputs are .npy streams or parquet lists of ids.")
    ] = False,
    vocab_size: Annotated[
        int, typer.Option(min=0, help="With --token-ids: instead of a tokenizer.")
    ] = 0,
    eos_id: Annotated[
        int | None, typer.Option(min=0, help="Ends documents; default: the tokenizer's.")
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Evaluation set (JSON lines with `turns`) to keep out; repeatable."),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of intermediate files; default: OUTPUT.work.")
    ] = None,
) -> None:
    """Count the n-grams of texts, JSON lines (`text` or chat `messages`) or token ids.

    Documents that cannot be read are left out and reported. If it is interrupted, the same command
    goes on where it stopped.
    """
    from sglang_dart.ngram_build import build as builder
    from sglang_dart.ngram_build.documents import TEXT_FORMATS, TOKEN_FORMATS, find_units
    from sglang_dart.ngram_build.encode import TokenizerSource, load_tokenizer

    _check_output(output)
    if not tokenizer and not (token_ids and vocab_size and eos_id is not None):
        raise ValueError("give --tokenizer, or --token-ids with --vocab-size and --eos-id")
    if tokenizer and vocab_size:
        raise ValueError(
            "--vocab-size is the tokenizer's; give one of --tokenizer and --vocab-size"
        )
    if token_ids and exclude:
        raise ValueError("--exclude compares words: give texts instead of --token-ids")
    units = find_units(inputs, TOKEN_FORMATS if token_ids else TEXT_FORMATS)
    vocabulary, source, eos = Vocabulary(vocab_size), None, eos_id
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
        vocabulary = ngram_model.vocabulary_of(loaded, _tokenizer_name(tokenizer))
        source = TokenizerSource.of(loaded, tokenizer, eos_id)
        eos = source.eos
    assert eos is not None
    kept_out = tuple(map(str, exclude or []))
    plan = builder.Plan(
        tuple(units), order, vocabulary, eos, None if token_ids else source, kept_out
    )
    start = time.perf_counter()
    with _progress() as progress:
        result = builder.build(
            plan,
            output,
            work or output.with_name(output.name + ".work"),
            workers or _core.available_cores(),
            _bytes_of(memory),
            progress,
        )
    if exclude:
        removed = result.bad.get(builder.OVERLAP, 0)
        _console.print(f"removed for overlap with the evaluation sets (13-gram): {removed}")
    for reason, count in result.bad.items():
        _console.print(f"left out: {count} documents, {reason}", style="yellow")
    model = _core.NgramModel.open(str(output))
    emit(
        _summary(model, output)
        | {"documents": result.documents, "left_out": result.bad}
        | {"seconds": round(time.perf_counter() - start, 2)}
    )


@app.command()
def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="*.trie writes the published format.")],
    tokenizer: TokenizerOption = "",
    repair_counts: Annotated[
        bool, typer.Option("--repair-counts", help="Raise counts that children outnumber.")
    ] = False,
) -> None:
    """Turn a published .trie into the compact format, or a model into a .trie.

    With --tokenizer the model carries the vocabulary's fingerprint, and a target with another one
    is refused.
    """
    path = ngram_model.find_file(source)
    with _progress() as progress:

        def report(done: int, whole: int) -> None:
            progress("convert", done, whole)

        if target.suffix == ".trie":
            if tokenizer or repair_counts:
                raise ValueError(f"{target}: a .trie holds no fingerprint; drop the options")
            _core.write_trie(_core.NgramModel.open(str(path)), str(target), report)
            emit({"path": str(target), "bytes": target.stat().st_size})
            return
        if ngram_model.is_compact(path):
            raise ValueError(f"{source}: is in the compact format already")
        vocabulary = _vocabulary(tokenizer)
        ngram_model.convert(path, target, vocabulary, repair_counts, report)
    emit(_summary(_core.NgramModel.open(str(target)), target))


@app.command()
def inspect(
    source: Source,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check the whole file.")
    ] = False,
) -> None:
    """Show what a model holds. Exit code 1 if --verify finds a fault."""
    path = ngram_model.find_file(source)
    model = _core.NgramModel.open(str(path))
    summary = _summary(model, path)
    table = Table("field", "value")
    for name, value in summary.items():
        table.add_row(name, str(value))
    _console.print(table)
    if verify:
        try:
            model.verify()
        except RuntimeError as error:
            emit(summary | {"fault": str(error)})
            raise typer.Exit(1) from error
    emit(summary | ({"verified": True} if verify else {}))


@app.command()
def prune(
    source: Source,
    target: Annotated[Path, typer.Argument(help="The smaller model to write.")],
    min_count: Annotated[int, typer.Option(min=1, help="Drop rarer n-grams.")] = 1,
    max_nodes: Annotated[int, typer.Option(min=0, help="Limit; 0: none.")] = 0,
    max_size: Annotated[str, typer.Option(help="Limit of the file, such as 500MB.")] = "",
) -> None:
    """Keep the n-grams whose loss would change lookups most, within the limits."""
    if min_count == 1 and not max_nodes and not max_size:
        raise ValueError("give --min-count, --max-nodes or --max-size")
    _check_output(target)
    path = ngram_model.find_file(source)
    model = _core.NgramModel.open(str(path))
    limits = {
        "min_count": min_count,
        "max_nodes": max_nodes,
        "max_bytes": _bytes_of(max_size) if max_size else 0,
    }
    history = json.loads(model.metadata or b"{}")
    metadata = history | {"pruned": [*history.get("pruned", []), limits]}
    with _progress() as progress:
        _core.prune_ngram(
            model,
            str(target),
            **limits,
            folder=str(target.parent),
            metadata=json.dumps(metadata, sort_keys=True),
            progress=lambda done, whole: progress("prune", done, whole),
        )
    before = {"nodes_before": model.node_count, "bytes_before": model.file_bytes}
    emit(_summary(_core.NgramModel.open(str(target)), target) | before)


@app.command()
def query(
    source: Source,
    context: Annotated[str, typer.Option(help="Token ids, such as 5,7; or text with --tokenizer.")],
    candidates: Annotated[str, typer.Option(help="Token ids; default: the likeliest.")] = "",
    tokenizer: TokenizerOption = "",
    top: Annotated[int, typer.Option(min=1, help="How many, without --candidates.")] = 10,
) -> None:
    """Show how probable tokens are after a context."""
    model = ngram_model.open_ngram(source)
    loaded: Any = None
    if tokenizer:
        from sglang_dart.ngram_build.encode import load_tokenizer

        loaded = load_tokenizer(tokenizer)
        vocabulary = ngram_model.vocabulary_of(loaded, _tokenizer_name(tokenizer))
        ngram_model.check_vocabulary(model, vocabulary, source)
        tokens = loaded(context, add_special_tokens=False)["input_ids"]
    else:
        tokens = _token_ids(context, "--context")
    if candidates:
        asked = _token_ids(candidates, "--candidates")
    else:
        token, count, _ = model.continuations(tokens)
        asked = token[np.argsort(-count.astype(np.int64), kind="stable")[:top]].tolist()
    probability, length = model.query(tokens, asked)
    table = Table("token", "probability", "context tokens", *(["text"] if loaded else []))
    for row in zip(asked, probability.tolist(), length.tolist(), strict=True):
        text = [repr(loaded.decode([row[0]]))] if loaded else []
        table.add_row(*map(str, row), *text)
    _console.print(table)
    emit(
        {
            "context": tokens,
            "candidates": asked,
            "probability": probability.tolist(),
            "matched_length": length.tolist(),
        }
    )


def _summary(model: _core.NgramModel, path: Path) -> dict[str, Any]:
    vocabulary = ngram_model.model_vocabulary(model)
    return {
        "path": str(path),
        "format": "compact" if ngram_model.is_compact(path) else "trie",
        "order": model.order,
        "nodes": model.node_count,
        "ngrams": model.level_sizes,
        "tokens": model.total,
        "bytes": path.stat().st_size,
        "bytes_per_node": round(path.stat().st_size / model.node_count, 2),
        "tokenizer": vocabulary.name,
        "vocab_size": vocabulary.size,
        "tokenizer_sha256": vocabulary.sha256.hex(),
        "metadata": json.loads(model.metadata or b"{}"),
    }


def _vocabulary(tokenizer: str) -> Vocabulary:
    if not tokenizer:
        return Vocabulary()
    from sglang_dart.ngram_build.encode import load_tokenizer

    return ngram_model.vocabulary_of(load_tokenizer(tokenizer), _tokenizer_name(tokenizer))


def _tokenizer_name(given: str) -> str:
    """Where a folder stands does not belong into a file that others will read."""
    return Path(given).resolve().name if Path(given).exists() else given


def _check_output(path: Path) -> None:
    if path.suffix == ".trie":
        raise ValueError(f"{path}: this writes the compact format; `ngram convert` writes .trie")


def _token_ids(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in re.split(r"[\s,]+", text.strip()) if part]
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: expected token ids such as 5,7") from error


def _bytes_of(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"size {text!r}: expected a number and a unit, such as 500MB or 4GB")
    return int(float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " "))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each stage."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_console) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, whole: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=whole)

        yield report
        # The last report comes before the end.
        for task in bars.tasks:
            bars.update(task.id, completed=task.total)


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.ngram"))
