"""Evaluation sets by name, loaded from the hub: those of DARTree's protocol, in its prompts.

Source: DARTree (arXiv 2608.13524), what its release asks; the wording of instructions is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_dart.measure.question import Question

Record = Mapping[str, Any]


@dataclass(frozen=True)
class NamedSet:
    """Where a set lies, and how its records become conversations.

    path, config, split, files: what `datasets.load_dataset` gets (config as `name`, files as
    `data_files`). samples: how many the protocol asks. columns: all that `turns` reads.
    id, category: columns; without an id the number of the row is one.
    """

    path: str
    split: str
    samples: int
    columns: tuple[str, ...]
    turns: Callable[[Record], tuple[str, ...]]
    config: str | None = None
    files: tuple[str, ...] = ()
    id: str = ""
    category: str = ""


def _mathematics(column: str) -> Callable[[Record], tuple[str, ...]]:
    how = "Reason step by step and give the final answer in \\boxed{}."
    return lambda record: (f"{record[column]}\n{how}",)


def _function(record: Record) -> tuple[str, ...]:
    how = "Write a solution to this problem that passes its tests:"
    return (f"{how}\n```python\n{record['prompt'].rstrip()}\n```",)


def _contest(record: Record) -> tuple[str, ...]:
    text, start = record["question_content"], record["starter_code"]
    return (f"{text}\n\nStart from this code:\n```python\n{start}\n```" if start else text,)


def _instruction(record: Record) -> tuple[str, ...]:
    text, given = record["instruction"], record["input"]
    return (f"{text}\n\nInput:\n{given}" if given else text,)


# The release of LiveCodeBench is a script, which `datasets` no longer runs, over these files.
_CONTESTS = tuple(
    f"hf://datasets/livecodebench/code_generation_lite/test{part}.jsonl"
    for part in ("", 2, 3, 4, 5, 6)
)

NAMED: Mapping[str, NamedSet] = {
    "gsm8k": NamedSet(
        "openai/gsm8k", "test", 128, ("question",), _mathematics("question"), config="main"
    ),
    "math500": NamedSet(
        "HuggingFaceH4/MATH-500",
        "test",
        128,
        ("problem", "unique_id", "subject"),
        _mathematics("problem"),
        id="unique_id",
        category="subject",
    ),
    "aime25": NamedSet(
        "MathArena/aime_2025",
        "train",
        30,
        ("problem", "problem_idx"),
        _mathematics("problem"),
        id="problem_idx",
    ),
    "humaneval": NamedSet(
        "openai/openai_humaneval", "test", 164, ("prompt", "task_id"), _function, id="task_id"
    ),
    "mbpp": NamedSet(
        "google-research-datasets/mbpp",
        "test",
        128,
        ("prompt", "task_id"),
        lambda record: (record["prompt"],),
        config="sanitized",
        id="task_id",
    ),
    "mt-bench": NamedSet(
        "HuggingFaceH4/mt_bench_prompts",
        "train",
        80,
        ("prompt", "prompt_id", "category"),
        lambda record: tuple(record["prompt"]),
        id="prompt_id",
        category="category",
    ),
    "alpaca": NamedSet("tatsu-lab/alpaca", "train", 128, ("instruction", "input"), _instruction),
    "livecodebench": NamedSet(
        "json",
        "train",
        128,
        ("question_content", "starter_code", "question_id", "platform"),
        _contest,
        files=_CONTESTS,
        id="question_id",
        category="platform",
    ),
}


def load_named(name: str, limit: int | None = None, seed: int = 0) -> list[Question]:
    """Questions of the set called `name`: `limit` of them, by default as many as the protocol asks.

    A set that has more is shuffled as `Dataset.shuffle(seed)` does, and its first are taken.
    Raises ValueError if the set cannot be loaded or is not what it was.
    """
    which = NAMED[name]
    rows = _load(name, which)
    count = min(limit or which.samples, len(rows))
    chosen = range(len(rows))
    if count < len(rows):
        chosen = np.random.default_rng(seed).permutation(len(rows))[:count].tolist()
    return [_question(name, which, number, rows[number]) for number in chosen]


def _load(name: str, which: NamedSet) -> Any:
    import datasets
    import httpx

    place = ", ".join(which.files[:1]) or which.path
    try:
        rows = datasets.load_dataset(
            which.path, which.config, split=which.split, data_files=list(which.files) or None
        )
    # The last two: a repository that lacks the config or split, and one that is not there.
    except (OSError, httpx.HTTPError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"--data {name}: cannot load {place} from the Hugging Face hub ({reason}); check the "
            "network, or give --data a local file: JSON lines with question_id and turns"
        ) from error
    missing = [column for column in which.columns if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"--data {name}: {place} has no column {', '.join(missing)}, only "
            f"{', '.join(rows.column_names)}; give --data a local file instead"
        )
    # The others may be large: tests, say.
    return rows.select_columns(list(which.columns))


def _question(name: str, which: NamedSet, number: int, record: Record) -> Question:
    return Question(
        set=name,
        id=str(record[which.id] if which.id else number),
        category=str(record[which.category]) if which.category else "",
        turns=which.turns(record),
    )
