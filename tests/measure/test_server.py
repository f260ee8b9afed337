"""The server's life-cycle, with a stand-in for `sglang.launch_server` that has a stubborn child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_dart.measure.server import ServerError, failure_line, free_port, serve

STAND_IN = """
import argparse, http.server, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("--model-path", "--host", "--port", "--behave"):
    parser.add_argument(name, default="")
options = parser.parse_args()
print("flags", sys.argv[1:], "variable", os.environ.get("VARIABLE"), flush=True)
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore])
print("child", child.pid, flush=True)
if options.behave == "fail":
    child.kill()
    raise ValueError("drafter does not fit")
if options.behave == "hang":
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health_generate" else 404)
        self.end_headers()

http.server.HTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """Environment in which `python -m sglang.launch_server` is the stand-in."""
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    return {"PYTHONPATH": str(package.parent), "VARIABLE": "set"}


def child_pid(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def ended(pid: int) -> bool:
    """Whether a process is gone, given the moment that init needs to reap an orphan."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(timeout=5)
    return not psutil.pid_exists(pid)


def test_server_and_its_children_end_with_the_block(stand_in: dict[str, str]) -> None:
    waited: list[float] = []
    with serve("m", ["--behave", "serve"], env=stand_in, on_wait=waited.append) as server:
        text = server.log.read_text()
        assert "'--model-path', 'm'" in text
        assert "variable set" in text
        child = child_pid(server.log)
        assert psutil.pid_exists(child)
    assert waited
    assert ended(server.pid)
    # The child ignores SIGTERM.
    assert ended(child)
    assert not server.log.exists()


def test_an_error_in_the_block_ends_the_server_and_keeps_the_log(
    stand_in: dict[str, str],
) -> None:
    with pytest.raises(KeyError), serve("m", env=stand_in) as server:
        raise KeyError
    assert ended(server.pid)
    assert server.log.exists()
    server.log.unlink()


def test_failure_names_the_reason(stand_in: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError, match=r"code 1 .*: ValueError: drafter does not fit \(log: "),
        serve("m", ["--behave", "fail"], env=stand_in, log=log),
    ):
        pytest.fail("it never answered")
    assert ended(child_pid(log))


def test_refused_flag_is_the_reason(stand_in: dict[str, str], tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="unrecognized arguments: --bogus"),
        serve("m", ["--bogus"], env=stand_in, log=tmp_path / "log"),
    ):
        pytest.fail("it never answered")


def test_timeout_ends_the_server(stand_in: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError, match="did not answer within 1 s"),
        serve("m", ["--behave", "hang"], env=stand_in, log=log, timeout_s=1),
    ):
        pytest.fail("it never answered")
    assert ended(child_pid(log))


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_server_dies_with_a_killed_parent(stand_in: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from sglang_dart.measure.server import serve\n"
        f"with serve('m', log=Path({str(log)!r})) as server: print(server.pid, flush=True); "
        "time.sleep(600)"
    )
    path = os.pathsep.join([stand_in["PYTHONPATH"], *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = child_pid(log)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ended(pid)
    # The stand-in's child has no parent-death signal; SGLang's own children do.
    psutil.Process(child).kill()


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "it printed nothing"),
        ("loading\nready\n", "ready"),
        ("Traceback\n  x\nValueError: no\nshutting down\n", "ValueError: no"),
        ("sglang.Error: a\ntorch.cuda.OutOfMemoryError: b\n", "torch.cuda.OutOfMemoryError: b"),
        ("launch_server.py: error: bad flag\n", "launch_server.py: error: bad flag"),
    ],
)
def test_failure_line(tmp_path: Path, log: str, reason: str) -> None:
    (tmp_path / "log").write_text(log)
    assert failure_line(tmp_path / "log") == reason


def test_free_port_can_be_bound() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
