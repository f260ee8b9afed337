"""What the target is asked: prompts from files, or the start of a question to write itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]
_MARK = "SGLANGDARTMARK"


@dataclass(frozen=True)
class Job:
    """One conversation to produce.

    messages: what comes before the first answer, and further user turns; None lets the target
    write the question, which begins with `opening`. temperature: of the answers.
    """

    messages: tuple[Message, ...] | None
    opening: str
    temperature: float
    source: str


def read_prompts(files: Iterable[Path]) -> list[tuple[Message, ...]]:
    """Read conversations from JSON lines or parquet.

    A record has `messages` (a list of {role, content}; answers in it are dropped, since the target
    gives its own), `turns` (a list of user texts) or `text` (one user text).
    Raises ValueError naming file and record.
    """
    found = []
    for path in files:
        for number, record in enumerate(_records(path), start=1):
            try:
                found.append(_conversation(record))
            except (KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}: record {number}: expected `messages`, `turns` or `text`, "
                    f"got {str(record)[:60]!r}"
                ) from error
    if not found:
        raise ValueError("the prompt files hold no prompt")
    return found


def _records(path: Path) -> Iterable[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected JSON lines in UTF-8 ({error})") from error


def _conversation(record: Any) -> tuple[Message, ...]:
    if record.get("messages"):
        messages = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
        kept = tuple(message for message in messages if message["role"] in ("system", "user"))
    else:
        turns = record["turns"] if record.get("turns") else [record["text"]]
        kept = tuple({"role": "user", "content": turn} for turn in turns)
    if not all(isinstance(m["content"], str) for m in kept) or not any(
        m["role"] == "user" for m in kept
    ):
        raise TypeError("no user text")
    return kept


def shard_jobs(
    shard: int,
    size: int,
    *,
    prompts: Sequence[tuple[Message, ...]] | None,
    openings: Sequence[str],
    opening_share: float,
    temperatures: Sequence[float],
    seed: int,
) -> list[Job]:
    """The jobs of one shard: the same arguments give the same jobs. Empty past the last prompt."""
    rng = random.Random(f"{seed}/{shard}")
    if prompts is not None:
        chosen = prompts[shard * size : (shard + 1) * size]
        return [Job(messages, "", rng.choice(temperatures), "file") for messages in chosen]
    jobs = []
    for _ in range(size):
        led = bool(openings) and rng.random() < opening_share
        opening = rng.choice(openings) if led else ""
        jobs.append(Job(None, opening, rng.choice(temperatures), "opening" if led else "sampled"))
    return jobs


def user_header(tokenizer: Any) -> tuple[list[int], int | None]:
    """What the chat template puts before the user's text, and the token that ends the user's turn.

    Raises ValueError if the template marks neither the end of a user's turn nor the start of an
    answer: questions could not be told from answers.
    """

    def render(answer_next: bool) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}],
            tokenize=False,
            add_generation_prompt=answer_next,
            enable_thinking=False,
        )

    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template")
    before, mark, after = render(False).partition(_MARK)
    if not mark:
        raise ValueError("the chat template does not show the user's text as it is")
    if not after.strip() or render(True) == before + mark + after:
        raise ValueError(
            "the chat template has no markers: nothing ends the user's turn or starts the answer, "
            "so answers cannot be told from prompts; use a template with a generation prompt"
        )
    end = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"][0]
    special = end in tokenizer.all_special_ids
    return tokenizer(before, add_special_tokens=False)["input_ids"], end if special else None
