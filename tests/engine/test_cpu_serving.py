"""Sampling, penalties and biases in a real engine on a CPU, beside plain decoding."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.engine.conftest import greedy, prompts

pytestmark = pytest.mark.server

# A few tokens that the target would repeat for ever, so that penalties have something to do.
LIKED = {"17": 8.0, "33": 8.0, "80": 8.0, "200": 8.0}
PENALTIES = {
    "none": {},
    "frequency": {"frequency_penalty": 0.8},
    "frequency, negative": {"frequency_penalty": -1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.3},
    "repetition, below one": {"repetition_penalty": 0.7},
    "frequency and presence": {"frequency_penalty": 0.4, "presence_penalty": 1.0},
}
SAMPLED = {
    "temperature": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.4},
    "top_k, top_p, min_p": {"temperature": 0.6, "top_k": 6, "top_p": 0.6, "min_p": 0.3},
}
TEXT = prompts(16)[9]
DRAWS, ANSWER = 600, 3


@pytest.fixture(scope="module")
def plain(start) -> dict[str, Any]:
    """What plain decoding, without overlap, answers to all requests of these tests."""
    with start(disable_overlap_schedule=True) as engine:
        return answer_all(engine)


@pytest.fixture(scope="module")
def speculative(start, script, plain) -> dict[str, Any]:
    """The same with trees whose drafts replay the plain answers, three in ten of them wrong."""
    folder = script(wrong_token=0.1, wrong_sibling=0.3)
    records = [TEXT + plain[name] for name in PENALTIES]
    # Sampled answers are drafted too: the commonest plain ones.
    for name in SAMPLED:
        records += [TEXT + list(run) for run, _ in plain[name].most_common(1)]
    script_file = Path(folder) / "script.json"
    script_file.write_text(json.dumps(json.loads(script_file.read_text()) + records))
    with start(
        speculative_algorithm="DART",
        speculative_draft_model_path=folder,
        speculative_num_draft_tokens=12,
        max_running_requests=32,
    ) as engine:
        return answer_all(engine)


def answer_all(engine: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    penalised = [greedy(40, logit_bias=LIKED, **fields) for fields in PENALTIES.values()]
    for name, params in zip(PENALTIES, penalised, strict=True):
        answer = engine.generate(input_ids=TEXT, sampling_params=params)
        answers[name] = answer["output_ids"]
        answers[f"{name}: meta"] = answer["meta_info"]
    batch = engine.generate(input_ids=[TEXT] * len(penalised), sampling_params=penalised)
    answers["batch"] = [answer["output_ids"] for answer in batch]
    for name, fields in SAMPLED.items():
        params = {"max_new_tokens": ANSWER, "ignore_eos": True} | fields
        drawn = engine.generate(input_ids=[TEXT] * DRAWS, sampling_params=params)
        answers[name] = Counter(tuple(answer["output_ids"]) for answer in drawn)
    mixed = [greedy(20), {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}] * 4
    answers["mixed"] = [
        answer["output_ids"]
        for answer in engine.generate(input_ids=[TEXT] * 8, sampling_params=mixed)
    ]
    answers["min_p"] = engine.generate(
        input_ids=[TEXT] * 20,
        sampling_params={"temperature": 1.0, "min_p": 0.7, "max_new_tokens": 20},
        return_logprob=True,
        top_logprobs_num=1,
    )
    return answers


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_and_biases_give_the_ids_of_plain_decoding(speculative, plain, name) -> None:
    assert speculative[name] == plain[name]


def test_penalties_changed_something_and_runs_were_deep(speculative, plain) -> None:
    assert len({tuple(plain[name]) for name in PENALTIES}) >= len(PENALTIES) - 1
    deep = [speculative[f"{name}: meta"]["spec_accept_length"] for name in PENALTIES]
    assert min(deep) > 1.5


def test_penalties_in_one_batch(speculative, plain) -> None:
    assert speculative["batch"] == [plain[name] for name in PENALTIES]


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_answers_follow_the_same_law(speculative, plain, name) -> None:
    """Chi-square of two samples of whole answers; rare ones are taken together."""
    counts = [plain[name], speculative[name]]
    both = counts[0] + counts[1]
    common = [run for run, count in both.items() if count >= 10]
    assert len(common) > 3, "the case must leave a choice"
    table = [
        [count[run] for run in common] + [DRAWS - sum(count[run] for run in common) + 1]
        for count in counts
    ]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_greedy_rows_beside_sampled_ones(speculative, plain, record) -> None:
    start = len(TEXT)
    assert speculative["mixed"][::2] == [record[9][start : start + 20]] * 4
    assert len({tuple(ids) for ids in speculative["mixed"][1::2]}) == 4


def test_min_p_excludes_what_plain_decoding_excludes(speculative) -> None:
    for answer in speculative["min_p"]:
        meta = answer["meta_info"]
        best = meta["output_top_logprobs"]
        for (log_prob, _, _), top in zip(meta["output_token_logprobs"], best, strict=True):
            assert log_prob >= top[0][0] + math.log(0.7) - 1e-4


SEEDED = [
    {"temperature": 0.9, "sampling_seed": 42},
    {"temperature": 0.9, "sampling_seed": 7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.9, "sampling_seed": -3, "frequency_penalty": 0.5},
]


def seeded(**fields: Any) -> dict[str, Any]:
    return {"max_new_tokens": 30, "ignore_eos": True} | fields


def test_with_a_seed_the_answer_is_that_of_plain_decoding(start, script) -> None:
    """The same ids drafted or not, alone or in a batch, first or later."""
    mode = {"enable_deterministic_inference": True, "disable_overlap_schedule": True}
    with start(**mode) as engine:
        alone = [
            engine.generate(input_ids=TEXT, sampling_params=seeded(**fields))["output_ids"]
            for fields in SEEDED
        ]
    folder = script(wrong_token=0.1, wrong_sibling=0.3)
    Path(folder, "script.json").write_text(json.dumps([TEXT + ids for ids in alone]))
    with start(
        speculative_algorithm="DART",
        speculative_draft_model_path=folder,
        speculative_num_draft_tokens=12,
        **mode,
    ) as engine:
        for fields, want in zip(SEEDED, alone, strict=True):
            answer = engine.generate(input_ids=TEXT, sampling_params=seeded(**fields))
            assert answer["output_ids"] == want
            assert answer["meta_info"]["spec_accept_length"] > 1.5
        # SGLang hashes ranks where one request of a batch filters, so only like ones together.
        batch = engine.generate(
            input_ids=[TEXT, prompts(16)[4], TEXT],
            sampling_params=[seeded(**SEEDED[0]), seeded(temperature=1.0), seeded(**SEEDED[2])],
        )
        assert [batch[0]["output_ids"], batch[2]["output_ids"]] == [alone[0], alone[2]]
