"""Acceptance: the walk against brute force, the law against direct sampling, seeds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from scipy import stats

from sglang_dart.tree.pack import pack
from sglang_dart.types import Accepted, PackedTree, Tree
from sglang_dart.verify.accept import (
    SamplingLaw,
    accept_greedy,
    accept_sampled,
    accept_tokens,
    accept_visited,
    draw,
    parents,
)

LEVELS, VOCABULARY = 4, 7


def random_trees(
    rng: random.Random, bs: int, width: int, vocabulary: int = VOCABULARY, levels: int = LEVELS
) -> Tree:
    """Trees with distinct siblings, at most `levels` deep, each with some padding."""
    token = torch.zeros(bs, width, dtype=torch.int64)
    parent = torch.full((bs, width), -1, dtype=torch.int32)
    depth = torch.zeros(bs, width, dtype=torch.int32)
    score = torch.full((bs, width), float("-inf"))
    for i in range(bs):
        score[i, 0], token[i, 0] = 0, rng.randrange(vocabulary)
        used: set[tuple[int, int]] = set()
        node = 1
        for _ in range(3 * rng.randint(1, width)):
            above, drafted = rng.randrange(node), rng.randrange(vocabulary)
            if node == width or depth[i, above] == levels or (above, drafted) in used:
                continue
            used.add((above, drafted))
            token[i, node], parent[i, node] = drafted, above
            depth[i, node], score[i, node] = depth[i, above] + 1, -node
            node += 1
    return Tree(token, parent, depth, score)


def walk(tree: Tree, target: torch.Tensor, row: int) -> tuple[list[int], list[int]]:
    """Brute force: accepted nodes, and the target's token after each."""
    path, tokens = [0], [int(target[row, 0])]
    while True:
        children = [
            node
            for node in range(tree.width)
            if tree.parent[row, node] == path[-1] and tree.token[row, node] == tokens[-1]
        ]
        if not children:
            return path, tokens
        (child,) = children
        path.append(child)
        tokens.append(int(target[row, child]))


def along_tokens(tree: PackedTree, target: torch.Tensor) -> Accepted:
    return accept_tokens(tree, target, LEVELS)


def along_visited(tree: PackedTree, target: torch.Tensor) -> Accepted:
    return accept_visited(tree, LEVELS, lambda request, node: target[request, node])


def along_argmax(tree: PackedTree, target: torch.Tensor) -> Accepted:
    return accept_greedy(tree, torch.nn.functional.one_hot(target, VOCABULARY).float(), LEVELS)


@pytest.mark.parametrize("accept", [along_tokens, along_visited, along_argmax])
@pytest.mark.parametrize("width", [1, 2, 9, 33])
def test_walk_equals_brute_force(
    accept: Callable[[PackedTree, torch.Tensor], Accepted], width: int
) -> None:
    rng = random.Random(width)
    depths = set()
    for seed in range(30):
        torch.manual_seed(seed)
        trees = random_trees(rng, bs=5, width=width)
        target = torch.randint(0, 3, (5, width))
        accepted = accept(pack(trees, torch.randint(1, 99, (5,))), target)
        for row in range(5):
            path, tokens = walk(trees, target, row)
            count = len(path)
            assert accepted.length[row] == count
            assert accepted.node[row].tolist() == path + [-1] * (LEVELS + 1 - count)
            assert accepted.token[row, :count].tolist() == tokens
            depths.add(count)
    assert max(depths) >= min(width, 3)


def test_shapes_and_types() -> None:
    trees = random_trees(random.Random(0), bs=3, width=8)
    accepted = along_tokens(pack(trees, torch.ones(3, dtype=torch.int64)), trees.token)
    assert accepted.node.dtype == accepted.length.dtype == torch.int32
    assert accepted.token.dtype == torch.int64
    assert accepted.node.shape == accepted.token.shape == (3, LEVELS + 1)


