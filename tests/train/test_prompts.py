"""Prompts from files, the start of a sampled question, and templates that cannot serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_dart.train.prompts import read_prompts, shard_jobs, user_header


def test_three_forms_of_prompts(tmp_path: Path) -> None:
    records = [
        {"text": "one"},
        {"turns": ["two", "three"]},
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "four"},
                {"role": "assistant", "content": "dropped"},
                {"role": "user", "content": "five"},
            ]
        },
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    found = read_prompts([path])
    assert [[m["content"] for m in talk] for talk in found] == [
        ["one"],
        ["two", "three"],
        ["be brief", "four", "five"],
    ]
    assert found[2][0]["role"] == "system"


def test_parquet_prompts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "p.parquet")
    assert [talk[0]["content"] for talk in read_prompts([tmp_path / "p.parquet"])] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"}', "record 1: expected `messages`"),
        ('{"turns": [3]}', "record 1: expected `messages`"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "record 1"),
        ("{", "expected JSON lines"),
        ("", "hold no prompt"),
    ],
)
def test_bad_prompts_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_prompts([path])


def test_header_ends_where_the_users_text_begins(make_tokenizer: Callable) -> None:
    tokenizer = make_tokenizer()
    header, end = user_header(tokenizer)
    assert tokenizer.decode(header) == "<|start|>user\n"
    assert end == tokenizer.convert_tokens_to_ids("<|end|>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "no markers"),
        ("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}", "no markers"),
        ("fixed text", "does not show the user's text"),
        (None, "has no chat template"),
    ],
)
def test_template_without_markers_is_refused(
    make_tokenizer: Callable, template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        user_header(make_tokenizer(template))


def test_jobs_depend_on_seed_and_shard_alone() -> None:
    def jobs(shard: int, seed: int = 0):
        return shard_jobs(
            shard,
            20,
            prompts=None,
            openings=("How", "Why"),
            opening_share=0.5,
            temperatures=(0.0, 0.7),
            seed=seed,
        )

    assert jobs(3) == jobs(3)
    assert jobs(3) != jobs(4)
    assert jobs(3) != jobs(3, seed=1)
    assert {job.source for job in jobs(3)} == {"opening", "sampled"}
    assert {job.temperature for job in jobs(3)} == {0.0, 0.7}
