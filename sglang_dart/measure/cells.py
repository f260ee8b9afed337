"""The cells of a sweep (an arm at a prompt set and a concurrency), and how one is measured."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_dart.measure.client import each, flush_cache, send_chat
from sglang_dart.measure.metrics import Acceptance
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import RawLog, Record

CELL, REQUEST = "cell", "request"


@dataclass(frozen=True)
class Place:
    """What a cell is about. repeat: 0-based; every repeat starts the servers anew."""

    arm: str
    repeat: int
    set: str
    concurrency: int


@dataclass
class Cell:
    """A finished cell: its place, what its line says, and its requests' or batches' records."""

    place: Place
    facts: Mapping[str, Any]
    parts: list[Record] = field(default_factory=list)


def finished(log: RawLog) -> dict[Place, Cell]:
    """The cells whose line stands. Parts of a cell that was cut short are left out."""
    parts: dict[tuple[Place, float], list[Record]] = {}
    cells: dict[Place, Cell] = {}
    for record in log.records:
        if "concurrency" not in record:
            continue
        place = Place(*(record[name] for name in Place.__dataclass_fields__))
        found = parts.setdefault((place, record["started"]), [])
        if record["record"] == CELL:
            cells[place] = Cell(place, record, found)
        else:
            found.append(record)
    return cells


def cell_records(
    place: Place, parts: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], started: float
) -> list[Record]:
    """The lines of a finished cell, its own last: only with it do the others count.

    started: seconds since 1970, which tell this attempt from one that was cut short.
    """
    where = asdict(place) | {"started": started}
    lines = [{"record": part["record"], **where} | dict(part) for part in parts]
    return [*lines, {"record": CELL, **where, **facts}]


@dataclass(frozen=True)
class Load:
    """What every request of a sweep asks for. Greedy at temperature 0; one user turn each."""

    new_tokens: int
    temperature: float = 0.0
    warmup_tokens: int = 32


def ask(
    url: str, questions: Sequence[Question], concurrency: int, load: Load
) -> list[dict[str, Any]]:
    """Warm the server up, empty its cache, then ask the questions; a record for each.

    `concurrency` requests are open at any time until the questions run out. A request that fails
    is recorded with its "error". Raises RuntimeError if all fail, or the cache is not emptied.
    """
    return asyncio.run(_ask(url, questions, concurrency, load))


async def _ask(
    url: str, questions: Sequence[Question], concurrency: int, load: Load
) -> list[dict[str, Any]]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600
    ) as client:

        async def run(
            asked: Sequence[Question], tokens: int, temperature: float
        ) -> list[dict[str, Any]]:
            start = time.perf_counter()
            sampling = {"temperature": temperature, "max_tokens": tokens}

            async def one(_: int, question: Question) -> dict[str, Any]:
                return await _request(client, question, sampling, start)

            return await each(asked, one, concurrency)

        # So many that a batch of this size has run, and compiled what it needs.
        first = itertools.islice(itertools.cycle(questions), concurrency)
        await run(list(first), load.warmup_tokens, load.temperature)
        await flush_cache(url)
        records = await run(questions, load.new_tokens, load.temperature)
    if all("error" in record for record in records):
        raise RuntimeError(f"{url}: no request succeeded: {records[0]['error']}")
    return records


async def _request(
    client: Any, question: Question, sampling: Mapping[str, Any], start: float
) -> dict[str, Any]:
    """Times are relative to the cell's first request."""
    import httpx
    from openai import OpenAIError

    record: dict[str, Any] = {
        "record": REQUEST,
        "question": question.id,
        "at_s": time.perf_counter() - start,
    }
    messages = [{"role": "user", "content": question.turns[0]}]
    # Ignored by templates without a thinking mode.
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    try:
        reply = await send_chat(client, messages, sampling, fields)
    except (OpenAIError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        return record | {"error": f"{type(error).__name__}: {reason}"}
    return record | {
        "prompt_tokens": reply.meta.get("prompt_tokens"),
        "tokens": reply.meta.get("completion_tokens", len(reply.ids)),
        "finish": reply.finish,
        "latency_s": reply.latency_s,
        "ttft_s": reply.ttft_s,
        "histogram": Acceptance.of(reply.meta).histogram,
    }
