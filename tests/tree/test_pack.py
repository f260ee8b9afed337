"""Packed trees against their definition."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.tree.pack import pack
from sglang_dart.types import Tree


def tree_of(parents: list[list[int]]) -> Tree:
    """Trees from parents (-1 behind the root: padding), other columns filled in."""
    parent = torch.tensor(parents, dtype=torch.int32)
    depth = torch.zeros_like(parent)
    for node in range(1, parent.shape[1]):
        up = parent[:, node]
        above = depth.gather(1, up.clamp(min=0).long()[:, None])[:, 0]
        depth[:, node] = torch.where(up >= 0, above + 1, 0)
    return Tree(
        torch.arange(parent.numel()).view_as(parent), parent, depth, torch.zeros(parent.shape)
    )


def test_by_hand(impl):
    """      0
           / | \
          1  2  3      6 is padding
         /      |
        4       5
    """
    packed = pack(tree_of([[-1, 0, 0, 0, 1, 3, -1]]), torch.tensor([10]), impl=impl)
    assert packed.position.tolist() == [[10, 11, 11, 11, 12, 12, 10]]
    assert packed.first_child.tolist() == [[1, 4, -1, 5, -1, -1, -1]]
    assert packed.next_sibling.tolist() == [[-1, 2, 3, -1, -1, -1, -1]]
    seen = [row.nonzero().flatten().tolist() for row in packed.mask[0]]
    assert seen == [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 3, 5], [6]]


@pytest.mark.parametrize("width", [1, 2, 3, 17, 65])
@pytest.mark.parametrize("shape", ["random", "chain", "star", "root only"])
def test_by_definition(impl, width, shape):
    generator = torch.Generator().manual_seed(width)
    parents = {
        "random": [int(torch.randint(max(n, 1), (), generator=generator)) for n in range(width)],
        "chain": [n - 1 for n in range(width)],
        "star": [0] * width,
        "root only": [-1] * width,
    }[shape]
    parents[0] = -1
    other = [-1] + [0] * (width - 1)
    tree = tree_of([parents, other])
    packed = pack(tree, torch.tensor([0, 5]), impl=impl)
    assert packed.mask.shape == (2, width, width)
    for i, row in enumerate([parents, other]):
        for node in range(width):
            children = [n for n in range(node + 1, width) if row[n] == node]
            linked, child = [], int(packed.first_child[i, node])
            while child >= 0:
                linked.append(child)
                child = int(packed.next_sibling[i, child])
            assert linked == children
            line = [node]
            while row[line[-1]] >= 0:
                line.append(row[line[-1]])
            assert packed.mask[i, node].nonzero().flatten().tolist() == sorted(line)
    assert torch.equal(packed.position, torch.tensor([[0], [5]]) + tree.depth)
    assert packed.position.dtype == packed.first_child.dtype == torch.int64
