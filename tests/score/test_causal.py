"""The same loop serves DARTree: a causal head's trees against the reference's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sglang_dart.score.causal import Causal
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, chain, fixed, pruned

GOLDEN = Path(__file__).parents[1] / "golden/dartree"
CASES = json.loads((GOLDEN / "domino_cases.json").read_text())
TENSORS = load_file(GOLDEN / "domino_tensors.safetensors")
EMBEDDING = load_file(GOLDEN / "target/model.safetensors")["model.embed_tokens.weight"]
MODELS = ("domino_shift", "domino_noshift")
WEIGHTS = {model: load_file(GOLDEN / model / "model.safetensors") for model in MODELS}
TOLERANCE = 5e-5

# Trees of 2 prompts x 3 rounds x several settings, per model.
EVERY = [
    pytest.param(model, case, number, id=f"{case['key']}.t{number}")
    for model in MODELS
    for case in CASES[model]["cases"]
    for number in range(len(case["trees"]))
]


class DominoHead:
    """The Domino head in plain torch: a recurrent prefix encoder and a low-rank correction."""

    def __init__(self, model: str, case: dict[str, Any], candidates: int) -> None:
        weights, key = WEIGHTS[model], case["key"]
        base = TENSORS[f"{key}.base_logits"][None]
        hidden = TENSORS[f"{key}.hidden"][-base.shape[1] :]
        self._base, self.token = base.topk(candidates, dim=-1)
        width = hidden.shape[1]
        into = weights["embed_proj.0.weight"]
        self._hidden_part = hidden @ into[:, :width].T
        self._state_weight = into[:, width:]
        self._out = weights["embed_proj.2.weight"][self.token[0]]
        self._weights = weights
        self._root = torch.tensor([[case["root"]]])

    def initial_state(self) -> torch.Tensor:
        return self.step(torch.zeros(1, 1, 32), self._root)

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        base = self._base[:, level, None].expand(1, state.shape[1], -1)
        if level < 1:
            return base
        inner = F.silu(self._hidden_part[level] + state @ self._state_weight.T)
        return base + inner @ self._out[level].T

    def step(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        reset_i, update_i, new_i = (
            EMBEDDING[token] @ self._weights["prefix_gru.weight_ih_l0"].T
        ).chunk(3, dim=-1)
        reset_h, update_h, new_h = (state @ self._weights["prefix_gru.weight_hh_l0"].T).chunk(
            3, dim=-1
        )
        update = torch.sigmoid(update_i + update_h)
        new = torch.tanh(new_i + torch.sigmoid(reset_i + reset_h) * new_h)
        return (1 - update) * new + update * state


def recipe_of(tree: dict[str, Any]) -> TreeRecipe:
    if tree["variant"] == "fixed":
        return fixed(tree["budget"])
    return pruned(tree["budget"], min(tree["width"], tree["effective_k"]), tree["depth_bonus"])


@pytest.mark.parametrize(("model", "case", "number"), EVERY)
def test_tree_equals_the_reference(model, case, number):
    expected = case["trees"][number]
    head = DominoHead(model, case, expected["normaliser_candidates"])
    recipe = recipe_of(expected)
    ledger = grow(Causal(head, expected["effective_k"]), recipe, torch.tensor([case["root"]]))
    supertree = expected["supertree"]
    assert ledger.token[0, 1:].tolist() == supertree["tokens"]
    assert ledger.parent[0].tolist() == supertree["parents"]
    assert ledger.depth[0, 1:].tolist() == supertree["depths"]
    scores = torch.tensor(supertree["scores"])
    torch.testing.assert_close(ledger.score[0], scores, atol=TOLERANCE, rtol=0)

    tree = prune(ledger, recipe.budget, recipe.depth_bonus)
    count = len(expected["parents"])
    assert tree.token[0, 1:count].tolist() == expected["tokens"]
    assert tree.parent[0, :count].tolist() == expected["parents"]
    assert tree.depth[0, 1:count].tolist() == expected["depths"]
    assert (tree.parent[0, count:] == -1).all()

    packed = pack(tree, torch.tensor([case["start"]]))
    assert packed.position[0, :count].tolist() == expected["positions"]
    mask = TENSORS[f"{case['key']}.t{number}.mask"].bool()
    assert torch.equal(packed.mask[0, :count, :count], mask)


@pytest.mark.parametrize("model", MODELS)
def test_chain_equals_the_greedy_chain(model):
    """One node a level with the whole vocabulary is the plain Domino chain."""
    for case in CASES[model]["cases"]:
        levels = CASES[model]["gamma"]
        head = DominoHead(model, case, candidates=257)
        ledger = grow(Causal(head), chain(levels), torch.tensor([case["root"]]))
        assert ledger.token[0].tolist() == case["chain_tokens"]
