"""A plug-in for tests: every round takes the next width that fits, whatever it costs and brings."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

CHOSEN = "CYCLING_CHOSEN"


class Cycling:
    """Has the servers that are started from now on load the plug-in, as if it were installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        info = folder / "cycling-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cycling\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\ncycling = tests.engine.cycling:register\n"
        )
        # The processes of an engine take over the search path of the one that starts them.
        monkeypatch.syspath_prepend(str(folder))
        self._chosen = folder / "chosen"
        monkeypatch.setenv(CHOSEN, str(self._chosen))

    def widths(self) -> set[int]:
        """Those of all rounds so far."""
        return set(map(int, self._chosen.read_text().split()))


def register() -> None:
    """SGLang calls it in every process."""
    from sglang_dart.tree.budget import AdaptiveWidth

    turn = itertools.count()

    def choose(self: AdaptiveWidth, requests: int) -> int:
        fitting = [w for w in self.widths if w == 1 or self._fits(requests, w)]
        width = fitting[next(turn) % len(fitting)]
        with open(os.environ[CHOSEN], "a") as file:
            print(width, file=file)
        return width

    AdaptiveWidth.choose = choose  # type: ignore[method-assign]
    AdaptiveWidth.resting = property(lambda self: False)  # type: ignore[assignment]
