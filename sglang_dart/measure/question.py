"""What is asked of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One conversation: the user's turns. `set` is what its set is called."""

    set: str
    id: str
    category: str
    turns: tuple[str, ...]
