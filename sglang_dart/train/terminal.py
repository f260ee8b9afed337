"""What training commands say on the terminal: progress, and lines of the main process alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

terminal = Console(stderr=True)
# Without a terminal, progress is a line every so many seconds.
_QUIET_S = 10.0


def show_step(bar: Bar) -> Callable[[Any, float, Any], None]:
    """What a training loop calls after each step to move `bar`."""
    best = ""

    def show(progress: Any, done: float, scores: Any) -> None:
        nonlocal best
        if scores:
            hits = "/".join(f"{100 * hit:.0f}" for hit in scores.accuracy)
            best = f", held-out loss {scores.loss:.3f}, accuracy {hits} %"
        rate = progress.tokens / max(progress.seconds, 1e-9)
        bar.show(done, f"step {progress.step}, {rate:.0f} tok/s{best}")

    return show


class Bar:
    """A progress bar on a terminal, a line now and then elsewhere; only in the main process."""

    def __init__(self, name: str) -> None:
        self._bar = Progress(
            TextColumn(name),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=terminal,
            disable=not terminal.is_terminal or not is_main_process(),
        )
        self._task = self._bar.add_task("", total=1.0)
        self._said = -_QUIET_S

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: float, text: str) -> None:
        """Show the share done, 0 .. 1, and a text."""
        self._bar.update(self._task, completed=min(done, 1.0), description=text)
        now = self._bar.get_time()
        if self._bar.disable and is_main_process() and now - self._said >= _QUIET_S:
            self._said = now
            terminal.print(f"{100 * min(done, 1.0):5.1f} %  {text}", highlight=False)


def is_main_process() -> bool:
    """Whether this is the one process of a run that speaks."""
    return os.environ.get("RANK", "0") == "0"
