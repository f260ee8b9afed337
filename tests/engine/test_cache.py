"""Cached and chunked prompts draft as well as fresh ones: the head's KV is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import greedy, prompts, steady

pytestmark = pytest.mark.server

NEW_TOKENS = 64
# A few hundred tokens each, more than many chunks of 48.
TEXTS = [[token for part in prompts(16, seed)[3:9] for token in part] for seed in range(1, 5)]
# They part from TEXTS in the middle, inside a page.
FORKS = [text[:150] + text[:60:-1] for text in TEXTS]


def ask(engine: Any, texts: list[list[int]]) -> list[tuple[list[int], int, int]]:
    """Ids, rounds and cached tokens, asked one by one so that no batch changes the rounding."""
    answers = [
        engine.generate(input_ids=text, sampling_params=greedy(NEW_TOKENS)) for text in texts
    ]
    return [
        (
            answer["output_ids"],
            answer["meta_info"]["spec_verify_ct"],
            answer["meta_info"]["cached_tokens"],
        )
        for answer in answers
    ]


def flags(head: str, chunk: int) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DART",
        "speculative_draft_model_path": head,
        "speculative_num_draft_tokens": 61,
        "chunked_prefill_size": chunk,
    }


@pytest.fixture(scope="module")
def steady_head(head: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The golden head, whose rounds do not depend on the clock."""
    return str(steady(Path(head), tmp_path_factory.mktemp("head"), "DART"))


@pytest.fixture(scope="module")
def fresh(start: Any, steady_head: str) -> dict[str, Any]:
    """Every prompt read at once, none cached."""
    with start(**flags(steady_head, 4096), disable_radix_cache=True) as engine:
        return {"texts": ask(engine, TEXTS), "forks": ask(engine, FORKS)}


@pytest.fixture(scope="module")
def chunked(start: Any, steady_head: str, fresh: dict[str, Any]) -> dict[str, Any]:
    """The same in chunks of 48, then from the cache, then with other tails."""
    with start(**flags(steady_head, 48)) as engine:
        return {
            "texts": ask(engine, TEXTS),
            "again": ask(engine, TEXTS),
            "forks": ask(engine, FORKS),
        }


def rounds(answers: list[tuple[list[int], int, int]]) -> int:
    return sum(count for _, count, _ in answers)


def test_the_head_drafts_something(fresh: dict[str, Any]) -> None:
    assert rounds(fresh["texts"]) < 0.9 * len(TEXTS) * NEW_TOKENS


def test_chunks_change_neither_ids_nor_rounds(fresh, chunked) -> None:
    for whole, pieces in zip(fresh["texts"], chunked["texts"], strict=True):
        assert pieces[:2] == whole[:2]
        assert pieces[2] == 0


def test_a_cached_prompt_drafts_as_well(fresh, chunked) -> None:
    for whole, cached, text in zip(fresh["texts"], chunked["again"], TEXTS, strict=True):
        assert cached[:2] == whole[:2]
        assert cached[2] == len(text) - 2


def test_another_tail_drafts_as_well(fresh, chunked) -> None:
    """The last token that both share is read anew: its row was made for the other tail."""
    for whole, cached in zip(fresh["forks"], chunked["forks"], strict=True):
        assert cached[:2] == whole[:2]
        assert cached[2] >= 149
