"""Texts that overlap with an evaluation set are found, whatever their case and punctuation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dart.exclusion import Exclusion

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
    for line in ('{"question": "x"}', '{"turns": "one text"}', "[1]", "turns"):
        path.write_text(f"\n{line}\n")
        with pytest.raises(ValueError, match=r"eval.jsonl:2: expected a JSON object with `turns`"):
            Exclusion.from_files([path])


def test_texts_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    turns = ["one\u2028line separator stands in this question", "?!", 7]
    path.write_text(json.dumps({"turns": turns, "reference": None}, ensure_ascii=False))
    exclusion = Exclusion.from_files([path])
    assert exclusion.hits("One line separator stands in this question.")
    # A text without words is like no question.
    assert not exclusion.hits("...")
