"""How far a measurement is, for those who wait."""

from __future__ import annotations

import sys
import time


class Progress:
    """Says on stderr how far an arm is, about every ten seconds."""

    def __init__(self) -> None:
        self.start = self.said = time.monotonic()

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self.said > 10:
            self.said = now
            self.say(f"{label}: {done} of {total} after {now - self.start:.0f} s")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