def test_padding_that_holds_the_wanted_token_is_not_accepted() -> None:
    # 0 -> 1, and padding 2 with token 0, which is what the target wants after the root.
    tree = Tree(
        token=torch.tensor([[4, 5, 0]]),
        parent=torch.tensor([[-1, 0, -1]], dtype=torch.int32),
        depth=torch.tensor([[0, 1, 0]], dtype=torch.int32),
        score=torch.tensor([[0, -1, float("-inf")]]),
    )
    packed = pack(tree, torch.tensor([3]))
    for accept in (along_tokens, along_visited, along_argmax):
        accepted = accept(packed, torch.zeros(1, 3, dtype=torch.int64))
        assert accepted.length.tolist() == [1]
        assert accepted.node.tolist() == [[0, -1, -1, -1, -1]]


def test_parents() -> None:
    trees = random_trees(random.Random(3), bs=4, width=17)
    assert torch.equal(parents(pack(trees, torch.ones(4, dtype=torch.int64))), trees.parent.long())


def law(rows: int, **given: float) -> SamplingLaw:
    values = {"temperature": 1.0, "top_k": 2**30, "top_p": 1.0, "min_p": 0.0} | given
    sequential = bool(values.pop("sequential", False))
    return SamplingLaw(
        **{name: torch.full((rows,), value) for name, value in values.items()},
        top_p_after_top_k=sequential,
    )


def direct(logits: list[float], **given: float) -> list[float]:
    """The filtered law of one row in plain Python."""
    temperature = given.get("temperature", 1.0)
    weight = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(0).tolist()
    order = sorted(range(len(weight)), key=lambda token: -weight[token])
    kept = order[: int(given.get("top_k", len(order)))]
    counted = kept if given.get("sequential") else order
    total = sum(weight[token] for token in counted)
    before, nucleus = 0.0, []
    for token in counted:
        if before / total <= given.get("top_p", 1.0):
            nucleus.append(token)
        before += weight[token]
    kept = [token for token in kept if token in nucleus]
    kept = [token for token in kept if weight[token] >= given.get("min_p", 0.0) * weight[order[0]]]
    norm = sum(weight[token] for token in kept)
    return [weight[token] / norm if token in kept else 0.0 for token in range(len(weight))]


LAWS = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.6, "top_k": 4, "top_p": 0.7},
    {"temperature": 1.6, "top_k": 4, "top_p": 0.7, "sequential": 1},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.2, "sequential": 1},
]

#       0
#     / | \        siblings share parents, not tokens
#    1  2  3
#   / \    |
#  4   5   6
FIXED = Tree(
    token=torch.tensor([[3, 0, 4, 6, 2, 0, 1]]),
    parent=torch.tensor([[-1, 0, 0, 0, 1, 1, 3]], dtype=torch.int32),
    depth=torch.tensor([[0, 1, 1, 1, 2, 2, 2]], dtype=torch.int32),
    score=torch.arange(0, -7, -1).float().unsqueeze(0),
)


@pytest.mark.parametrize("given", LAWS, ids=str)
@pytest.mark.parametrize("seeded", [False, True])
def test_committed_tokens_follow_the_target(given: dict[str, float], seeded: bool) -> None:
    draws = 40_000
    torch.manual_seed(1)
    logits = torch.randn(1, 7, VOCABULARY) * 1.5
    trees = Tree(*(getattr(FIXED, name).expand(draws, 7) for name in vars(FIXED)))
    packed = pack(trees, torch.full((draws,), 5))
    laws = law(draws, **given)
    if seeded:
        laws = SamplingLaw(**vars(laws) | {"seed": torch.arange(draws) * 7919 + 11})
    generator = torch.Generator().manual_seed(2)
    accepted = accept_sampled(packed, logits.expand(draws, 7, VOCABULARY), laws, 2, generator)

    # Probability of every possible run: the product of the target's laws along the path.
    expected: dict[tuple[int, ...], float] = {}
    rows = [direct(row, **given) for row in logits[0].tolist()]

    def extend(node: int, run: tuple[int, ...], chance: float) -> None:
        for token in range(VOCABULARY):
            child = [
                i for i in range(7) if FIXED.parent[0, i] == node and FIXED.token[0, i] == token
            ]
            if child:
                extend(child[0], (*run, token), chance * rows[node][token])
            else:
                expected[(*run, token)] = chance * rows[node][token]

    extend(0, (), 1.0)
    seen: dict[tuple[int, ...], int] = dict.fromkeys(expected, 0)
    for run, length in zip(accepted.token.tolist(), accepted.length.tolist(), strict=True):
        seen[tuple(run[:length])] += 1
    impossible = sum(seen[run] for run, chance in expected.items() if chance == 0)
    assert impossible == 0
    frequent = [run for run, chance in expected.items() if chance * draws >= 5]
    rest = draws - sum(seen[run] for run in frequent)
    observed = [seen[run] for run in frequent] + [rest] * (rest > 0)
    chances = [expected[run] for run in frequent] + [1 - sum(expected[r] for r in frequent)] * (
        rest > 0
    )
    scale = sum(observed) / sum(chances)
    assert stats.chisquare(observed, [c * scale for c in chances]).pvalue > 1e-3


