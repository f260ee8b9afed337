"""What is kept out of training data: evaluation sets, duplicates, empty and repetitive answers."""

from __future__ import annotations

import json
import re
from collections import Counter
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
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: cannot read it as UTF-8 text ({error})") from error
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    found = [*record["turns"], *(record.get("reference") or [])]
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}:{number}: expected a JSON object with `turns`, got {line[:60]!r}"
                    ) from error
                texts += [text for text in found if isinstance(text, str)]
        return cls(texts)

    def hits(self, prompt: str, answer: str) -> bool:
        """Does this conversation overlap with an evaluation text?"""
        asked = words(prompt)
        if tuple(asked) in self._short:
            return True
        return any(gram in self._grams for gram in _grams(asked + words(answer)))


def _grams(sequence: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(sequence[offset:] for offset in range(GRAM)), strict=False)


class Sieve:
    """Decides on each conversation in turn and counts what it refuses, by reason."""

    def __init__(self, exclusion: Exclusion, *, min_tokens: int, min_distinct: float) -> None:
        """min_tokens: shortest answer. min_distinct: lowest share of distinct 4-grams of tokens."""
        self.refused: Counter[str] = Counter()
        self._exclusion = exclusion
        self._min_tokens, self._min_distinct = min_tokens, min_distinct
        self._seen: set[int] = set()

    def remember(self, prompt_ids: Sequence[int]) -> None:
        """Count a prompt as seen."""
        self._seen.add(hash(tuple(prompt_ids)))

    def keeps(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], prompt: str, answer: str):
        """Is this conversation to be trained on? If not, the reason is counted."""
        reason = self._reason(prompt_ids, answer_ids, prompt, answer)
        if reason:
            self.refused[reason] += 1
        else:
            self.remember(prompt_ids)
        return reason is None

    def _reason(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], prompt: str, answer: str
    ) -> str | None:
        if not prompt.strip() or len(answer_ids) < self._min_tokens:
            return "empty"
        if hash(tuple(prompt_ids)) in self._seen:
            return "duplicate"
        if distinct_share(answer_ids) < self._min_distinct:
            return "repetitive"
        if self._exclusion.hits(prompt, answer):
            return "evaluation overlap"
        return None


def distinct_share(ids: Sequence[int], size: int = 4) -> float:
    """Distinct n-grams / n-grams of a sequence; 1 for one too short to have any."""
    grams = list(zip(*(ids[offset:] for offset in range(size)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0
