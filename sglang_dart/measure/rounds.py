"""What a decode round costs: time, of batches of random prompts, that does not depend on prefill.

A batch is asked for a short answer and for a long one. The difference of the two times over the
difference in rounds is the time of a round, for prefill, HTTP and start-up are in both. Without
speculation a round is a plain step.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import random
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dart.measure.cells import Cell, Place
from sglang_dart.measure.client import RequestError, flush_cache
from sglang_dart.measure.metrics import Acceptance
from sglang_dart.measure.report import Record
from sglang_dart.measure.throughput import Spread, ratios

BATCH = "batch"
_SHORT_ROUNDS = 16
_TIMEOUT_S = 3600


@dataclass(frozen=True)
class RoundLoad:
    """prompt_tokens: of each prompt. rounds: by which the long answers exceed the short ones.
    pairs: short and long batches in a cell."""

    vocabulary: int
    prompt_tokens: int
    rounds: int
    pairs: int = 3


def time_rounds(
    url: str, batch: int, accept_length: float, load: RoundLoad
) -> list[dict[str, Any]]:
    """Records of `pairs` short and long batches, after one of each that is not kept.

    accept_length: about how many tokens a round commits, 1 for plain decoding.
    Raises RequestError.
    """
    records: list[dict[str, Any]] = []
    for pair in range(load.pairs + 1):
        for kind, rounds in (("short", _SHORT_ROUNDS), ("long", _SHORT_ROUNDS + load.rounds)):
            # New prompts, so that nothing stands in the prefix cache.
            prompts = _prompts(batch, load, seed=2 * pair + (kind == "long"))
            asyncio.run(flush_cache(url))
            tokens = 1 + math.ceil(rounds * accept_length)
            seconds, replies = _generate(url, prompts, tokens)
            if pair:
                records.append(_record(pair - 1, kind, seconds, replies))
    return records


def _prompts(batch: int, load: RoundLoad, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [dice.choices(range(load.vocabulary), k=load.prompt_tokens) for _ in range(batch)]


def _generate(
    url: str, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, list[Mapping[str, Any]]]:
    """Seconds, and SGLang's `meta_info` of each answer."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"{url}/generate", data=body, headers={"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answers = json.load(response)
    except urllib.error.HTTPError as error:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
        raise RequestError(f"{url}/generate: HTTP {error.code}: {text}") from error
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{url}/generate: {error!r}") from error
    seconds = time.perf_counter() - start
    replies = [answer["meta_info"] for answer in answers]
    short = [reply for reply in replies if reply["completion_tokens"] != tokens]
    if short:
        raise RequestError(f"{url}: an answer ended early: {short[0].get('finish_reason')}")
    return seconds, replies


def _record(
    pair: int, kind: str, seconds: float, replies: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    parts = [Acceptance.of(reply) for reply in replies]
    together = sum(parts, Acceptance())
    # The requests of a batch advance together: the last one saw every round.
    rounds = max(part.rounds for part in parts)
    if not together.rounds:
        rounds = max(reply["completion_tokens"] for reply in replies) - 1
    return {
        "record": BATCH,
        "pair": pair,
        "answers": kind,
        "seconds": seconds,
        "rounds": rounds,
        "tokens": [reply["completion_tokens"] for reply in replies],
        "histogram": together.histogram,
    }


@dataclass(frozen=True)
class RoundRow:
    """An arm at a batch size, all repeats together.

    round_ms: of a round, or of a plain step. ratio: to the plain step of the same repeat. tau:
    tokens a round, simulated. tokens_per_s: batch * tau / round. to_plain: of tokens_per_s.
    projected: published accept length / ratio; None without one.
    """

    arm: str
    batch: int
    repeats: int
    round_ms: Spread
    ratio: Spread | None
    tau: float
    tokens_per_s: Spread
    to_plain: Spread | None
    published: float | None
    projected: Spread | None


def round_s(cell: Cell) -> float:
    """Seconds of a round: the median over the cell's pairs."""
    short, long = (
        {part["pair"]: part for part in cell.parts if part["answers"] == kind}
        for kind in ("short", "long")
    )
    return statistics.median(
        (long[pair]["seconds"] - short[pair]["seconds"])
        / (long[pair]["rounds"] - short[pair]["rounds"])
        for pair in long
    )


def tau(parts: Sequence[Record]) -> float:
    """Tokens a round; 1 for plain decoding."""
    length = sum((Acceptance(part["histogram"]) for part in parts), Acceptance()).length
    return 1.0 if length is None else length


def round_rows(
    cells: Mapping[Place, Cell], published: Mapping[str, float | None]
) -> list[RoundRow]:
    """All rows, by batch. published: accept length by arm."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for place, cell in cells.items():
        groups.setdefault((place.concurrency, place.arm), []).append(cell)
    return [
        _row(group, cells, published.get(arm))
        for (_, arm), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _row(group: Sequence[Cell], cells: Mapping[Place, Cell], published: float | None) -> RoundRow:
    place = group[0].place
    ratio = ratios(group, cells, round_s)
    projected = [published / value for value in ratio] if published is not None else []
    round_ms = Spread.of([1e3 * round_s(cell) for cell in group])
    speed = Spread.of([_tokens_per_s(cell) for cell in group])
    assert round_ms is not None
    assert speed is not None
    return RoundRow(
        arm=place.arm,
        batch=place.concurrency,
        repeats=len(group),
        round_ms=round_ms,
        ratio=Spread.of(ratio),
        tau=tau([part for cell in group for part in cell.parts]),
        tokens_per_s=speed,
        to_plain=Spread.of(ratios(group, cells, _tokens_per_s)),
        published=published,
        projected=Spread.of(projected),
    )


def _tokens_per_s(cell: Cell) -> float:
    return cell.place.concurrency * tau(cell.parts) / round_s(cell)
