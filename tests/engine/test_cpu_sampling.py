"""Sampling on trees, against SGLang's own sampling functions applied token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_dart.engine import sampling
from sglang_dart.engine.sampling import TreeSampler
from sglang_dart.types import PackedTree
from tests.engine.fake_batch import (
    LEVELS,
    PENALTIES,
    VOCABULARY,
    WIDTH,
    Batch,
    path_tokens,
    random_tree,
    request,
    run_of,
    upstream_penalties,
)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """SGLang compiles small functions of its sampler; not worth it here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def plain_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's sampling functions, without the process-wide state that its Sampler needs."""

    def sample(output: Any, info: Any, *rest: Any) -> torch.Tensor:
        logits, positions = output.next_token_logits, rest[-1]
        if info.is_all_greedy:
            return logits.argmax(-1)
        probs = torch.softmax(logits.div_(info.temperatures), -1)
        if info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling:
            return top_k_top_p_min_p_sampling_from_probs_torch(
                probs,
                info.top_ks,
                info.top_ps,
                info.min_ps,
                info.need_min_p_sampling,
                info.sampling_seed,
                positions,
                max_top_k=info.max_top_k,
            )
        return sampling_from_probs_torch(probs, info.sampling_seed, positions)

    monkeypatch.setattr(sampling, "_sampler", lambda: sample)


def sample(batch: Batch, tree: PackedTree, logits: torch.Tensor, **given: Any) -> Any:
    verify_input = SimpleNamespace(tree=tree, max_tree_depth=LEVELS + 1)
    output = SimpleNamespace(next_token_logits=logits)
    sampler = given.pop("sampler", TreeSampler())
    return sampler.sample(must_not_be_called, verify_input, batch, output, **given)


def must_not_be_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("upstream's sampling was called")


