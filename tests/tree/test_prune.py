"""The kept nodes: the right ones, in ledger order, renumbered, padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dart.tree.prune import prune
from sglang_dart.types import Ledger


def random_ledger(bs: int, size: int, seed: int, *, grid: bool) -> Ledger:
    """Random trees whose scores never rise along a path; some places are unused."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.full((bs, size), -1)
    depth = torch.zeros(bs, size, dtype=torch.int64)
    score = torch.zeros(bs, size)
    for node in range(1, size):
        parent[:, node] = torch.randint(node, (bs,), generator=generator)
        up = parent[:, node, None]
        depth[:, node] = depth.gather(1, up)[:, 0] + 1
        step = -torch.rand(bs, generator=generator)
        step = step.round() if grid else step
        unused = torch.rand(bs, generator=generator) < 0.1
        score[:, node] = score.gather(1, up)[:, 0] + step.masked_fill(unused, -torch.inf)
    token = torch.stack([torch.randperm(999, generator=generator)[:size] for _ in range(bs)])
    return Ledger(token, parent.int(), depth.int(), score)


@given(
    bs=st.sampled_from([1, 3]),
    size=st.sampled_from([1, 3, 17, 65]),
    budget=st.sampled_from([1, 3, 17, 65]),
    bonus=st.sampled_from([0.0, -0.25]),
    seed=st.integers(0, 999),
    grid=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_keeps_the_best(impl, check, bs, size, budget, bonus, seed, grid):
    ledger = random_ledger(bs, size, seed, grid=grid)
    tree = prune(ledger, budget, bonus, impl=impl)
    assert tree.width == budget + 1
    check(tree)
    for i in range(bs):
        nodes = [n for n in range(1, size) if ledger.score[i, n] > -torch.inf]
        rank = ledger.score[i] + ledger.depth[i] * bonus
        nodes.sort(key=lambda n: (-rank[n].item(), n))
        kept = [0, *sorted(nodes[:budget])]
        count = len(kept)
        assert tree.token[i, :count].tolist() == ledger.token[i, kept].tolist()
        assert tree.score[i, :count].tolist() == ledger.score[i, kept].tolist()
        parents = [-1] + [kept.index(int(ledger.parent[i, n])) for n in kept[1:]]
        assert tree.parent[i, :count].tolist() == parents
        assert (tree.parent[i, count:] == -1).all()


def test_ledger_is_left_alone(impl):
    ledger = random_ledger(2, 17, 0, grid=False)
    before = ledger.score.clone()
    prune(ledger, 3, impl=impl)
    assert torch.equal(ledger.score, before)


def test_types(impl):
    tree = prune(random_ledger(1, 3, 0, grid=False), 5, impl=impl)
    kinds = [column.dtype for column in (tree.token, tree.parent, tree.depth, tree.score)]
    assert kinds == [torch.int64, torch.int32, torch.int32, torch.float32]


@pytest.mark.parametrize(("budget", "bonus"), [(0, 0.0), (4, 0.5)])
def test_bounds(impl, budget, bonus):
    with pytest.raises(ValueError, match="must be at"):
        prune(random_ledger(1, 3, 0, grid=False), budget, bonus, impl=impl)
