"""The planner at every width: a root alone, a chain, a tree."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.tree.plan import TreePlanner, root_only
from sglang_dart.tree.recipe import beam, pruned

RECIPES = {"chain": None, "beam": beam, "pruned": pruned}


@pytest.mark.parametrize("width", [1, 2, 5, 9, 30])
@pytest.mark.parametrize("name", RECIPES)
def test_value_is_what_nodes_are_kept_by(make_candidates, check, name, width):
    planner = TreePlanner(RECIPES[name], levels=4, candidates=6)
    if name == "chain":
        width = min(width, 5)
    tail = torch.tensor([[3], [4]])
    length, end = torch.tensor([7, 9]), torch.full((2, 1), -1)
    tree, packed = planner.plan(make_candidates(2, 4, 6, seed=0), tail, length, width, end)
    check(tree)
    assert packed.token[:, 0].tolist() == [3, 4]
    assert packed.token.shape == tree.token.shape == (2, width)
    bonus = -0.2 if name == "pruned" else 0.0
    value = planner.value(tree)
    torch.testing.assert_close(value, tree.score + bonus * tree.depth)
    assert (value[:, 0] == 0).all()


def test_roots_alone_are_laid_out_as_kernels_want_them() -> None:
    tail = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tree, packed = root_only(tail[:, -1], torch.tensor([7, 9]))
    assert tree.token.tolist() == packed.token.tolist() == [[3], [6]]
    assert packed.position.tolist() == [[7], [9]]
    links = (packed.token, packed.position, packed.first_child, packed.next_sibling)
    assert all(column.stride() == (1, 1) for column in links)
    assert packed.mask.all()
