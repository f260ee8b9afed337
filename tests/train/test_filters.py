"""What stays out of training data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dart.train.filters import Exclusion, Sieve, distinct_share

QUESTION = (
    "Darrell and Allen have ages in the ratio of seven to eleven; their total age now is 162."
)


@pytest.fixture
def exclusion(tmp_path: Path) -> Exclusion:
    path = tmp_path / "eval.jsonl"
    records = [
        {"question_id": 1, "turns": [QUESTION, "And in ten years?"], "reference": ["r " * 13]},
        {"question_id": 2, "turns": ["Name three primary colours."]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return Exclusion.from_files([path])


@pytest.mark.parametrize(
    ("prompt", "answer", "hit"),
    [
        # 13 words in a row, whatever the case and the punctuation.
        ("x", "darrell AND allen, have ages in the ratio of seven to eleven, their!", True),
        ("x", "darrell and allen have ages in the ratio of seven to eleven", False),
        # Half in the prompt, half in the answer.
        ("Darrell and Allen have ages in the ratio", "of seven to eleven their total", True),
        ("name three primary colours", "Red.", True),
        ("Please name three primary colours", "Red.", False),
        ("x", "Name three primary colours.", False),
        ("x", "r " * 13, True),
    ],
)
def test_overlap_of_13_words(exclusion: Exclusion, prompt: str, answer: str, hit: bool) -> None:
    assert exclusion.hits(prompt, answer) is hit


def test_evaluation_file_must_have_turns(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"question": "x"}\n')
    with pytest.raises(ValueError, match=r"eval.jsonl:1: expected a JSON object with `turns`"):
        Exclusion.from_files([path])


def test_sieve_counts_every_reason(exclusion: Exclusion) -> None:
    sieve = Sieve(exclusion, min_tokens=4, min_distinct=0.5)
    fresh = list(range(20))
    assert sieve.keeps([1], fresh, "a", "b")
    assert not sieve.keeps([1], fresh, "a", "b")
    assert not sieve.keeps([2], [1, 2, 3], "a", "b")
    assert not sieve.keeps([3], fresh, " ", "b")
    assert not sieve.keeps([4], [5, 6] * 10, "a", "b")
    assert not sieve.keeps([5], fresh, "x", QUESTION)
    assert sieve.refused == {"duplicate": 1, "empty": 2, "repetitive": 1, "evaluation overlap": 1}


def test_distinct_share() -> None:
    assert distinct_share([1, 2, 3]) == 1.0
    assert distinct_share([7] * 8) == pytest.approx(1 / 5)
    assert distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(4 / 5)
