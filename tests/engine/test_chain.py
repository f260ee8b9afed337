"""Chains: figures that a hand count gives, and the ids of plain decoding."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.engine.conftest import VOCABULARY, ask, expected, prompts

pytestmark = pytest.mark.server

# Tokens that the rounds of the chain commit, over and over.
RUNS = (2, 5, 9, 1, 3)


@pytest.fixture(scope="module")
def chain(start, script, record):
    """An engine whose chains go wrong where RUNS says."""
    texts = [text for i in range(16) for text in wrong_turns(record[i], len(prompts(16)[i]))]
    with start(
        speculative_algorithm="DART",
        speculative_draft_model_path=script(texts),
        speculative_eagle_topk=1,
    ) as engine:
        yield engine


def wrong_turns(text, start):
    """One text a round: the truth up to the last right draft, then wrong tokens."""
    # The prefill commits one token.
    at, runs = start + 1, cycle(RUNS)
    while at + max(RUNS) < len(text):
        run = next(runs)
        end = at + run - 1
        yield text[:end] + [(token + 1) % VOCABULARY for token in text[end : end + 9]]
        at += run


@pytest.mark.parametrize("new_tokens", [21, 41, 61])
def test_figures_are_those_of_a_hand_count(chain, record, new_tokens):
    """One token of the prefill, then whole cycles of RUNS."""
    cycles = new_tokens // sum(RUNS)
    rounds = cycles * len(RUNS)
    for i in (3, 8):
        (answer,) = ask(chain, [i], new_tokens)
        assert answer["output_ids"] == expected(record, i, new_tokens)
        meta = answer["meta_info"]
        assert meta["spec_verify_ct"] == rounds
        assert meta["spec_accept_length"] == pytest.approx(sum(RUNS) / len(RUNS))
        assert meta["spec_accept_rate"] == pytest.approx((new_tokens - 1 - rounds) / (8 * rounds))
        histogram = [cycles * RUNS.count(depth + 1) for depth in range(9)]
        assert meta["spec_correct_drafts_histogram"] == histogram


def test_what_an_end_cuts_off_counts_for_nothing(chain, record):
    """The third run would commit 9 tokens; the limit leaves 3 of them."""
    (answer,) = ask(chain, [5], 1 + 2 + 5 + 3)
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == 11
    assert meta["spec_verify_ct"] == 3
    assert meta["spec_accept_length"] == pytest.approx(10 / 3)


def test_chains_give_the_same_ids_in_a_batch(chain, record):
    for i, answer in enumerate(ask(chain, range(16), 60)):
        assert answer["output_ids"] == expected(record, i, 60)
