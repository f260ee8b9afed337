import json
from pathlib import Path

import pytest

from sglang_dart.measure.datasets import load_questions, shuffled


def write(path: Path, count: int) -> str:
    lines = (
        json.dumps({"question_id": n, "category": "c", "turns": [f"ask {n}", "again"]})
        for n in range(count)
    )
    path.write_text("\n".join(lines) + "\n\n")
    return str(path)


def test_reads_sets_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.jsonl", 2), write(tmp_path / "a.jsonl", 1)]
    questions = load_questions(files)
    assert [(q.set, q.id) for q in questions] == [("b", "0"), ("b", "1"), ("a", "0")]
    assert questions[1].turns == ("ask 1", "again")


def test_subset_is_seeded_and_keeps_file_order(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", 50)
    first = [q.id for q in load_questions([file], 10, seed=1)]
    assert first == [q.id for q in load_questions([file], 10, seed=1)]
    assert first != [q.id for q in load_questions([file], 10, seed=2)]
    assert first == sorted(first, key=int)
    assert len(load_questions([file], 99)) == 50


def test_shuffled_keeps_all(tmp_path: Path) -> None:
    questions = load_questions([write(tmp_path / "set.jsonl", 30)])
    mixed = shuffled(questions)
    assert mixed != questions
    assert sorted(mixed, key=lambda q: int(q.id)) == questions
    assert mixed == shuffled(questions)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        '{"question_id": 1, "turns": []}',
        '{"question_id": 1, "turns": [2]}',
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question_id": 0, "turns": ["ok"]}\n' + line)
    with pytest.raises(ValueError, match=r"bad.jsonl:2: expected"):
        load_questions([str(file)])


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.jsonl: no such file"):
        load_questions([str(tmp_path / "absent.jsonl")])
    with pytest.raises(ValueError, match=r"gsm9k: .*the names are gsm8k, math500, .*; a file has"):
        load_questions(["gsm9k"])
    with pytest.raises(ValueError, match=r"cannot read"):
        load_questions([str(tmp_path)])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no question"):
        load_questions([str(tmp_path / "empty.jsonl")])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        load_questions([str(tmp_path / "binary.jsonl")])
    with pytest.raises(ValueError, match="--data"):
        load_questions([])
