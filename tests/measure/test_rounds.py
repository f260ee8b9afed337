"""Round times from batches of two lengths, against a scripted /generate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from sglang_dart.measure.cells import Cell, Place
from sglang_dart.measure.client import RequestError
from sglang_dart.measure.rounds import RoundLoad, round_rows, time_rounds
from tests.measure.scripted import listening


@dataclass
class LockstepServer:
    """Prefills in `prefill_s`, then commits `step` tokens to every request each `round_s`."""

    step: int = 1
    round_s: float = 0.004
    prefill_s: float = 0.05
    batches: list[list[list[int]]] = field(default_factory=list)
    flushed: int = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        assert sampling["ignore_eos"]
        if sampling["max_new_tokens"] > 1000:
            return web.json_response({"error": {"message": "too\nlong"}}, status=400)
        self.batches.append(body["input_ids"])
        rounds = -(-(sampling["max_new_tokens"] - 1) // self.step)
        end = time.monotonic() + self.prefill_s + rounds * self.round_s
        await asyncio.sleep(end - time.monotonic())
        meta: dict[str, Any] = {"completion_tokens": sampling["max_new_tokens"]}
        if self.step > 1:
            histogram = [0] * (self.step - 1) + [rounds]
            meta["spec_correct_drafts_histogram"] = histogram
        return web.json_response([{"meta_info": meta} for _ in body["input_ids"]])

    async def flush(self, _: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[tuple[LockstepServer, str]]:
    scripted = LockstepServer(step=request.param)
    posts = {"/generate": scripted.generate, "/flush_cache": scripted.flush}
    with listening(posts) as url:
        yield scripted, url


LOAD = RoundLoad(vocabulary=50, prompt_tokens=6, rounds=40, pairs=2)


@pytest.mark.parametrize("server", [1, 3], indirect=True)
def test_a_rounds_time_is_free_of_prefill(server) -> None:
    scripted, url = server
    records = time_rounds(url, 2, scripted.step, LOAD)
    assert [(r["pair"], r["answers"]) for r in records] == [
        *((0, "short"), (0, "long"), (1, "short"), (1, "long"))
    ]
    # New prompts each time, on an empty cache; the first pair warms up.
    assert scripted.flushed == len(scripted.batches) == 6
    assert len({str(batch) for batch in scripted.batches}) == 6
    assert {len(prompt) for batch in scripted.batches for prompt in batch} == {6}
    for short, long in zip(records[::2], records[1::2], strict=True):
        assert long["rounds"] - short["rounds"] == LOAD.rounds
        assert long["tokens"][0] - short["tokens"][0] == LOAD.rounds * scripted.step
    (row,) = round_rows(
        {cell.place: cell for cell in [Cell(Place("A", 0, "s", 2), {}, records)]}, {}
    )
    assert row.tau == scripted.step
    assert 3 < row.round_ms.median < 8
    assert row.tokens_per_s.median == pytest.approx(2 * scripted.step / row.round_ms.median * 1e3)
    assert row.ratio is None
    assert row.projected is None


@pytest.mark.parametrize("server", [1], indirect=True)
def test_a_refusal_is_one_line(server) -> None:
    with pytest.raises(RequestError, match=r"HTTP 400: .*too.*long"):
        time_rounds(server[1], 1, 100.0, LOAD)


def pair(seconds: float, rounds: int, histogram: list[int]) -> list[dict[str, Any]]:
    common = {"record": "batch", "pair": 0, "histogram": histogram}
    return [
        common | {"answers": "short", "seconds": 1.0, "rounds": 10},
        common | {"answers": "long", "seconds": 1.0 + seconds, "rounds": 10 + rounds},
    ]


def test_ratios_compare_within_a_repeat() -> None:
    cells = [
        Cell(Place("plain", 0, "s", 4), {}, pair(0.10, 10, [])),
        Cell(Place("plain", 1, "s", 4), {}, pair(0.20, 10, [])),
        Cell(Place("DART", 0, "s", 4), {}, pair(0.15, 10, [0, 0, 7])),
        Cell(Place("DART", 1, "s", 4), {}, pair(0.24, 10, [0, 0, 7])),
    ]
    rows = round_rows({cell.place: cell for cell in cells}, {"DART": 3.6, "plain": None})
    plain, dart = rows
    assert (plain.arm, plain.repeats, plain.ratio.median, plain.tau) == ("plain", 2, 1.0, 1.0)
    assert plain.round_ms.low == pytest.approx(10)
    assert plain.round_ms.high == pytest.approx(20)
    assert (dart.ratio.low, dart.ratio.high) == (pytest.approx(1.2), pytest.approx(1.5))
    assert dart.tau == 3
    assert dart.to_plain.high == pytest.approx(3 / 1.2)
    assert dart.projected.low == pytest.approx(3.6 / 1.5)
    assert dart.projected.high == pytest.approx(3.6 / 1.2)
