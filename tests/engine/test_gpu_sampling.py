"""Sampling all nodes of a tree at once, as on a GPU, against the walk from node to node."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
from sglang_dart.engine import sampling
from sglang_dart.engine.sampling import TreeSampler
from sglang_dart.types import PackedTree
from tests.engine.fake_batch import (
    LEVELS,
    PENALTIES,
    VOCABULARY,
    WIDTH,
    Batch,
    random_tree,
    request,
    run_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def sample(batch: Batch, tree: PackedTree, logits: torch.Tensor, runs: list[list[int]]) -> Any:
    sampler = TreeSampler()
    accepted = run_of(runs)
    for name, part in vars(accepted).items():
        object.__setattr__(accepted, name, part.to(logits.device))
    sampler._history.remember(batch, accepted)
    verify_input = SimpleNamespace(tree=tree, max_tree_depth=LEVELS + 1)
    output = SimpleNamespace(next_token_logits=logits)
    return sampler.sample(lambda *_, **__: None, verify_input, batch, output)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", range(10))
def test_penalised_greedy_equals_the_cpu(
    monkeypatch: pytest.MonkeyPatch, seed: int, lag: int
) -> None:
    monkeypatch.setattr(
        sampling, "_sampler", lambda: lambda output, *_: output.next_token_logits.argmax(-1)
    )
    rng = random.Random(seed)
    torch.manual_seed(seed)
    outputs = [[rng.randrange(VOCABULARY) for _ in range(4)] for _ in PENALTIES]
    reqs = [
        request([2, 3], output, **params) for output, params in zip(outputs, PENALTIES, strict=True)
    ]
    batch = Batch(reqs, lag, rows=12)
    tree = random_tree(rng, batch)
    logits = torch.randn(len(reqs) * WIDTH, VOCABULARY) * 2
    runs = [output[-2:] for output in outputs]
    want = sample(batch, tree, logits.clone(), runs)

    on_gpu = PackedTree(**{name: part.cuda() for name, part in vars(tree).items()})
    moved, device_logits = batch.to("cuda"), logits.cuda()
    got = sample(moved, on_gpu, device_logits, runs)
    assert torch.equal(got[1].cpu(), want[1])
    assert torch.equal(got[2].cpu(), want[2])
    visited = want[2][want[2] >= 0].long()
    assert torch.equal(got[0].cpu()[visited], want[0][visited])
