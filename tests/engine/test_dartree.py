"""DARTREE in a real engine on a CPU: ids of plain decoding, accept lengths of the reference."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from sglang_dart.options import DartreeOptions
from sglang_dart.reference import Generation, generate
from tests import dartree
from tests.conftest import GOLDEN, read_trie
from tests.engine.conftest import engine, greedy, steady

pytestmark = pytest.mark.server

NEW_TOKENS = 48
NGRAM = GOLDEN / "dart/ngram_order3.trie"
# Drafter, its dartree_config, flags of the server. Every variant, either meaning of shift_label.
SETUPS = {
    "pruned, page 16, chunks of 64": (
        "domino_shift",
        {},
        {
            "page_size": 16,
            "chunked_prefill_size": 64,
            "speculative_num_draft_tokens": 65,
        },
    ),
    "fixed, n-grams, chunks of 48": (
        "domino_noshift",
        {"variant": "fixed", "budget": 40, "ngram": str(NGRAM)},
        {"chunked_prefill_size": 48},
    ),
    "chain": ("domino_shift", {"variant": "chain"}, {}),
    "marginal, page 32": (
        "dflash_plain",
        {},
        {"page_size": 32, "speculative_num_draft_tokens": 31},
    ),
}


def texts() -> list[list[int]]:
    """The golden prompts, whose answers the drafters were fitted to, and random ones."""
    dice = random.Random(3)
    lengths = [1, 2, 3, 17, 63, 64, 65, 90]
    return [
        *dartree.read("dflash_cases.json")["prompts"],
        *([dice.randrange(255) for _ in range(n)] for n in lengths),
    ]


class Oracle:
    """Plain decoding and the reference's rounds, both with the target in Hugging Face."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(
            dartree.GOLDEN / "target", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.plain = [self._greedy(text) for text in texts()]

    @torch.no_grad()
    def _greedy(self, text: list[int]) -> list[int]:
        made = self.target.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text)),
            do_sample=False,
            min_new_tokens=2 * NEW_TOKENS,
            max_new_tokens=2 * NEW_TOKENS,
            pad_token_id=0,
            # Everything may be generated, end tokens too.
            eos_token_id=None,
        )
        return made[0, len(text) :].tolist()

    def answer(
        self, name: str, options: DartreeOptions, text: list[int], new_tokens: int
    ) -> Generation:
        ngram = read_trie(NGRAM) if options.ngram else None
        drafter = dartree.drafter(name)
        return generate(self.target, drafter, text, new_tokens, options=options, ngram=ngram)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module", params=SETUPS.values(), ids=SETUPS.keys())
def served(request, tmp_path_factory) -> Any:
    """A running engine; `reference(oracle, text)` is how the reference answers in its place.

    At most NEW_TOKENS, or as many as the third argument says.
    """
    name, settings, flags = request.param
    drafter = dartree.GOLDEN / name
    folder = steady(drafter, tmp_path_factory.mktemp("drafter"), "DARTREE", **settings)
    speculation = {
        "speculative_algorithm": "DARTREE",
        "speculative_draft_model_path": str(folder),
    }
    with engine(str(dartree.GOLDEN / "target"), **(speculation | flags)) as running:
        width = flags.get("speculative_num_draft_tokens")
        options = DartreeOptions(**settings, **({} if width is None else {"budget": width - 1}))
        running.reference = lambda oracle, text, new_tokens=NEW_TOKENS: oracle.answer(
            name, options, text, new_tokens
        )
        yield running
        assert flushes(running)


def flushes(running: Any, seconds: float = 10) -> bool:
    """Whether the pool is whole: SGLang flushes only then.

    The answer to a request is sent before the scheduler drops it, so the first try may come early.
    """
    until = time.monotonic() + seconds
    while not running.flush_cache().success:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_ids_of_plain_decoding_and_rounds_of_the_reference(served, oracle):
    for text, plain in zip(texts()[:6], oracle.plain, strict=False):
        answer = served.generate(input_ids=text, sampling_params=greedy(NEW_TOKENS))
        assert answer["output_ids"] == plain[:NEW_TOKENS]
        rounds = len(served.reference(oracle, text).rounds)
        assert answer["meta_info"]["spec_verify_ct"] == rounds
        length = (NEW_TOKENS - 1) / rounds
        assert answer["meta_info"]["spec_accept_length"] == pytest.approx(length)


def test_same_ids_in_a_batch_of_mixed_lengths(served, oracle):
    lengths = [48, 5, 17, 30, 1, 40, 2, 3, 96, 10]
    answers = served.generate(input_ids=texts(), sampling_params=[greedy(n) for n in lengths])
    for answer, plain, n in zip(answers, oracle.plain, lengths, strict=True):
        assert answer["output_ids"] == plain[:n]
        assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_a_cached_prefix_drafts_as_a_fresh_one(served, oracle):
    """Prompt and answer from the cache: rows that accepted paths moved are right."""
    for index in (0, 1, 9):
        text = texts()[index] + oracle.plain[index][:NEW_TOKENS]
        for _ in range(2):
            answer = served.generate(input_ids=text, sampling_params=greedy(NEW_TOKENS))
            assert answer["output_ids"] == oracle.plain[index][NEW_TOKENS:]
        assert answer["meta_info"]["cached_tokens"] > 0
        rounds = len(served.reference(oracle, text).rounds)
        assert answer["meta_info"]["spec_verify_ct"] == rounds


def test_chunks_and_another_tail_draft_as_a_fresh_prompt(served, oracle):
    """A prompt of many chunks, then the same from the cache, then one that forks from it.

    Ten times as long as the texts that the golden drafters were made with.
    """
    assert flushes(served)
    golden = texts()[:2]
    dice = random.Random(4)
    long = [dice.randrange(255) for _ in range(600)] + golden[0]
    # Inside a page, and inside a chunk.
    fork = long[:490] + golden[1]
    for text, cached in ((long, 0), (long, len(long) - 32), (fork, 480)):
        answer = served.generate(input_ids=text, sampling_params=greedy(24))
        reference = served.reference(oracle, text, 24)
        assert answer["output_ids"] == reference.tokens
        assert answer["meta_info"]["spec_verify_ct"] == len(reference.rounds)
        assert answer["meta_info"]["cached_tokens"] >= cached
        assert cached or not answer["meta_info"]["cached_tokens"]


def test_a_stop_token_inside_a_run_ends_the_answer(served, oracle):
    plain = oracle.plain[0]
    for place in range(2, 12):
        stop = plain[place]
        answer = served.generate(
            input_ids=texts()[0], sampling_params=greedy(NEW_TOKENS, stop_token_ids=[stop])
        )
        # The target's own end token counts then, too.
        ends = [plain.index(token) for token in (stop, 255) if token in plain]
        assert answer["output_ids"] == plain[: min(ends) + 1]
