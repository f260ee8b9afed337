"""A real SGLang server for the length of a `with` block; nothing of it outlives the block."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
# Ends a Python traceback, or is argparse's refusal.
_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b|.*\berror: ).*")


class ServerError(RuntimeError):
    """The server did not start, or died: one line with the reason and the path of the log."""


@dataclass(frozen=True)
class Server:
    """A server that answers. `url` has no slash at the end."""

    url: str
    pid: int
    log: Path


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LAUNCHER = (sys.executable, "-m", "sglang.launch_server")


@contextmanager
def serve(
    model: str | Path,
    flags: Sequence[str] = (),
    *,
    launcher: Sequence[str] = LAUNCHER,
    port: int = 0,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout_s: float = 900.0,
    on_wait: Callable[[float], None] | None = None,
) -> Iterator[Server]:
    """Run `launcher` with the model's, the address's and these flags until the block ends.

    port 0 takes a free one. `env` is added to this process's environment. `log` receives what the
    server prints; without it a temporary file does, removed when the block ends without an error.
    `on_wait(elapsed_s)` is called about twice a second until the server answers.
    Raises ServerError if the process exits or does not answer within `timeout_s`.
    Call it from the main thread: the kernel kills the server when the calling thread dies.
    """
    port = port or free_port()
    path = log or _temporary_log()
    address = ("--host", "127.0.0.1", "--port", str(port))
    command = [*launcher, "--model-path", str(model), *address, *flags]
    with path.open("ab") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    server = Server(f"http://127.0.0.1:{port}", process.pid, path)
    try:
        _wait_until_healthy(server, process, timeout_s, on_wait)
        yield server
    finally:
        _stop(process)
    if log is None:
        path.unlink(missing_ok=True)


def failure_line(log: Path) -> str:
    """The line of a server log that says best why it ended."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.strip() for line in lines if _ERROR_LINE.match(line.strip())]
    return (errors or lines or ["it printed nothing"])[-1].strip()


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="sglang-dart-server-", suffix=".log")
    os.close(handle)
    return Path(name)


def _die_with_parent() -> None:
    # Runs in the child, so that even a killed parent leaves no server behind.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_healthy(
    server: Server,
    process: subprocess.Popen,
    timeout_s: float,
    on_wait: Callable[[float], None] | None,
) -> None:
    start = time.monotonic()
    while not _answers(f"{server.url}/health_generate"):
        code = process.poll()
        if code is not None:
            raise ServerError(
                f"server exited with code {code} while starting: {failure_line(server.log)} "
                f"(log: {server.log})"
            )
        elapsed = time.monotonic() - start
        if elapsed > timeout_s:
            raise ServerError(f"server did not answer within {timeout_s:.0f} s (log: {server.log})")
        if on_wait:
            on_wait(elapsed)
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen, patience_s: float = 15.0) -> None:
    """End the server: the launcher may take its leave, what it started may not outlive it."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
    # Most often everybody in the group has ended by now.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Those that left the group.
    _, alive = psutil.wait_procs(family, timeout=1)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=patience_s)
