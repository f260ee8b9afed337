from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dart.measure.client import Reply
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import (
    RawLog,
    acceptance_summary,
    acceptance_table,
    answer_record,
    mismatches,
)


def record(name: str, number: int, histogram: list[int], tokens: int = 4) -> dict:
    meta = {"spec_correct_drafts_histogram": histogram, "cached_tokens": 2}
    reply = Reply(tuple(range(tokens)), "", "length", latency_s=0.5, ttft_s=0.2, meta=meta)
    return answer_record("arm", Question(name, str(number), "", ("q",)), 0, [1, 2, 3], reply)


def test_acceptance_by_set_and_together() -> None:
    answers = [record("a", 0, [4]), record("a", 1, [0, 0, 1]), record("b", 0, [1, 1])]
    summary = acceptance_summary(answers)
    assert list(summary) == ["a", "b", "together"]
    assert summary["a"]["accept_length_micro"] == pytest.approx((4 * 1 + 3) / 5)
    assert summary["a"]["accept_length_macro"] == pytest.approx((1 + 3) / 2)
    assert summary["together"]["histogram"] == [5, 1, 1]
    assert summary["together"]["rounds"] == 7
    # 0.3 s for the 3 tokens after the first.
    assert summary["b"]["tpot_ms_p50"] == pytest.approx(100)
    assert acceptance_table(summary).row_count == 3


def test_one_set_needs_no_sum() -> None:
    assert list(acceptance_summary([record("a", 0, [1])])) == ["a"]


def test_log_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "raw.jsonl"
    log = RawLog(path, {"kind": "acceptance", "modes": ("x",)})
    log.append(record("a", 0, [1]))
    again = RawLog(path, {"kind": "acceptance", "modes": ("x",)})
    assert again.records == log.records == RawLog.reopen(path).records
    assert list(again.answers("arm")) == [("a", "0", 0)]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    RawLog(path, {"kind": "acceptance", "limit": 1})
    with pytest.raises(ValueError, match="another limit; name another --out"):
        RawLog(path, {"kind": "acceptance", "limit": 2})


@pytest.mark.parametrize("text", ["{}\n", "no json\n", '{"record": "answer"}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a results file"):
        RawLog.reopen(path)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results file"):
        RawLog.reopen(tmp_path / "raw.jsonl")


def test_comparison_needs_the_plain_answer_to_the_same_prompt(tmp_path: Path) -> None:
    log = RawLog(tmp_path / "raw.jsonl", {})
    log.append(record("a", 0, [1]) | {"arm": "cold"})
    with pytest.raises(ValueError, match="no plain answer"):
        mismatches(log, "cold")
    log.append(record("a", 0, []) | {"arm": "plain", "prompt": "another"})
    with pytest.raises(ValueError, match="no plain answer"):
        mismatches(log, "cold")
