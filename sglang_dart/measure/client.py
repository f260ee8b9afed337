"""Drive a running server at a given concurrency and time every answer.

Two doors: `generate` sends token ids to SGLang's own /generate, `chat` sends messages to the OpenAI
API. Both return replies in the order of the requests.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# A request may wait behind others for long; a dead server closes the connection at once.
_TIMEOUT = aiohttp.ClientTimeout(total=3600, sock_connect=10)

Item = TypeVar("Item")
Result = TypeVar("Result")


class RequestError(RuntimeError):
    """The server refused or dropped a request: one line with its status and message."""


@dataclass(frozen=True)
class Request:
    """A prompt for /generate.

    input_ids: prompt token ids. sampling: SGLang's `sampling_params`. fields: further top-level
    fields of the request, such as `return_logprob`.
    """

    input_ids: Sequence[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One answer.

    finish: SGLang's finish type ("stop", "length", "abort"). ttft_s: seconds to the first token,
    None if the answer was not streamed. meta: SGLang's `meta_info` as it came.
    """

    ids: tuple[int, ...]
    text: str
    finish: str
    latency_s: float
    ttft_s: float | None
    meta: Mapping[str, Any]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None if unknown."""
        if self.ttft_s is None or len(self.ids) < 2:
            return None
        return (self.latency_s - self.ttft_s) / (len(self.ids) - 1)


def generate(
    url: str,
    requests: Iterable[Request],
    concurrency: int = 1,
    stream: bool = False,
    on_reply: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """Send `requests` to /generate, at most `concurrency` at a time, first come first served.

    stream=True also times the first token. `on_reply(index, reply)` is called as each one ends.
    Raises RequestError at the first refusal.
    """

    async def run() -> list[Reply]:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:

            async def one(index: int, request: Request) -> Reply:
                reply = await send(session, url, request, stream)
                if on_reply:
                    on_reply(index, reply)
                return reply

            return await each(requests, one, concurrency)

    return asyncio.run(run())


def chat(
    url: str,
    conversations: Iterable[Sequence[Mapping[str, str]]],
    sampling: Mapping[str, Any],
    concurrency: int = 1,
) -> list[Reply]:
    """Stream each conversation's next answer from the OpenAI API.

    conversations: lists of {"role", "content"}. sampling: arguments of chat.completions.create.
    Raises openai.APIError as the client does.
    """
    from openai import AsyncOpenAI

    async def run() -> list[Reply]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one(_: int, messages: Sequence[Mapping[str, str]]) -> Reply:
                return await send_chat(client, messages, sampling)

            return await each(conversations, one, concurrency)

    return asyncio.run(run())


async def send_chat(
    client: AsyncOpenAI,
    messages: Sequence[Mapping[str, str]],
    sampling: Mapping[str, Any],
    fields: Mapping[str, Any] | None = None,
) -> Reply:
    """Stream one answer from the OpenAI API.

    sampling: arguments of chat.completions.create. fields: further fields of the request's body.
    The reply's `meta` holds the counts of tokens and SGLang's figures of speculation. Raises
    openai.APIError, or httpx.HTTPError if the stream breaks.
    """
    start = time.perf_counter()
    first: float | None = None
    text, finish = "", ""
    extension: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        # SGLang's own fields: the ids, and what its log calls accept length and histogram.
        "extra_body": {
            "return_output_ids_in_sglext": True,
            "return_spec_tokens_details": True,
            **(fields or {}),
        },
        **sampling,
    }
    stream = await client.chat.completions.create(**arguments)
    async for chunk in stream:
        extension |= (chunk.model_extra or {}).get("sglext") or {}
        if chunk.usage:
            usage = chunk.usage.model_dump(include={"prompt_tokens", "completion_tokens"})
        for choice in chunk.choices:
            if choice.delta.content and first is None:
                first = time.perf_counter()
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    end = time.perf_counter()
    return Reply(
        ids=tuple((extension.get("output_ids") or [[]])[0]),
        text=text,
        finish=finish,
        latency_s=end - start,
        ttft_s=None if first is None else first - start,
        meta=usage | (extension.get("spec_tokens_details") or {}),
    )


def server_facts(url: str) -> dict[str, Any]:
    """What a server says about itself: "model", "version", "memory" (GB) and "kv_tokens".

    Raises RequestError if no SGLang server answers there.
    """
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as response:
            info = json.load(response)
        state = info["internal_states"][0]
        return {
            "model": state["model_path"],
            "version": info["version"],
            "memory": state["memory_usage"],
            "kv_tokens": state["memory_usage"]["token_capacity"],
        }
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"{url}: no SGLang server answers there ({error!r})") from error


async def flush_cache(url: str) -> None:
    """Empty the server's prefix cache, and what NGRAM has learnt, once no request runs.

    Raises RequestError if it does not.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.post(f"{url}/flush_cache", params={"timeout": "60"}) as response,
        ):
            if response.status != 200:
                text = _message(await response.text())
                raise RequestError(f"{url}/flush_cache: HTTP {response.status}: {text}")
    except aiohttp.ClientError as error:
        raise RequestError(f"{url}: {type(error).__name__}: {error}") from error


async def each(
    items: Iterable[Item], work: Callable[[int, Item], Awaitable[Result]], concurrency: int
) -> list[Result]:
    """Await work(index, item) for all items, at most `concurrency` at a time, in their order."""
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency}: must be at least 1")
    queue = iter(list(enumerate(items)))
    results: dict[int, Result] = {}

    async def worker() -> None:
        for index, item in queue:
            results[index] = await work(index, item)

    tasks = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        # After the first error, nobody waits for the others.
        for task in tasks:
            task.cancel()
    return [results[index] for index in sorted(results)]


async def send(
    session: aiohttp.ClientSession, url: str, request: Request, stream: bool = False
) -> Reply:
    """Send one request to /generate."""
    body = {
        "input_ids": list(request.input_ids),
        "sampling_params": dict(request.sampling),
        "stream": stream,
        **request.fields,
    }
    start = time.perf_counter()
    first: float | None = None
    answer: dict[str, Any] = {}
    ids: list[int] = []
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                raise RequestError(f"HTTP {response.status}: {_message(await response.text())}")
            if not stream:
                answer = await response.json()
                ids = answer.get("output_ids", [])
            else:
                async for answer in _events(response):
                    if "error" in answer:
                        raise RequestError(_message(json.dumps(answer)))
                    if first is None:
                        first = time.perf_counter()
                    ids = _joined(ids, answer)
    except aiohttp.ClientError as error:
        raise RequestError(f"{url}: {type(error).__name__}: {error}") from error
    end = time.perf_counter()
    meta = answer["meta_info"]
    return Reply(
        ids=tuple(ids),
        text=answer.get("text", ""),
        finish=(meta.get("finish_reason") or {}).get("type", ""),
        latency_s=end - start,
        ttft_s=None if first is None else first - start,
        meta=meta,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[len(b"data: ") :])


def _joined(ids: list[int], answer: Mapping[str, Any]) -> list[int]:
    # A chunk holds all ids so far, or only the new ones under --incremental-streaming-output.
    chunk = list(answer.get("output_ids", []))
    if len(chunk) == answer["meta_info"]["completion_tokens"]:
        return chunk
    return ids + chunk


def _message(text: str) -> str:
    """The message inside an error body, on one line."""
    try:
        error = json.loads(text).get("error", text)
        text = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    except (json.JSONDecodeError, AttributeError):
        pass
    return " ".join(text.split())[:500]
