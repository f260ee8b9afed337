"""A client of one server: plain HTTP, JSON in and out."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 300.0


class Api:
    """`url` has no slash at the end; `log` is what the server prints."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body, parsed where it is JSON."""
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and body, parsed where it is JSON."""
        return self._send(self._request(path, body))

    def generate(self, body: dict[str, Any]) -> Any:
        """The answer, or the answers if `body` is a batch."""
        status, answer = self.post("/generate", body)
        assert status == 200, answer
        return answer

    def at_once(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers of requests that are sent at the same time."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.generate, bodies))

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed answer; leaving the block early hangs up."""
        request = self._request(path, body | {"stream": True})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            lines = (line.strip() for line in response)
            data = (line.removeprefix(b"data: ") for line in lines if line)
            yield (json.loads(event) for event in data if event != b"[DONE]")

    def used_slots(self) -> int:
        """KV slots in use, those of cached prefixes not counted."""
        status, load = self.get("/v1/loads")
        assert status == 200
        return sum(rank["num_used_tokens"] for rank in load["loads"])

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        return urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError:
        return data.decode()