@pytest.mark.parametrize("given", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}], ids=str)
def test_with_a_seed_speculation_equals_plain_sampling(given: dict[str, float]) -> None:
    """A Markov target: the law after a token depends on that token alone."""
    rng, bs, length = random.Random(4), 6, 40
    torch.manual_seed(4)
    after = torch.randn(VOCABULARY, VOCABULARY)
    laws = law(bs, **given)
    laws = SamplingLaw(**vars(laws) | {"seed": torch.tensor([1, 1, 42, -5, 2**40, 0])})
    first = torch.tensor([2, 2, 0, 1, 6, 3])
    filters = laws.filters(VOCABULARY)

    plain = [[token] for token in first.tolist()]
    for position in range(length):
        last = torch.tensor([row[-1] for row in plain])
        drawn = draw(after[last], laws, torch.full((bs,), position), filters)
        for row, token in zip(plain, drawn.tolist(), strict=True):
            row.append(token)

    output, longest = [[token] for token in first.tolist()], 0
    while min(map(len, output)) < length:
        trees = random_trees(rng, bs, width=12)
        trees.token[:, 0] = torch.tensor([row[-1] for row in output])
        packed = pack(trees, torch.tensor([len(row) - 1 for row in output]))
        accepted = accept_sampled(packed, after[trees.token], laws, LEVELS)
        for i, row in enumerate(output):
            row += accepted.token[i, : accepted.length[i]].tolist()
        longest = max(longest, int(accepted.length.max()))
    assert longest >= 3
    for row, want in zip(output, plain, strict=True):
        assert row[:length] == want[:length]
    # Equal seeds and prompts give equal answers; another seed another one.
    assert output[0][:length] == output[1][:length]
    assert output[0][:length] != output[2][:length]


def test_greedy_rows_beside_sampled_ones() -> None:
    torch.manual_seed(0)
    trees = random_trees(random.Random(9), bs=64, width=12)
    packed = pack(trees, torch.ones(64, dtype=torch.int64))
    logits = torch.randn(64, 12, VOCABULARY)
    laws = law(64)
    laws.top_k[::2] = 1
    mixed = accept_sampled(packed, logits, laws, LEVELS)
    greedy = accept_greedy(packed, logits, LEVELS)
    assert torch.equal(mixed.node[::2], greedy.node[::2])
    assert torch.equal(mixed.token[::2, 0], greedy.token[::2, 0])
    assert not torch.equal(mixed.token[1::2, 0], greedy.token[1::2, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tokens_on_a_gpu_without_host_sync() -> None:
    trees = random_trees(random.Random(5), bs=7, width=60)
    packed = pack(trees, torch.ones(7, dtype=torch.int64))
    target = torch.randint(0, 3, (7, 60))
    want = accept_tokens(packed, target, LEVELS)
    device = PackedTree(**{name: part.cuda() for name, part in vars(packed).items()})
    on_device = target.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = accept_tokens(device, on_device, LEVELS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in vars(want):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name))


def test_every_law_keeps_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    for top_k, top_p, min_p in itertools.product((1, 2, 9), (0.0, 0.5, 1.0), (0.0, 1.0)):
        one = law(1, top_k=top_k, top_p=top_p, min_p=min_p)
        if min(top_k - 1, top_p, 1 - min_p) <= 0:
            assert draw(logits, one, torch.zeros(1)).tolist() == [1]
