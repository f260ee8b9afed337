"""DARTREE's whole round against the releases: trees, accepted paths and tokens of every run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dart.draft.drafter import Roots
from sglang_dart.options import DartreeOptions
from sglang_dart.reference import draft_tree, generate
from sglang_dart.types import Candidates
from tests import dartree

RUNS = dartree.read("domino_e2e_greedy.json")
CHAINS = dartree.read("domino_chain_e2e.json")
PLAIN = dartree.read("dflash_cases.json")
SCORE_TOLERANCE = 5e-5


def name_of(run: dict[str, Any]) -> str:
    stop = ".stop" if run["stop_token_ids"] else ""
    return f"{run['model']}.p{run['prompt_index']}.{run['variant']}.b{run['budget']}{stop}"


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(
        dartree.GOLDEN / "target", dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def trees():
    return np.load(dartree.GOLDEN / "domino_e2e_trees.npz")


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_greedy_run_equals_the_release(run, target, trees):
    options = DartreeOptions(
        variant=run["variant"],
        budget=run["budget"],
        candidates=run["candidate_k"],
        width=run["width"],
        depth_bonus=min(0.0, run["depth_bonus"]),
    )
    generation = generate(
        target,
        dartree.drafter(run["model"]),
        run["prompt"],
        run["max_new_tokens"],
        options=options,
        end=run["stop_token_ids"] or (),
    )
    assert generation.tokens == run["generated"]
    # The release goes on until the root, too, is beyond the limit.
    count = len(generation.rounds)
    assert count >= len(run["rounds"]) - 1
    for number, (round, golden) in enumerate(zip(generation.rounds, run["rounds"], strict=False)):
        tree, key = round.tree, f"{name_of(run)}.r{number}"
        parents = trees[f"{key}.parents"]
        used = len(parents)
        assert tree.token[0, 0] == golden["root"]
        assert tree.token[0, 1:used].tolist() == trees[f"{key}.tokens"].tolist()
        assert tree.parent[0, :used].tolist() == parents.tolist()
        assert (tree.parent[0, used:] == -1).all()
        scores = torch.from_numpy(trees[f"{key}.scores"]).float()
        torch.testing.assert_close(tree.score[0, :used], scores, atol=SCORE_TOLERANCE, rtol=0)
        assert round.path == golden["accepted_nodes"]
        assert round.token[-1] == golden["next_root"]


@pytest.mark.parametrize("run", CHAINS, ids=lambda run: f"{run['model']}.p{run['prompt_index']}")
def test_chain_advances_as_the_release(run, target):
    """The release's chain scores the whole vocabulary."""
    prompt = RUNS[0]["prompt"] if run["prompt_index"] == 0 else PLAIN["prompts"][1]
    generation = generate(
        target,
        dartree.drafter(run["model"]),
        prompt,
        64,
        options=DartreeOptions(variant="chain", candidates=257),
    )
    lengths = [len(round.token) for round in generation.rounds]
    assert lengths == run["tokens_advanced_per_round"][: len(lengths)]
    assert len(lengths) >= len(run["tokens_advanced_per_round"]) - 1


@pytest.mark.parametrize("run", PLAIN["e2e"], ids=lambda run: f"p{run['prompt_index']}")
def test_plain_drafter_as_a_chain_equals_the_release(run, target):
    generation = generate(
        target,
        dartree.drafter("dflash_plain"),
        PLAIN["prompts"][run["prompt_index"]],
        run["max_new_tokens"],
        options=DartreeOptions(variant="chain"),
    )
    assert generation.tokens == run["generated"]
    lengths = [len(round.token) for round in generation.rounds]
    assert lengths == run["tokens_advanced_per_round"][: len(lengths)]


@pytest.mark.parametrize(
    "case", PLAIN["ddtree"], ids=lambda case: f"{case['key']}.b{case['budget']}"
)
def test_marginal_tree_equals_the_release(case):
    """The same nodes with the same scores; the release numbers them as its heap pops them."""
    logits = dartree.tensors("dflash_tensors.safetensors")[f"{case['key']}.logits"][1:]
    value, token = logits.log_softmax(-1).topk(257)
    options = DartreeOptions(budget=case["budget"], candidates=257)
    candidates = Candidates(token[None], value[None])
    tree = draft_tree(dartree.drafter("dflash_plain"), candidates, [0], options)
    expected = paths(case["tokens"], case["parents"], case["scores"])
    got = paths(*(c[0].tolist() for c in (tree.token[:, 1:], tree.parent, tree.score)))
    assert got.keys() == expected.keys()
    for path, score in expected.items():
        assert got[path] == pytest.approx(score, abs=SCORE_TOLERANCE)


