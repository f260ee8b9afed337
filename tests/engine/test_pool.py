"""A small KV pool under load: retraction, requests that outgrow it, aborts, and no slot lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.engine.api import Api
from tests.engine.cases import body
from tests.engine.conftest import expected, greedy, prompts, server

pytestmark = pytest.mark.server

POOL = 512
FLAGS = ("--max-total-tokens", POOL, "--page-size", 16)


@pytest.fixture(scope="module")
def served(target: str, script: Any) -> Iterator[Api]:
    """DARTREE here, as DART serves the other modules that replay a script."""
    folder = script(wrong_token=0.05, wrong_sibling=0.1)
    flags = (
        *("--speculative-algorithm", "DARTREE", "--speculative-draft-model-path", folder),
        *("--speculative-num-draft-tokens", 24),
        # Admits more requests than will fit.
        *("--schedule-conservativeness", 0.1),
    )
    with server(target, *FLAGS, *flags) as api:
        yield api
        # Whatever the tests did, the pool is whole: SGLang's own check at idle passed too.
        assert api.used_slots() == 0
        assert api.post("/flush_cache", {})[0] == 200


def settle(api: Api) -> None:
    """Wait until no request holds a slot."""
    until = time.monotonic() + 120
    while api.used_slots():
        assert time.monotonic() < until, "slots are not given back"
        time.sleep(0.2)


def test_retracted_requests_resume_with_the_right_text(served: Api, record) -> None:
    answers = served.generate(body(prompts(16), [greedy(96)] * 16))
    for i, answer in enumerate(answers):
        assert answer["output_ids"] == expected(record, i, 96)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


def test_a_request_that_outgrows_the_pool_ends_alone(served: Api, record) -> None:
    """SGLang keeps slots for two trees free, so the end comes that much before the pool's."""
    outgrows = body(prompts(16)[8], greedy(POOL))
    status, said = served.post("/generate", outgrows)
    assert status == 500
    assert "Out of memory" in said["message"]
    with served.stream("/generate", outgrows) as events:
        *_, before, last = events
    assert before["output_ids"][:96] == expected(record, 8, 96)
    assert len(prompts(16)[8]) + len(before["output_ids"]) > POOL - 2 * 24 - 2 * 16
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    (answer,) = served.generate(body([prompts(16)[8]], [greedy(20)]))
    assert answer["output_ids"] == expected(record, 8, 20)


def test_aborts_at_random_leave_the_others_alone(served: Api, record) -> None:
    """One third hang up somewhere inside their answer."""
    dice = random.Random(0)

    def hang_up(number: int) -> None:
        with served.stream("/generate", body(prompts(16)[number], greedy(96))) as events:
            for _ in range(dice.randint(1, 6)):
                # A short answer may have ended.
                with suppress(StopIteration):
                    next(events)

    leaving = [threading.Thread(target=hang_up, args=(i % 16,)) for i in range(8)]
    for thread in leaving:
        thread.start()
    answers = served.generate(body(prompts(16), [greedy(40)] * 16))
    for thread in leaving:
        thread.join()
    for i, answer in enumerate(answers):
        assert answer["output_ids"] == expected(record, i, 40)
    settle(served)


def test_500_mixed_requests_leave_the_pool_whole(served: Api, record) -> None:
    dice = random.Random(1)
    for _ in range(10):
        index = [dice.randrange(16) for _ in range(50)]
        params = []
        for i in index:
            fields: dict[str, Any] = {}
            if dice.random() < 0.3:
                fields["stop_token_ids"] = [record[i][len(prompts(16)[i]) + dice.randrange(9)]]
            if dice.random() < 0.2:
                fields["temperature"] = 1.0
            params.append(greedy(dice.randint(1, 30), **fields))
        answers = served.generate(body([prompts(16)[i] for i in index], params))
        for i, answer, param in zip(index, answers, params, strict=True):
            ids = answer["output_ids"]
            assert answer["meta_info"]["completion_tokens"] == len(ids)
            if param["temperature"] == 0:
                assert ids == expected(record, i, len(ids))
            if "stop_token_ids" not in param:
                assert len(ids) == param["max_new_tokens"]
    settle(served)
    assert served.post("/flush_cache", {})[0] == 200
    assert served.used_slots() == 0
