"""What is kept out of training data: evaluation sets, duplicates, empty and repetitive answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sglang_dart.exclusion import Exclusion


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
