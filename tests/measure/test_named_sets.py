"""Sets by name: stand-ins with the columns of the hub's, through the `datasets` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import httpx
import pytest

from sglang_dart.measure import named_sets
from sglang_dart.measure.datasets import load_questions
from sglang_dart.measure.named_sets import NAMED, load_named

BOXED = "Reason step by step and give the final answer in \\boxed{}."
# A record as the hub has it; path, config and split; the turns; id and category.
RECORDS: dict[str, tuple[dict[str, Any], tuple[Any, ...], tuple[str, ...], tuple[str, str]]] = {
    "gsm8k": (
        {"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
        ("openai/gsm8k", "main", "test"),
        (f"How many?\n{BOXED}",),
        ("0", ""),
    ),
    "math500": (
        {
            "problem": "Find $x$.",
            "solution": "It is 3.",
            "answer": "3",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        ("HuggingFaceH4/MATH-500", None, "test"),
        (f"Find $x$.\n{BOXED}",),
        ("test/algebra/1.json", "Algebra"),
    ),
    "aime25": (
        {"problem_idx": 1, "problem": "Find $b$.", "answer": 70, "problem_type": ["Number Theory"]},
        ("MathArena/aime_2025", None, "train"),
        (f"Find $b$.\n{BOXED}",),
        ("1", ""),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def one() -> int:\n    """Gives 1."""\n',
            "canonical_solution": "    return 1\n",
            "test": "assert one() == 1",
            "entry_point": "one",
        },
        ("openai/openai_humaneval", None, "test"),
        (
            "Write a solution to this problem that passes its tests:\n"
            '```python\ndef one() -> int:\n    """Gives 1."""\n```',
        ),
        ("HumanEval/0", ""),
    ),
    "mbpp": (
        {
            "source_file": "a.ipynb",
            "task_id": 11,
            "prompt": "Write a function.",
            "code": "pass",
            "test_imports": [],
            "test_list": ["assert f()"],
        },
        ("google-research-datasets/mbpp", "sanitized", "test"),
        ("Write a function.",),
        ("11", ""),
    ),
    "mt-bench": (
        {
            "category": "writing",
            "prompt": ["Write a post.", "Make it shorter."],
            "reference": [],
            "prompt_id": 81,
        },
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        ("Write a post.", "Make it shorter."),
        ("81", "writing"),
    ),
    "alpaca": (
        {"instruction": "Sort these.", "input": "b, a", "output": "a, b", "text": "…"},
        ("tatsu-lab/alpaca", None, "train"),
        ("Sort these.\n\nInput:\nb, a",),
        ("0", ""),
    ),
    "livecodebench": (
        {
            "question_title": "A",
            "question_content": "Add two numbers.",
            "platform": "leetcode",
            "question_id": "2777",
            "contest_id": "1",
            "contest_date": "2023-01-01T00:00:00",
            "starter_code": "class Solution:",
            "difficulty": "easy",
            "public_test_cases": "[]",
            "private_test_cases": "eJw=",
            "metadata": "{}",
        },
        ("json", None, "train"),
        ("Add two numbers.\n\nStart from this code:\n```python\nclass Solution:\n```",),
        ("2777", "leetcode"),
    ),
}


class Hub:
    """Stands in for the hub: `rows` records, and what was asked for."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.asked: tuple[Any, ...] = ()
        self.error: Exception | None = None

    def load_dataset(
        self, path: str, name: str | None, *, split: str, data_files: list[str] | None
    ) -> datasets.Dataset:
        self.asked = (path, name, split)
        assert (path == "json") == bool(data_files)
        if self.error:
            raise self.error
        return datasets.Dataset.from_list(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(datasets, "load_dataset", made.load_dataset)
    return made


def test_every_set_of_the_protocol_has_a_stand_in() -> None:
    assert RECORDS.keys() == NAMED.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_becomes_the_turns_of_the_protocol(hub: Hub, name: str) -> None:
    record, asked, turns, (id, category) = RECORDS[name]
    hub.rows = [record]
    (question,) = load_questions([name])
    assert hub.asked == asked
    assert question.set == name
    assert question.turns == turns
    assert (question.id, question.category) == (id, category)


def test_parts_that_a_record_may_lack(hub: Hub) -> None:
    hub.rows = [RECORDS["alpaca"][0] | {"input": ""}]
    assert load_named("alpaca")[0].turns == ("Sort these.",)
    hub.rows = [RECORDS["livecodebench"][0] | {"starter_code": ""}]
    assert load_named("livecodebench")[0].turns == ("Add two numbers.",)


@pytest.mark.parametrize(("limit", "seed", "count"), [(None, 0, 128), (10, 0, 10), (10, 3, 10)])
def test_a_large_set_is_cut_as_the_library_shuffles(hub: Hub, limit, seed, count) -> None:
    hub.rows = [{"question": str(n), "answer": ""} for n in range(300)]
    questions = load_questions(["gsm8k"], limit, seed)
    shuffled = datasets.Dataset.from_list(hub.rows).shuffle(seed=seed)
    assert [q.turns[0].split("\n")[0] for q in questions] == shuffled["question"][:count]
    # The number of a question is that of its row, whichever were chosen.
    assert all(q.turns[0].startswith(f"{q.id}\n") for q in questions)


def test_a_small_set_is_asked_in_its_order(hub: Hub) -> None:
    hub.rows = [RECORDS["aime25"][0] | {"problem_idx": n} for n in range(30)]
    assert [q.id for q in load_named("aime25")] == [str(n) for n in range(30)]


def test_files_of_the_hub_go_through_the_json_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself, its files in a folder instead of the hub."""
    record = RECORDS["livecodebench"][0]
    files = []
    for part in ("test.jsonl", "test2.jsonl"):
        files.append(str(tmp_path / part))
        Path(files[-1]).write_text(json.dumps(record | {"question_id": part}) + "\n")
    which = NAMED["livecodebench"]
    local = named_sets.NamedSet(**(vars(which) | {"files": tuple(files)}))
    monkeypatch.setitem(named_sets.NAMED, "livecodebench", local)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert [q.id for q in load_named("livecodebench")] == ["test.jsonl", "test2.jsonl"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)\nmore"),
        httpx.ConnectError("[Errno -2] Name or service not known"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist"),
        datasets.exceptions.DatasetGenerationError("An error occurred"),
        ValueError("BuilderConfig 'main' not found"),
    ],
)
def test_a_hub_out_of_reach_is_one_line(hub: Hub, error: Exception) -> None:
    hub.error = error
    with pytest.raises(ValueError, match=r"--data gsm8k: cannot load openai/gsm8k") as raised:
        load_named("gsm8k")
    assert "\n" not in str(raised.value)
    assert str(error).splitlines()[0] in str(raised.value)
    assert "local file" in str(raised.value)


def test_a_set_with_other_columns_is_refused(hub: Hub) -> None:
    hub.rows = [{"problem": "?"}]
    with pytest.raises(ValueError, match="gsm8k has no column question, only problem"):
        load_named("gsm8k")
