"""The client against a scripted HTTP server."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from aiohttp import web

from sglang_dart.measure.client import Request, RequestError, generate
from tests.measure.scripted import listening


class ScriptedServer:
    """Answers /generate with prompt ids + 1, and remembers the highest number of open requests."""

    def __init__(self, incremental: bool = False) -> None:
        self.incremental = incremental
        self.open = self.most_open = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0.02)
            if body["input_ids"] == [0]:
                error = {"error": {"message": "token 0\nis refused"}}
                return web.json_response(error, status=400)
            ids = [token + 1 for token in body["input_ids"]]
            if body["stream"]:
                return await self.stream(request, ids)
            return web.json_response(self.chunk(ids, ids, len(ids)))
        finally:
            self.open -= 1

    async def stream(self, request: web.Request, ids: list[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in range(1, len(ids) + 1):
            chunk = ids[end - 1 : end] if self.incremental else ids[:end]
            event = json.dumps(self.chunk(chunk, ids, end))
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    def chunk(self, shown: list[int], ids: list[int], count: int) -> dict:
        finish = {"type": "length"} if count == len(ids) else None
        meta = {"finish_reason": finish, "completion_tokens": count, "cached_tokens": 3}
        return {"text": "x", "output_ids": shown, "meta_info": meta}


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(request.param)
    with listening({"/generate": scripted.answer}) as scripted.url:
        yield scripted


@pytest.mark.parametrize("stream", [False, True])
def test_replies_come_in_the_order_of_the_requests(server: ScriptedServer, stream: bool) -> None:
    seen: list[int] = []
    prompts = [[10 * n + 1, 10 * n + 2, 10 * n + 3] for n in range(7)]
    replies = generate(
        server.url, map(Request, prompts), 3, stream, lambda index, _: seen.append(index)
    )
    assert [list(reply.ids) for reply in replies] == [[t + 1 for t in p] for p in prompts]
    assert sorted(seen) == list(range(7))
    assert server.most_open == 3
    assert {reply.finish for reply in replies} == {"length"}
    assert replies[0].meta["cached_tokens"] == 3


def test_streaming_times_the_first_token(server: ScriptedServer) -> None:
    (reply,) = generate(server.url, [Request([1, 2, 3, 4])], stream=True)
    assert reply.ttft_s is not None
    assert reply.tpot_s is not None
    # One token every 10 ms after a first one that took 20 ms.
    assert reply.ttft_s >= 0.02
    assert 0.01 <= reply.tpot_s < reply.latency_s


def test_without_streaming_no_first_token_time(server: ScriptedServer) -> None:
    (reply,) = generate(server.url, [Request([1, 2])])
    assert reply.ttft_s is None
    assert reply.tpot_s is None


def test_refusal_is_one_line(server: ScriptedServer) -> None:
    with pytest.raises(RequestError, match="HTTP 400: token 0 is refused"):
        generate(server.url, [Request([0])])


def test_dead_server_is_named() -> None:
    with pytest.raises(RequestError, match=r"^http://127\.0\.0\.1:9: "):
        generate("http://127.0.0.1:9", [Request([1])])


def test_concurrency_must_be_positive() -> None:
    with pytest.raises(ValueError, match="concurrency 0"):
        generate("http://127.0.0.1:9", [Request([1])], concurrency=0)
