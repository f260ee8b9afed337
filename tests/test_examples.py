"""Every example runs as it stands; those that ask a server share one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dart.demo import prepare_models
from sglang_dart.measure.server import Server, serve

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """What examples/serve_dart.sh starts, with the demo's models."""
    target, _ = prepare_models()
    launcher = ("bash", str(EXAMPLES / "serve_dart.sh"))
    flags = ("--max-total-tokens", "20000")
    with serve(target, flags, launcher=launcher, env={"PYTHON": sys.executable}) as running:
        yield running


def run(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words],
        capture_output=True,
        text=True,
        timeout=900,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_chat(server: Server) -> None:
    shown = run("chat.py", "--url", server.url, "--max-tokens", "16")
    assert "Paris" in shown
    length = re.search(r"accept length (\d\.\d\d) over \d+ rounds", shown)
    assert length
    assert float(length[1]) >= 1


def test_frontend(server: Server) -> None:
    shown = run("frontend.py", "--url", server.url)
    assert re.search(r"^points: ([0-9]|10)/10$", shown, re.MULTILINE)
    # Three branches were asked, and what they said came back into the conversation.
    assert shown.count("user: Note: ") == 3


def test_dartree() -> None:
    """The other launcher; the demo's drafter for it may be untrained."""
    target, _ = prepare_models("DARTREE")
    launcher = ("bash", str(EXAMPLES / "serve_dartree.sh"))
    environment = {"PYTHON": sys.executable, "VARIANT": "fixed"}
    with serve(target, ("--max-total-tokens", "20000"), launcher=launcher, env=environment) as it:
        assert "Paris" in run("chat.py", "--url", it.url, "--max-tokens", "16")


def test_offline() -> None:
    shown = run("offline.py", "--max-new-tokens", "12")
    assert "Paris" in shown
    assert len(re.findall(r"^\d+ tokens in [1-9]\d* rounds$", shown, re.MULTILINE)) == 3
