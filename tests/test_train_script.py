"""examples/train_smollm2.sh: which commands its stages run, with a stand-in for Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_smollm2.sh"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Writes its words to `called`; fails if they contain FAIL."""
    file = tmp_path / "python"
    file.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/called\ncase "$*" in *"$FAIL"*) exit 3 ;; esac\n'
    )
    file.chmod(0o755)
    return file


def run(python: Path, *words: str, fail: str = "no such word") -> tuple[int, str, list[str]]:
    called = python.parent / "called"
    called.write_text("")
    made = {"PYTHON": str(python), "RUN": str(python.parent / "run"), "TARGET": "target"}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words],
        capture_output=True,
        text=True,
        env=dict(os.environ) | made | {"FAIL": fail},
    )
    return done.returncode, done.stderr, called.read_text().splitlines()


def test_stages_in_turn(python: Path) -> None:
    words = ("--stages", "data,dart", "--tokens", "5", "--dart-minutes", "2", "--exclude", "x y")
    code, said, called = run(python, *words, "--sets", "z")
    assert code == 0
    assert [line.split()[2] for line in called] == ["data", "dart"]
    assert "--tokens 5 --minutes 8" in called[0]
    assert "--exclude x y --exclude z" in called[0]
    assert "--minutes 2" in called[1]
    assert called[1].endswith("-- --attention-backend triton --mem-fraction-static 0.3")
    assert [line.split(":")[0] for line in said.splitlines()] == ["stage data", "stage dart"]


def test_failed_stage_does_not_stop_the_others(python: Path) -> None:
    code, said, called = run(python, "--stages", "dart+domino,data", fail="train dart")
    assert code == 1
    assert said.splitlines()[-1] == "error: failed: dart"
    assert sorted(line.split()[2] for line in called) == ["dart", "data", "domino"]
    assert "stage dart" in (python.parent / "run" / "dart.log").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "data,head"], "no stage head"),
        (["--hours", "1"], "unknown option --hours"),
        (["--tokens"], "--tokens needs a value"),
    ],
)
def test_bad_options_run_nothing(python: Path, words: list[str], message: str) -> None:
    code, said, called = run(python, *words)
    assert (code, called) == (2, [])
    assert said == f"error: {message}\n"
