"""Evaluation sets, found in texts that a drafter or an n-gram model is made from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

GRAM = 13
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-case words; punctuation and spacing do not count."""
    return _WORD.findall(text.lower())


class Exclusion:
    """Finds texts that share 13 consecutive words with an evaluation set.

    An evaluation text of fewer than 13 words matches a prompt that is equal to it, word for word.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()
        for text in texts:
            sequence = words(text)
            if not sequence:
                continue
            if len(sequence) < GRAM:
                self._short.add(tuple(sequence))
            else:
                self._grams.update(_grams(sequence))

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Exclusion:
        """Read JSON lines with `turns` and, optionally, `reference`: lists of texts.

        Raises ValueError naming file and line.
        """
        texts: list[str] = []
        for path in files:
            try:
                # Not splitlines(): JSON may hold a line separator (U+2028) as it is.
                lines = path.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: cannot read it as UTF-8 text ({error})") from error
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    turns, reference = record["turns"], record.get("reference") or []
                    if not isinstance(turns, list) or not isinstance(reference, list):
                        raise TypeError("not lists")
                except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(
                        f"{path}:{number}: expected a JSON object with `turns`, "
                        f"a list, got {line[:60]!r}"
                    ) from error
                texts += [text for text in (*turns, *reference) if isinstance(text, str)]
        return cls(texts)

    def hits(self, prompt: str, answer: str = "") -> bool:
        """Does this conversation, or this text alone, overlap with an evaluation text?"""
        asked = words(prompt)
        if tuple(asked) in self._short:
            return True
        return any(gram in self._grams for gram in _grams(asked + words(answer)))


def _grams(sequence: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(sequence[offset:] for offset in range(GRAM)), strict=False)
