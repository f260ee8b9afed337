"""Random candidates and ledgers, and trees as sets of paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_dart.types import Candidates, Tree


def random_candidates(
    bs: int, levels: int, width: int, seed: int, *, grid: int | None = None
) -> Candidates:
    """Distinct tokens a level, log-probabilities falling with rank; `grid` makes ties common."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.stack(
        [torch.randperm(10 * width, generator=generator)[:width] for _ in range(bs * levels)]
    ).view(bs, levels, width)
    log_prob = -torch.rand(bs, levels, width, generator=generator) * 3
    if grid:
        log_prob = (log_prob * grid).round() / grid
    return Candidates(token, log_prob.sort(dim=-1, descending=True).values)


def paths_of(tree: Tree, request: int) -> list[tuple[int, ...]]:
    """The path of every kept node beside the root, in node order."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    token, parent = tree.token[request].tolist(), tree.parent[request].tolist()
    for node in range(1, tree.width):
        if parent[node] >= 0:
            paths[node] = (*paths[parent[node]], token[node])
    return [path for node, path in paths.items() if node]


def check_tree(tree: Tree) -> None:
    """What holds for every tree: see types.Tree."""
    for request in range(tree.token.shape[0]):
        token, parent, depth, score = (
            column[request].tolist() for column in (tree.token, tree.parent, tree.depth, tree.score)
        )
        assert (parent[0], depth[0], score[0]) == (-1, 0, 0.0)
        used = sum(p >= 0 for p in parent) + 1
        siblings = set()
        for node in range(1, used):
            assert 0 <= parent[node] < node
            assert depth[node] == depth[parent[node]] + 1
            assert score[node] <= score[parent[node]]
            assert (parent[node], token[node]) not in siblings
            siblings.add((parent[node], token[node]))
        for node in range(used, tree.width):
            assert (token[node], parent[node], depth[node]) == (0, -1, 0)
            assert score[node] == -torch.inf


@pytest.fixture(scope="session")
def make_candidates() -> Callable[..., Candidates]:
    return random_candidates


@pytest.fixture(scope="session")
def tree_paths() -> Callable[[Tree, int], list[tuple[int, ...]]]:
    return paths_of


@pytest.fixture(scope="session")
def check() -> Callable[[Tree], None]:
    return check_tree


@pytest.fixture(scope="session", params=["torch", "cpp"])
def impl(request: pytest.FixtureRequest) -> str:
    """Every implementation of a step on the host."""
    if request.param == "cpp":
        pytest.importorskip("sglang_dart._core")
    return request.param
