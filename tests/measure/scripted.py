"""A scripted stand-in for SGLang's HTTP server, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def listening(
    handlers: dict[str, Handler], gets: dict[str, Handler] | None = None
) -> Iterator[str]:
    """Serve POST `handlers` and GET `gets` by path for the length of the block; gives the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_post(path, handler)
        for path, handler in (gets or {}).items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    runner = wait(start())
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        wait(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
