"""Prompt sets, by name or JSON lines {"question_id", "category", "turns"}, and their token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dart.measure.named_sets import NAMED, load_named
from sglang_dart.measure.question import Question


def set_name(source: str) -> str:
    """What the set is called that `--data` names: a name of ours, or the stem of a file."""
    return source if source in NAMED else Path(source).stem


def load_questions(
    sources: Iterable[str], limit: int | None = None, seed: int = 0
) -> list[Question]:
    """Read prompt sets, each a name of `named_sets.NAMED` or a file.

    `limit` takes that many of each, chosen by `seed`; of a file in its order, and all by default.
    Raises ValueError, naming file and line, if a line is no question or a file holds none; and for
    a set that cannot be loaded.
    """
    questions: list[Question] = []
    for source in sources:
        if source in NAMED:
            questions += load_named(source, limit, seed)
            continue
        found = _read(Path(source))
        if limit is not None and limit < len(found):
            chosen = random.Random(seed).sample(range(len(found)), limit)
            found = [found[index] for index in sorted(chosen)]
        questions += found
    if not questions:
        raise ValueError("no question to ask: give --data FILE or NAME, and at least 1 of each")
    return questions


def _read(file: Path) -> list[Question]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ValueError(
            f"--data {file}: no such file, and no set of that name; the names are "
            f"{', '.join(NAMED)}; a file has JSON lines with question_id and turns"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot read it as UTF-8 text ({error})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            turns = item["turns"]
            if not turns or not all(isinstance(turn, str) for turn in turns):
                raise TypeError("turns")
            question = Question(
                file.stem, str(item["question_id"]), str(item.get("category", "")), tuple(turns)
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{file}:{number}: expected {{"question_id", "category", "turns": [text, ...]}}, '
                f"got {line[:60]!r}"
            ) from error
        found.append(question)
    if not found:
        raise ValueError(f"{file}: holds no question")
    return found


def shuffled(questions: Sequence[Question], seed: int = 0) -> list[Question]:
    """The questions of all sets mixed, so that long and short prompts run side by side."""
    mixed = list(questions)
    random.Random(seed).shuffle(mixed)
    return mixed


def load_tokenizer(model: str | Path) -> Any:
    """The model's tokenizer. Raises ValueError if it cannot be loaded or has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{model}: cannot load its tokenizer ({reason})") from error
    if not tokenizer.chat_template:
        raise ValueError(f"{model}: its tokenizer has no chat template")
    return tokenizer


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the answer starts, thinking off."""
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        # Templates without a thinking mode ignore it.
        enable_thinking=False,
    )
