"""Sampled answers follow the law of plain decoding: joint counts of the first three tokens.

    pytest tests/engine/test_distribution.py --draws 20000

compares 20 000 draws a setting; without the option 4000 are drawn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from sglang_dart.train.export import write_untrained_domino_drafter
from tests.engine.conftest import engine, greedy

pytestmark = pytest.mark.server

VOCABULARY = 32
PROMPT = [3, 14, 15, 9, 26, 5]
TOKENS = 3
AT_ONCE = 250
# Slots for all of them, the reserve of a tree included.
POOL = 32768
SETTINGS: dict[str, dict[str, float]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top_k 5": {"temperature": 0.7, "top_k": 5},
    "top_p 0.8": {"temperature": 1.0, "top_p": 0.8},
    "min_p 0.1": {"temperature": 1.0, "min_p": 0.1},
}

Counts = dict[str, Counter[tuple[int, ...]]]


@pytest.fixture(scope="module")
def small_target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The golden target cut to 32 tokens, its choices neither certain nor even."""
    folder = tmp_path_factory.mktemp("small")
    weights = load_file(golden / "dart/target/model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(1)
    weights["model.embed_tokens.weight"] = embedding[:VOCABULARY].clone()
    # The last norm leaves rows of length 8: logits of standard deviation 2.
    head = torch.randn(VOCABULARY, embedding.shape[1], generator=generator) / 4
    weights["lm_head.weight"] = head.to(embedding.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((golden / "dart/target/config.json").read_text())
    config |= {"vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def draws(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--draws", default=4000)


def draw(running: Any, draws: int) -> Counts:
    """The answers to PROMPT by their tokens, for each setting."""
    counts: Counts = {}
    for name, fields in SETTINGS.items():
        params = {"max_new_tokens": TOKENS, "ignore_eos": True, **fields}
        counts[name] = Counter()
        for _ in range(draws // AT_ONCE):
            answers = running.generate(input_ids=[PROMPT] * AT_ONCE, sampling_params=params)
            counts[name].update(tuple(answer["output_ids"]) for answer in answers)
    return counts


@pytest.fixture(scope="module")
def plain(small_target: str, draws: int) -> tuple[Counts, list[list[int]]]:
    """Counts of plain decoding, and the texts that the drafter replays."""
    with engine(small_target, disable_overlap_schedule=True, max_total_tokens=POOL) as running:
        counts = draw(running, draws)
        certain = running.generate(input_ids=PROMPT, sampling_params=greedy(12))["output_ids"]
    common = [run for count in counts.values() for run, _ in count.most_common(3)]
    return counts, [PROMPT + certain] + [[*PROMPT, *run, *certain] for run in common]


@pytest.fixture(scope="module", params=["tree", "chain", "causal head"])
def speculative(
    request: pytest.FixtureRequest,
    plain: tuple[Counts, list[list[int]]],
    small_target: str,
    draws: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Counts, float]:
    """Counts under speculation, and its accept length on sampled answers of 12 tokens."""
    folder = tmp_path_factory.mktemp("drafter")
    flags: dict[str, Any] = {"speculative_num_draft_tokens": 16}
    if request.param == "causal head":
        # Random weights: twelve of 32 tokens at the first level are often enough.
        write_untrained_domino_drafter(Path(small_target), folder)
        change_config(folder, dartree_config={"cpu_rows": 4096})
        flags |= {"speculative_algorithm": "DARTREE", "speculative_num_steps": 2}
    else:
        write_script(folder, small_target, plain[1])
        flags |= {"speculative_algorithm": "DART"}
    if request.param == "chain":
        del flags["speculative_num_draft_tokens"]
        flags |= {"speculative_eagle_topk": 1}
    with engine(
        small_target,
        speculative_draft_model_path=str(folder),
        max_total_tokens=POOL,
        # Two samples must be independent, and engines of one seed are not.
        random_seed=1,
        **flags,
    ) as running:
        counts = draw(running, draws)
        params = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 5, "ignore_eos": True}
        longer = running.generate(input_ids=[PROMPT] * AT_ONCE, sampling_params=params)
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in longer]
    return counts, sum(lengths) / len(lengths)


def write_script(folder: Path, small_target: str, texts: list[list[int]]) -> None:
    """A drafter that replays texts, some tokens behind wrong elder siblings."""
    (folder / "config.json").write_text((Path(small_target) / "config.json").read_text())
    change_config(
        folder,
        architectures=["ScriptedDrafter"],
        levels=4,
        wrong_sibling=0.3,
        dart_config={"cpu_rows": 4096},
    )
    (folder / "script.json").write_text(json.dumps(texts))


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_law_of_three_tokens_is_that_of_plain_decoding(
    speculative: tuple[Counts, float],
    plain: tuple[Counts, list[list[int]]],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Chi-square of two samples of equal size; rare answers are taken together."""
    counts = (plain[0][name], speculative[0][name])
    both = counts[0] + counts[1]
    common = [run for run, count in both.items() if count >= 10]
    assert len(common) > 20, "the target must leave a choice"
    rare = [count.total() - sum(count[run] for run in common) for count in counts]
    table = [[count[run] for run in common] for count in counts]
    if sum(rare) >= 10:
        table = [[*row, rest] for row, rest in zip(table, rare, strict=True)]
    pvalue = stats.chi2_contingency(table).pvalue
    record_property("p", float(pvalue))
    print(f"{name}: p = {pvalue:.3f}, {len(table[0])} cells, {counts[0].total()} draws each")
    assert pvalue >= 1e-3


def test_drafts_were_accepted(speculative: tuple[Counts, float]) -> None:
    """So the comparison saw accepted tokens, not only first ones."""
    assert speculative[1] > 1.2
