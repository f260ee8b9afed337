"""The CPU path under SGLang's own algorithms: Hugging Face's ids, plain and with NGRAM."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import engine, greedy

pytestmark = pytest.mark.server

VOCABULARY, NEW_TOKENS = 512, 32
SETUPS = {
    "plain": {"disable_overlap_schedule": True},
    "page 16, chunks of 32": {"page_size": 16, "chunked_prefill_size": 32},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama of 8 layers, 6 query heads on 2 KV heads; large weights, so few near-ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    dice = random.Random(0)
    # Some repeat themselves, for NGRAM to find.
    pattern = [dice.randrange(VOCABULARY) for _ in range(11)]
    lengths = (1, 2, 17, 90)
    return [[dice.randrange(VOCABULARY) for _ in range(n)] for n in lengths] + [pattern * 6]


@pytest.fixture(scope="module")
def expected(llama: tuple[Any, Path], texts: list[list[int]]) -> list[list[int]]:
    model, _ = llama
    answers = []
    for text in texts:
        ids = model.generate(
            torch.tensor([text]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        answers.append(ids[0, len(text) :].tolist())
    return answers


@pytest.mark.parametrize("flags", SETUPS.values(), ids=SETUPS.keys())
def test_greedy_ids_of_hugging_face(
    llama: tuple[Any, Path],
    texts: list[list[int]],
    expected: list[list[int]],
    flags: dict[str, Any],
) -> None:
    with engine(str(llama[1]), **flags) as running:
        alone = [
            running.generate(input_ids=text, sampling_params=greedy(NEW_TOKENS))["output_ids"]
            for text in texts
        ]
        together = running.generate(input_ids=texts, sampling_params=greedy(NEW_TOKENS))
    assert alone == expected
    assert [answer["output_ids"] for answer in together] == expected
