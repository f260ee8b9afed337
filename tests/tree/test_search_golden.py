"""The beam recipe with continuity against the trees of the DART release."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dart.score.continuity import Continuity
from sglang_dart.score.marginal import Marginal
from sglang_dart.tree.grow import grow
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import beam
from sglang_dart.types import Candidates, Tree

CASES = json.loads((Path(__file__).parents[1] / "golden/dart/search_cases.json").read_text())[
    "cases"
]
TOLERANCE = 5e-5


def candidates_of(case) -> Candidates:
    """Ragged levels, padded with unused ranks."""
    width = max(len(level) for level in case["topk_tokens"])
    token = torch.zeros(1, case["levels"], width, dtype=torch.int64)
    log_prob = torch.full((1, case["levels"], width), -torch.inf)
    for level in range(case["levels"]):
        tokens, probs = case["topk_tokens"][level], case["topk_probs"][level]
        token[0, level, : len(tokens)] = torch.tensor(tokens)
        log_prob[0, level, : len(tokens)] = torch.log(torch.tensor(probs) + case["eps"])
    return Candidates(token, log_prob)


def search(case, model) -> tuple[Tree, int]:
    tail = torch.tensor([case["prompt_tokens"]])
    padding = torch.full((1, max(0, model.order - 1 - tail.shape[1])), -1)
    scorer = Continuity(
        Marginal(candidates_of(case), 0.9),
        model,
        torch.cat([padding, tail], dim=1),
        case["ngram_weight"],
    )
    recipe = beam(case["budget"], case["beam_width"], 0.7)
    end = torch.tensor([[case["eos_token_id"], -1]])
    ledger = grow(scorer, recipe, torch.tensor([case["root_token"]]), end)
    scored = int((ledger.score > -torch.inf).sum()) - 1
    return prune(ledger, recipe.budget), scored


def canonical(token, parent, depth, score):
    """Nodes beside the root as {path: score}, by walking the parents."""
    paths = {0: ()}
    for index in range(1, len(parent)):
        if parent[index] >= 0:
            paths[index] = (*paths[parent[index]], token[index])
            assert depth[index] == len(paths[index])
    return {path: score[index] for index, path in paths.items() if index}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_tree_equals_the_release(case, golden_ngram):
    tree, scored = search(case, golden_ngram(case["trie"]))
    assert scored == case["scored_paths"]
    assert tree.width == case["budget"] + 1
    got = canonical(
        *(column[0].tolist() for column in (tree.token, tree.parent, tree.depth, tree.score))
    )
    expected = canonical(
        *(
            [first, *case[name]]
            for first, name in ((0, "tokens"), (-1, "parents"), (0, "depths"), (0.0, "scores"))
        )
    )
    assert got.keys() == expected.keys()
    for path, score in expected.items():
        assert abs(got[path] - score) < TOLERANCE
    if case["ties"]:
        multiset = np.sort(np.array(list(got.values()), dtype=np.float32))
        np.testing.assert_allclose(multiset, np.sort(case["score_multiset"]), atol=TOLERANCE)
