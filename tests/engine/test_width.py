"""Trees whose width follows measured speed: the same ids, and figures that say why."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglang_dart.tree.budget import ladder
from tests.engine.conftest import expected, greedy, prompts, server
from tests.engine.cycling import Cycling

pytestmark = pytest.mark.server

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def served(target: str, script: Any) -> Any:
    # A setting without effect, so that the script's trees are not wide in every round.
    drafter = script(wrong_token=0.05, dart_config={"threads": 0})
    flags = ("--speculative-algorithm", "DART", "--speculative-draft-model-path", drafter)
    with server(target, *flags, "--enable-metrics") as api:
        yield api


def steps(served: Any) -> dict[int, float]:
    """Rounds by width so far."""
    _, text = served.get("/metrics")
    found = re.findall(r'sglang_dart:steps_total\{[^}]*width="(\d+)"[^}]*\} (\S+)', text)
    return {int(width): float(count) for width, count in found}


def test_same_ids_alone_and_together(served, record) -> None:
    bodies = [
        {"input_ids": prompts(16)[i], "sampling_params": greedy(NEW_TOKENS)} for i in range(16)
    ]
    alone = [served.generate(body) for body in bodies[:6]]
    for i, answer in enumerate(alone + served.at_once(bodies)):
        assert answer["output_ids"] == expected(record, i if i < 6 else i - 6, NEW_TOKENS)
    assert any(answer["meta_info"]["spec_accept_length"] > 1.5 for answer in alone)


def test_metrics_tell_the_width_and_what_it_was_chosen_for(served) -> None:
    counts = steps(served)
    assert len(counts) > 1
    assert max(counts) <= 32
    _, text = served.get("/metrics")
    (tokens,) = re.findall(r"^sglang_dart:expected_tokens\{[^}]*\} (\S+)$", text, re.M)
    (seconds,) = re.findall(r"^sglang_dart:expected_seconds\{[^}]*\} (\S+)$", text, re.M)
    assert 1 <= float(tokens) <= 9
    assert 0 < float(seconds) < 10


def test_another_width_every_round(tmp_path, monkeypatch, target, start, script, record) -> None:
    cycle = Cycling(tmp_path, monkeypatch)
    drafter = script(wrong_token=0.05, dart_config={"threads": 0})
    speculative = {"speculative_algorithm": "DART", "speculative_draft_model_path": drafter}
    with start(**speculative) as engine:
        for index in ([0], range(1, 8)):
            answers = engine.generate(
                input_ids=[prompts(16)[i] for i in index], sampling_params=greedy(NEW_TOKENS)
            )
            for i, answer in zip(index, answers, strict=True):
                assert answer["output_ids"] == expected(record, i, NEW_TOKENS)
                # A tenth of the rounds is plain, others are wide.
                assert answer["meta_info"]["spec_accept_length"] > 2
    assert cycle.widths() == set(ladder(32))


def test_the_log_tells_what_rows_cost(served) -> None:
    assert "all linear layers take" in served.log.read_text()
