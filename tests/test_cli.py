"""The command line: lists its tools, refuses in one line, ends in one JSON object."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import typer

from sglang_dart import cli


def test_lists_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.TOOLS)


def test_unknown_tool_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dmeo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no tool 'dmeo'; there are: demo, ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", cli.TOOLS)
def test_every_tool_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"Usage: sglang-dart {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.TOOLS)
def test_every_tool_is_a_module(name: str) -> None:
    found = importlib.util.find_spec(f"sglang_dart.{name}")
    assert found
    if found.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"sglang_dart.{name}.__main__")


def test_importing_the_command_imports_no_tool() -> None:
    code = (
        "import sys, sglang_dart.cli\n"
        "heavy = {'torch', 'sglang', 'aiohttp', 'openai', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()

    @made.command()
    def tool(number: int = 0, fail: str = "") -> None:
        if fail == "value":
            raise ValueError("first\nsecond")
        if fail == "found":
            raise typer.Exit(1)
        if fail == "interrupt":
            raise KeyboardInterrupt
        if fail == "bug":
            raise AssertionError("a bug")
        cli.emit({"number": number})

    return made


def test_last_line_is_json(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_tool(app, "tool", ["--number", "3"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"number": 3}


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--fail", "value"], 2, "error: first second\n"),
        (["--fail", "found"], 1, ""),
        (["--fail", "interrupt"], 130, ""),
        (["--number", "x"], 2, "error: Invalid value for '--number'"),
        (["--bogus"], 2, "error: No such option: --bogus"),
    ],
)
def test_errors_are_one_line_and_a_code(
    app: typer.Typer, capsys: pytest.CaptureFixture[str], words: list[str], code: int, line: str
) -> None:
    assert cli.run_tool(app, "tool", words) == code
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == (1 if line else 0)


def test_bugs_keep_their_traceback(app: typer.Typer) -> None:
    with pytest.raises(AssertionError, match="a bug"):
        cli.run_tool(app, "tool", ["--fail", "bug"])