def paths(tokens: list[int], parents: list[int], scores: list[float]) -> dict[tuple, float]:
    """The score of every node beside the root, by its path. Parents may come in any order."""
    made = {}
    for node in range(1, len(parents)):
        path, at = (), node
        if parents[node] < 0:
            continue
        while at > 0:
            path, at = (tokens[at - 1], *path), parents[at]
        made[path] = scores[node]
    return made


def test_tree_accepts_more_than_chain(target):
    """On the text that the golden drafters were fitted to."""
    drafter, prompt = dartree.drafter("domino_shift"), RUNS[0]["prompt"]
    lengths = {
        variant: generate(
            target, drafter, prompt, 64, options=DartreeOptions(variant=variant)
        ).accept_length
        for variant in ("pruned", "fixed", "chain")
    }
    assert lengths["pruned"] >= lengths["fixed"] >= lengths["chain"] > 1


@pytest.mark.parametrize("variant", ["pruned", "fixed"])
def test_path_variants_need_a_head(target, variant):
    with pytest.raises(ValueError, match=f"variant {variant} needs a drafter with a causal head"):
        generate(
            target, dartree.drafter("dflash_plain"), [1], 4, options=DartreeOptions(variant=variant)
        )


@pytest.mark.parametrize("name", ["domino_shift", "domino_noshift", "dflash_plain"])
def test_draft_kv_equals_that_of_a_fresh_prefill(target, name):
    """Whatever was accepted on the way, the context rows are those of the committed text."""
    prompt = RUNS[0]["prompt"]
    grown, fresh = dartree.drafter(name), dartree.drafter(name)
    generation = generate(target, grown, prompt, 40)
    # The last token is a root: no row of it exists.
    text = [*prompt, *(generation.rounds[0].tree.token[0, 0].tolist(),)]
    text += [token for round in generation.rounds for token in round.token]
    generate(target, fresh, text[:-1], 1)
    rows = slice(1, len(text))
    for mine, other in ((grown.kv.key, fresh.kv.key), (grown.kv.value, fresh.kv.value)):
        torch.testing.assert_close(mine[:, rows], other[:, rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["pruned", "marginal"])
def test_sampled_tokens_follow_the_target(target, variant):
    """The second token's frequencies against its exact probabilities, by a chi-square bound."""
    prompt, temperature, draws = [77, 133, 51], 0.5, 120
    drafter = dartree.drafter("domino_shift")
    with torch.no_grad():
        first = torch.softmax(target(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
        likely = first.topk(8).indices
        follow = torch.tensor([[*prompt, token] for token in range(257)])
        second = torch.softmax(target(follow).logits[:, -1] / temperature, -1)
    expected = first @ second  # [257]
    generator = torch.Generator().manual_seed(5)
    options = DartreeOptions(variant=variant, budget=8, candidates=12, width=3)
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
    assert common.any()
    assert first[likely].sum() < 0.99, "a sure first token would test nothing"
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]) * draws
    statistic = ((observed - wanted).square() / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_mask_is_a_token_like_any_other(target):
    """A prompt may contain the mask token; the output is plain decoding's."""
    prompt = [5, 256, 9]
    generation = generate(target, dartree.drafter("domino_shift"), prompt, 10)
    text = list(prompt)
    for _ in range(10):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    assert generation.tokens == text[len(prompt) :]


def test_roots_need_no_feature(target):
    """Block drafters read the context alone: see Roots.last_feature."""
    drafter = dartree.drafter("dflash_plain")
    roots = Roots(*(torch.zeros(1, *shape, dtype=torch.int64) for shape in ((), (), (192,), (4,))))
    poisoned = dataclasses.replace(roots, last_feature=torch.full((1, 192), torch.nan))
    assert torch.equal(drafter.draft_logits(roots), drafter.draft_logits(poisoned))
