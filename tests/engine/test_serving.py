"""The whole path in a real engine on a CPU: the ids of plain decoding, whatever is drafted."""

from __future__ import annotations

import pytest

from tests.engine.conftest import ask, expected, greedy, prompts

pytestmark = pytest.mark.server

DART = {"speculative_algorithm": "DART"}

CONFIGURATIONS = {
    # More nodes than the candidates of 8 levels fill with anything likely.
    "page 1, 256 rows": {"speculative_num_draft_tokens": 256},
    "page 16, chunks of 64": {
        "page_size": 16,
        "chunked_prefill_size": 64,
        "speculative_num_draft_tokens": 64,
    },
    "page 64, narrow tree": {"page_size": 64, "speculative_num_draft_tokens": 9},
    "one level, two rows": {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2},
}


@pytest.fixture(scope="module", params=CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def scripted(request, start, script):
    """An engine whose drafts are right 19 times in 20, some behind wrong elder siblings."""
    folder = script(wrong_token=0.05, wrong_sibling=0.1)
    flags = DART | {"speculative_draft_model_path": folder} | request.param
    with start(**flags) as engine:
        engine.levels = request.param.get("speculative_num_steps", 8)
        yield engine
        # The pool is whole: SGLang flushes only then.
        assert engine.flush_cache().success


def test_same_ids_alone_and_deep_runs(scripted, record):
    for i in range(8):
        (answer,) = ask(scripted, [i], 48)
        assert answer["output_ids"] == expected(record, i, 48)
    assert answer["meta_info"]["spec_accept_length"] > 0.4 * scripted.levels
    assert answer["meta_info"]["spec_accept_length"] <= scripted.levels + 1
    assert 0 <= answer["meta_info"]["spec_accept_rate"] <= 1


def test_same_ids_in_a_batch_of_mixed_lengths(scripted, record):
    new_tokens = [48, 5, 17, 48, 30, 48, 1, 40, 2, 3, 4, 6, 7, 8, 9, 10]
    answers = ask(scripted, range(16), new_tokens)
    for i, (answer, n) in enumerate(zip(answers, new_tokens, strict=True)):
        assert answer["output_ids"] == expected(record, i, n)
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert answer["meta_info"]["completion_tokens"] == n


def test_cached_prefixes_hold_the_right_kv(scripted, record):
    """Prompt and half of the answer from the cache: rows that accepted paths moved are right."""
    for i in (4, 9):
        whole = record[i][: len(prompts(16)[i]) + 40]
        for _ in range(2):
            answer = scripted.generate(input_ids=whole, sampling_params=greedy(20))
            follows = record[i][len(whole) : len(whole) + 20]
            assert answer["output_ids"] == follows
        assert answer["meta_info"]["cached_tokens"] > 0
        assert answer["meta_info"]["spec_accept_length"] > 0.3 * scripted.levels


@pytest.mark.parametrize("place", range(2, 13))
def test_a_stop_token_inside_a_run_ends_the_answer(scripted, record, place):
    i = 7
    answer_ids = expected(record, i, 48)
    stop = answer_ids[place]
    (answer,) = ask(scripted, [i], 48, stop_token_ids=[stop])
    first = answer_ids.index(stop)
    assert answer["output_ids"] == answer_ids[: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_length_and_stop_in_one_run(scripted, record):
    i = 11
    ids = expected(record, i, 48)
    early = next(n for n in range(2, 5) if ids[n] not in ids[:n])
    (answer,) = ask(scripted, [i], early + 3, stop_token_ids=[ids[early]])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(answer["output_ids"]) == early + 1
    (answer,) = ask(scripted, [i], early, stop_token_ids=[ids[early]])
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert answer["output_ids"] == ids[:early]


def test_log_probabilities_are_those_of_each_emitted_token(scripted, record):
    answer = scripted.generate(
        input_ids=prompts(16)[5],
        sampling_params=greedy(30),
        return_logprob=True,
        top_logprobs_num=3,
    )
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == expected(record, 5, 30)
    best = answer["meta_info"]["output_top_logprobs"]
    for (log_prob, token, _), top in zip(entries, best, strict=True):
        assert top[0][1] == token
        assert top[0][0] == pytest.approx(log_prob, abs=1e-4)
        assert log_prob < 0


def test_copies_are_identical_at_temperature_zero(scripted, record):
    answers = scripted.generate(input_ids=prompts(16)[6], sampling_params=greedy(24, n=3))
    assert [a["output_ids"] for a in answers] == [expected(record, 6, 24)] * 3
