"""The `sglang-dart` command: one subcommand a tool, each imported only when it is called.

A tool is a module with a typer application `app`; `python -m sglang_dart.<name>` runs it as well.
Its last stdout line is one JSON object; a user's error is one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

# Name: the module of its application, and what it does.
TOOLS = {
    "demo": (
        "sglang_dart.demo",
        "Serve a small model with and without speculation and ask it a few questions.",
    ),
    "doctor": (
        "sglang_dart.doctor",
        "Check versions, hardware, the hooks into SGLang, and a drafter's fit to its target.",
    ),
    "ngram": ("sglang_dart.ngram", "Build, convert, inspect, prune and query n-gram models."),
    "train": ("sglang_dart.train.cli", "Make data with a target, train a drafter on it."),
    "eval": (
        "sglang_dart.eval",
        "Measure accept length, or compare every token with plain decoding.",
    ),
    "sweep": (
        "sglang_dart.sweep",
        "Measure throughput and latency of several algorithms side by side.",
    ),
    "trace": (
        "sglang_dart.trace",
        "Show a generation round by round, every tree with what was accepted, as one HTML page.",
    ),
}
# Whatever base class of usage errors this typer has, its own click or the click package.
_UsageError: Any = typer.BadParameter.__base__


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        _print_tools()
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("sglang-dart"))
        return 0
    if words[0] not in TOOLS:
        return _refuse(f"no tool {words[0]!r}; there are: {', '.join(TOOLS)}")
    module = importlib.import_module(TOOLS[words[0]][0])
    return run_tool(module.app, f"sglang-dart {words[0]}", words[1:])


def run_tool(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a tool and turn errors into one line. Under `python -X dev` they keep their traceback.

    ValueError, RuntimeError and OSError are the user's or the environment's (exit code 2); a tool
    raises typer.Exit(1) if it ran and found something wrong.
    """
    # Servers that a tool started are stopped by its `finally` blocks, so a termination unwinds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(words, prog_name=name, standalone_mode=False)
    except _UsageError as error:
        return _refuse(f"{error.format_message()} (see {name} --help)")
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except (ValueError, RuntimeError, OSError) as error:
        if sys.flags.dev_mode:
            raise
        return _refuse(" ".join(str(error).split()) or type(error).__name__)
    return code if isinstance(code, int) else 0


def emit(result: Mapping[str, Any]) -> None:
    """Print a tool's result as the last line of stdout."""
    sys.stdout.flush()
    print(json.dumps(result), flush=True)


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _print_tools() -> None:
    table = Table("tool", "what it does", title="sglang-dart TOOL [OPTIONS]", title_justify="left")
    for name, (_, what) in TOOLS.items():
        table.add_row(name, what)
    Console().print(table)
    print("Help on one: sglang-dart TOOL --help")


if __name__ == "__main__":
    sys.exit(main())
