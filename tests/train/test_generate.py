"""Data made by a tiny target: shards, masks, resumption, limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from shutil import copytree

import pytest
from transformers import AutoTokenizer

from sglang_dart.train.generate import generate_data
from sglang_dart.train.shards import Sample, read_samples, shard_files
from sglang_dart.train.writer import DataSettings, Machine

MACHINE = Machine("transformers", replicas=1, concurrent=8, dtype="float32")
PROMPTS = [["What is one?"], ["What is two?", "And three?"], ["What is one?"], ["Go on"]]


@pytest.fixture
def settings(target_folder: Path, tmp_path: Path) -> DataSettings:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in PROMPTS))
    return DataSettings(
        model=str(target_folder),
        prompts=(str(prompts),),
        max_new_tokens=12,
        temperatures=(0.0,),
        shard_samples=2,
        min_tokens=1,
        min_distinct=0.0,
    )


def samples(folder: Path) -> list[Sample]:
    return [sample for path in shard_files([folder]) for sample in read_samples(path)]


def test_prompts_are_answered_once_and_a_second_run_adds_nothing(
    settings: DataSettings, target_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exclude = tmp_path / "eval.jsonl"
    exclude.write_text(json.dumps({"question_id": 0, "turns": ["go on!"]}))
    summary = generate_data(out, settings, MACHINE, [exclude], tokens=10**9, minutes=None)
    assert summary["refused"] == {"duplicate": 1, "evaluation overlap": 1}
    found = samples(out)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    assert len(found) == summary["samples"] == 3
    for sample in found:
        answer = sum(sample.assistant_mask)
        prompt = tokenizer.decode(sample.input_ids[:-answer])
        assert prompt.startswith("<|start|>user\n")
        assert prompt.endswith("<|end|>\n<|start|>assistant\n")
        assert sample.assistant_mask == [0] * (len(sample.input_ids) - answer) + [1] * answer
        assert 1 <= answer <= 13

    # A later turn follows the target's own answer.
    histories = [tokenizer.decode(s.input_ids).count("<|start|>user\n") for s in found]
    assert sorted(histories) == [1, 1, 2]

    before = {path: path.stat().st_mtime_ns for path in shard_files([out])}
    assert len(before) == 2
    again = generate_data(out, settings, MACHINE, [exclude], tokens=10**9, minutes=None)
    assert again["samples"] == 3
    assert again["written_tokens"] == 0
    assert {path: path.stat().st_mtime_ns for path in shard_files([out])} == before


def test_target_writes_its_own_questions(settings: DataSettings, tmp_path: Path) -> None:
    settings = dataclasses.replace(
        settings, prompts=(), shard_samples=4, openings=("How",), max_question_tokens=48
    )
    out = tmp_path / "out"
    summary = generate_data(out, settings, MACHINE, [], tokens=20, minutes=2)
    assert summary["generated_tokens"] >= 20
    found = samples(out)
    assert all(sample.question_tokens > 0 for sample in found)
    assert {sample.source for sample in found} <= {"opening", "sampled"}


def test_template_without_markers_stops_the_run(
    settings: DataSettings, target_folder: Path, tmp_path: Path
) -> None:
    folder = copytree(target_folder, tmp_path / "target")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    settings = dataclasses.replace(settings, model=str(folder))
    with pytest.raises(ValueError, match="no markers"):
        generate_data(tmp_path / "out", settings, MACHINE, [], tokens=10, minutes=None)
