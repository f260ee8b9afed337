"""The whole round against the DART release: trees, accepted lengths and tokens of every run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dart.options import DartOptions
from sglang_dart.reference import generate

GOLDEN = Path(__file__).parent / "golden/dart"
RUNS = json.loads((GOLDEN / "e2e_greedy.json").read_text())["runs"]
# Below this the release's choice of a candidate or a node hangs on float noise.
GAP = 2e-5


def name_of(run) -> str:
    # One run has an end token that the text does contain.
    stop = "" if run["eos_token_id"] == 256 else ".eos"
    return f"b{run['budget']}.p{run['prompt_index']}{stop}"


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(
        GOLDEN / "target", dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def trees():
    return np.load(GOLDEN / "e2e_trees.npz")


def paths_of(tree) -> set[tuple[int, ...]]:
    paths, parent = {0: ()}, tree.parent[0].tolist()
    for node in range(1, tree.width):
        if parent[node] >= 0:
            paths[node] = (*paths[parent[node]], int(tree.token[0, node]))
    return set(paths.values()) - {()}


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_greedy_run_equals_the_release(run, target, golden_drafter, golden_ngram, trees):
    options = DartOptions(budget=run["budget"])
    end = (run["eos_token_id"],)
    limit = run["max_new_tokens"]
    generation = generate(
        target,
        golden_drafter(),
        run["prompt"],
        limit,
        options=options,
        ngram=golden_ngram("ngram_order3.trie"),
        end=end,
    )
    expected = run["ar_tokens"][:limit]
    if end[0] in expected:
        expected = expected[: expected.index(end[0]) + 1]
    assert generation.tokens == expected

    # The release goes on until the root, too, is beyond the limit.
    count = len(generation.rounds)
    assert count >= len(run["tokens_emitted_per_round"]) - 1
    lengths = [len(round.token) for round in generation.rounds]
    assert lengths == run["tokens_emitted_per_round"][:count]
    compared = 0
    for number, (round, golden) in enumerate(zip(generation.rounds, run["rounds"], strict=False)):
        assert round.tree.token[0, 0] == golden["root"]
        gaps = (golden["tree_cut_gap"], golden["topk_boundary_gap"])
        if min(gap for gap in gaps if gap is not None) > GAP:
            rows = trees[f"{name_of(run)}.r{number}.paths"]
            assert paths_of(round.tree) == {tuple(row[row >= 0].tolist()) for row in rows}
            compared += 1
    assert compared > 0.9 * count


def plain(target, ids, count):
    text = list(ids)
    for _ in range(count):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("budget", [1, 2, 7])
@pytest.mark.parametrize("prompt", [[5], [200, 3]])
def test_output_is_plain_decoding_for_any_tree(target, golden_drafter, budget, prompt):
    options = DartOptions(budget=budget, candidates=3, beam=2)
    generation = generate(target, golden_drafter(), prompt, 12, options=options)
    assert generation.tokens == plain(target, prompt, 12)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_limit(target, golden_drafter, limit):
    generation = generate(target, golden_drafter(), [1, 2, 3], limit)
    assert len(generation.tokens) == limit
    assert bool(generation.rounds) == (limit > 1)


def test_sampled_tokens_follow_the_target(target, golden_drafter):
    """The second token's frequencies against its exact probabilities, by a chi-square bound."""
    prompt, temperature, draws = [77, 133, 51], 0.35, 120
    drafter = golden_drafter()
    options = DartOptions(budget=8, candidates=6, beam=3)
    with torch.no_grad():
        first = torch.softmax(target(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
        follow = torch.tensor([[*prompt, token] for token in range(257)])
        second = torch.softmax(target(follow).logits[:, -1] / temperature, -1)
    expected = first @ second  # [257]
    generator = torch.Generator().manual_seed(11)
    counts = torch.zeros(257)
    for _ in range(draws):
        tokens = generate(
            target,
            drafter,
            prompt,
            2,
            options=options,
            temperature=temperature,
            generator=generator,
        ).tokens
        counts[tokens[1]] += 1
    common = expected * draws >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]) * draws
    statistic = ((observed - wanted).square() / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_empty_prompt_is_refused(target, golden_drafter):
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(target, golden_drafter(), [], 4)