def runs(tree: PackedTree, verdict: Any) -> list[list[int]]:
    """Committed tokens, read from upstream's tuple as `run_eagle_verify` reads them."""
    predict, lens, index = verdict
    assert predict.dtype == lens.dtype == index.dtype == torch.int32
    assert index.shape == (tree.token.shape[0], LEVELS + 1)
    committed = []
    for row, length in enumerate(lens.tolist()):
        nodes = index[row].tolist()
        assert all(node < 0 for node in nodes[length:])
        assert all(node // WIDTH == row for node in nodes[:length])
        committed.append(predict[nodes[:length]].tolist())
    return committed


def plain_walk(tree: PackedTree, row: int, choose: Callable[[int, int], int]) -> list[int]:
    """Token after token as plain decoding chooses them, while the tree has drafted them."""
    node, tokens = 0, list[int]()
    while True:
        tokens.append(choose(row, node))
        child = tree.first_child[row, node]
        while child >= 0 and tree.token[row, child] != tokens[-1]:
            child = tree.next_sibling[row, child]
        if child < 0:
            return tokens
        node = int(child)


def test_greedy_with_penalties_and_bias_equals_plain_decoding() -> None:
    longest = max(_penalised_greedy(seed) for seed in range(40))
    assert longest >= 3


def _penalised_greedy(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    outputs = [[rng.randrange(VOCABULARY) for _ in range(3)] for _ in PENALTIES]
    reqs = [
        request([2, 3], output, **params) for output, params in zip(outputs, PENALTIES, strict=True)
    ]
    batch = Batch(reqs, rows=12)
    bias = torch.zeros(len(reqs), VOCABULARY)
    bias[::2, 4] = -100
    batch.sampling_info.logit_bias = bias
    tree = random_tree(rng, batch)
    logits = torch.randn(len(reqs), WIDTH, VOCABULARY) * 2
    used = logits.clone()
    committed = runs(tree, sample(batch, tree, used.view(-1, VOCABULARY)))

    def after(row: int, node: int) -> torch.Tensor:
        tokens = outputs[row] + path_tokens(tree, row, node)
        return upstream_penalties(reqs[row], tokens, logits[row, node]) + bias[row]

    for row, run in enumerate(committed):
        assert run == plain_walk(tree, row, lambda row, node: int(after(row, node).argmax()))
        # Log-probabilities come from these logits.
        torch.testing.assert_close(used[row, 0], after(row, 0), atol=1e-5, rtol=1e-5)
    return max(map(len, committed))


@pytest.mark.parametrize(
    "params",
    [{"top_k": TOP_K_ALL}, {"top_k": 6, "top_p": 0.9}],
    ids=str,
)
def test_seeds_draw_as_plain_decoding(params: dict[str, Any]) -> None:
    """The draw at a position is the one that SGLang's functions make there."""
    longest = max(_seeded(attempt, params) for attempt in range(30))
    assert longest >= 3


def _seeded(attempt: int, params: dict[str, Any]) -> int:
    torch.manual_seed(attempt)
    reqs = [request([1] * (3 + i), [5], temperature=0.8, **params) for i in range(3)]
    batch = Batch(reqs)
    info = batch.sampling_info
    info.sampling_seed = torch.tensor([attempt, 42, -attempt])
    tree = random_tree(random.Random(attempt), batch)
    logits = torch.randn(3, WIDTH, VOCABULARY)

    def drawn(row: int, node: int) -> int:
        one = slice(row, row + 1)
        probs = torch.softmax(logits[one, node] / 0.8, -1)
        noise = info.sampling_seed[one], tree.position[one, node]
        if "top_p" not in params:
            return int(sampling_from_probs_torch(probs, *noise))
        filters = info.top_ks[one], info.top_ps[one], info.min_ps[one], False
        return int(top_k_top_p_min_p_sampling_from_probs_torch(probs, *filters, *noise))

    committed = runs(tree, sample(batch, tree, logits.clone().view(-1, VOCABULARY)))
    for row, run in enumerate(committed):
        assert run == plain_walk(tree, row, drawn)
    return max(map(len, committed))


def test_grammar_mask_is_applied_to_all_nodes() -> None:
    batch = Batch([request([1], [5])])
    tree = random_tree(random.Random(0), batch)
    logits = torch.randn(WIDTH, VOCABULARY)

    def only_seven(rows: torch.Tensor) -> None:
        rows[:, :7] = rows[:, 8:] = float("-inf")

    mask = SimpleNamespace(apply=only_seven)
    (run,) = runs(tree, sample(batch, tree, logits, grammar_mask=mask))
    assert set(run) == {7}


def test_min_p_is_honoured() -> None:
    reqs = [request([1], [5], top_k=TOP_K_ALL, min_p=0.3) for _ in range(200)]
    batch = Batch(reqs, rows=300)
    tree = random_tree(random.Random(0), batch)
    logits = torch.randn(200, WIDTH, VOCABULARY)
    verdict = sample(batch, tree, logits.clone().view(-1, VOCABULARY))
    probs = logits.softmax(-1)
    predict, _, index = verdict
    for node in index[index >= 0].tolist():
        row = probs.view(-1, VOCABULARY)[node]
        assert row[predict[node]] >= 0.3 * row.max() * 0.9999


class Recorder:
    """A custom processor that notes which context it is asked for, and forbids its last token."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, given in zip(logits, params, strict=True):
            context = [*given["__req__"].origin_input_ids, *given["__req__"].output_ids]
            self.seen.append(context)
            row[context[-1]] = float("-inf")
        return logits


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_custom_processors_see_every_context_once(seed: int, lag: int) -> None:
    processor = Recorder()
    reqs = [request([1, 2], [5, 8, 3]), request([4], [9, 6])]
    outputs = [[*req.output_ids] for req in reqs]
    batch = Batch(reqs, lag)
    info = batch.sampling_info
    info.has_custom_logit_processor = True
    info.custom_params = [{"__req__": req} for req in reqs]
    info.custom_logit_processor = {0: ProcessorEntry(processor, [0, 1], torch.tensor([0, 1]))}
    torch.manual_seed(seed)
    tree = random_tree(random.Random(seed), batch)
    sampler = TreeSampler()
    sampler._history.remember(batch, run_of([output[-2:] for output in outputs]))
    logits = torch.randn(2, WIDTH, VOCABULARY)

    def forbid_last(row: int, node: int) -> int:
        rows = logits[row, node].clone()
        rows[(outputs[row] + path_tokens(tree, row, node))[-1]] = float("-inf")
        return int(rows.argmax())

    verdict = sample(batch, tree, logits.clone().view(-1, VOCABULARY), sampler=sampler)
    contexts = []
    for row, run in enumerate(runs(tree, verdict)):
        assert run == plain_walk(tree, row, forbid_last)
        start = [*reqs[row].origin_input_ids, *outputs[row]]
        contexts += [start + run[:n] for n in range(len(run))]
    assert sorted(processor.seen) == sorted(contexts)
    # The batch's own settings are untouched.
    assert info.has_custom_logit_processor
    assert info.custom_params == [{"__req__": req} for req in reqs]


def test_without_a_tree_upstream_samples() -> None:
    batch = Batch([request([1], [5])])
    output = SimpleNamespace(next_token_logits=torch.zeros(1, VOCABULARY))
    answer = TreeSampler().sample(
        lambda *given, **options: (given, options),
        SimpleNamespace(),
        batch,
        output,
        "mask",
        watermark_state=None,
    )
    given, options = answer
    assert given[1:] == (batch, output, "mask")
    assert options == {"watermark_state": None}


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"is_all_greedy": False}, True),
        ({"is_all_greedy": False, "need_top_k_sampling": True}, True),
        ({"is_all_greedy": False, "need_top_p_sampling": True}, True),
        (
            {"is_all_greedy": False, "need_top_k_sampling": True, "need_top_p_sampling": True},
            False,
        ),
        ({"is_all_greedy": False, "need_min_p_sampling": True}, False),
        ({"is_all_greedy": False, "sampling_seed": 1}, False),
        ({"acc_additive_penalties": 1}, False),
        ({"has_custom_logit_processor": True}, False),
    ],
    ids=str,
)
def test_where_upstream_is_exact(changes: dict[str, Any], exact: bool) -> None:
    plain = {
        "is_all_greedy": True,
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
        "sampling_seed": None,
        "acc_additive_penalties": None,
        "has_custom_logit_processor": False,
    }
    info = SimpleNamespace(**plain | changes)
    gpu, cpu = (SimpleNamespace(is_cuda=on_gpu) for on_gpu in (True, False))
    assert sampling._upstream_is_exact(info, gpu) is exact
    assert not sampling._upstream_is_exact(info, cpu)
