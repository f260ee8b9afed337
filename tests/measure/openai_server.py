"""A scripted stand-in for SGLang's OpenAI API, with an answer's length and pace to choose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.measure.scripted import listening


@dataclass
class ScriptedOpenAI:
    """Answers every chat with `tokens` tokens, one each `pace_s`; remembers what it was asked.

    histogram: of accepted drafts, as SGLang reports it. refuse: prompts that get an error.
    """

    tokens: int = 5
    pace_s: float = 0.002
    histogram: tuple[int, ...] = ()
    refuse: tuple[str, ...] = ()
    model: str = "scripted"
    log: list[str] = field(default_factory=list)
    """Prompts with their max_tokens, and "flush", in the order of arrival."""
    open: int = 0
    most_open: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """/v1/chat/completions, streamed."""
        body = await request.json()
        assert body["stream"]
        prompt = body["messages"][-1]["content"]
        self.bodies.append(body)
        self.log.append(f"{prompt} {body['max_tokens']}")
        if prompt in self.refuse:
            return web.json_response({"error": {"message": "too\nlong"}}, status=400)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._stream(request, min(self.tokens, body["max_tokens"]))
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, count: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(count):
            await asyncio.sleep(self.pace_s)
            finish = "length" if index == count - 1 else None
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
            await self._send(response, {"choices": [choice]})
        details = {"spec_correct_drafts_histogram": list(self.histogram)}
        extension = {"output_ids": [list(range(count))], "spec_tokens_details": details}
        await self._send(response, {"choices": [], "sglext": extension})
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        common = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": self.model}
        await response.write(f"data: {json.dumps(common | event)}\n\n".encode())

    async def flush(self, _: web.Request) -> web.Response:
        """/flush_cache; refused while a request runs, as SGLang does."""
        self.log.append("flush")
        return web.Response(status=400 if self.open else 200)

    async def info(self, _: web.Request) -> web.Response:
        """/server_info."""
        state = {"model_path": self.model, "memory_usage": {"token_capacity": 99, "weight": 1.5}}
        return web.json_response({"version": "0.5.23", "internal_states": [state]})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its URL for the length of the block."""
        posts = {"/v1/chat/completions": self.chat, "/flush_cache": self.flush}
        with listening(posts, {"/server_info": self.info}) as url:
            yield url
