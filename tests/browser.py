"""A real browser without a window, driven over its debugging socket."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import matplotlib.image
import numpy as np

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    # Containers run as root, where the sandbox refuses to start; the pages are our own.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)
WAIT_S = 60


def find_browser() -> str | None:
    """The first of the known programs that is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page at a time. requested: what it fetched; complaints: errors that it logged."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._count = 0

    def __enter__(self) -> Browser:
        self._loop = asyncio.new_event_loop()
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [self._program, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._loop.run_until_complete(self._connect())
        except BaseException:
            self.__exit__()
            raise
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_session"):
            self._loop.run_until_complete(self._session.close())
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.close()
        self._home.cleanup()

    def open(
        self, path: Path, width: int, height: int, *, scheme: str = "light", fragment: str = ""
    ) -> None:
        """Load a file into a window of this size, whose user prefers this colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media="", features=features)
        # From elsewhere, since another fragment of the same page loads nothing.
        for url in ("about:blank", path.as_uri() + (f"#{fragment}" if fragment else "")):
            self.requested, self.complaints = [], []
            self._call("Page.navigate", url=url)
            deadline = time.monotonic() + WAIT_S
            ready = "document.readyState === 'complete' && location.href"
            while not str(self.evaluate(ready)).startswith(url.split("#")[0]):
                assert time.monotonic() < deadline, f"{url} does not load"

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def print_media(self) -> None:
        """Lay the page out as for a printer."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def screenshot(self, path: Path | None = None) -> np.ndarray:
        """What the window shows, [height, width, 3 or 4] from 0 to 1."""
        data = base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])
        if path:
            path.write_bytes(data)
        return matplotlib.image.imread(io.BytesIO(data))

    async def _connect(self) -> None:
        port = Path(self._home.name) / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_S
        while not (port.exists() and len(port.read_text().splitlines()) == 2):
            assert self._process.poll() is None, f"{self._program} ended at once"
            assert time.monotonic() < deadline, f"{self._program} does not answer"
            await asyncio.sleep(0.05)
        self._session = aiohttp.ClientSession()
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        while True:
            async with self._session.get(address) as response:
                pages = [each for each in await response.json() if each["type"] == "page"]
            if pages:
                break
            assert time.monotonic() < deadline, f"{self._program} opens no page"
            await asyncio.sleep(0.05)
        self._socket = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=0
        )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._ask(method, parameters))

    async def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), WAIT_S)
            if message.get("id") == self._count:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(told["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
