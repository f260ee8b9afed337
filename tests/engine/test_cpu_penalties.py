"""Penalties on trees, against SGLang's own penalizers fed one token after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("sglang")
from sglang_dart.engine.penalties import OutputHistory
from tests.engine.fake_batch import (
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


@pytest.mark.parametrize("lag", [0, 3])
def test_penalties_at_every_node_equal_plain_decoding(lag: int) -> None:
    rng = random.Random(lag)
    torch.manual_seed(lag)
    outputs = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 7))] for _ in PENALTIES]
    reqs = [
        request([1] * rng.randint(1, 5), output, **params)
        for output, params in zip(outputs, PENALTIES, strict=True)
    ]
    batch, history = Batch(reqs, lag, rows=12), OutputHistory()
    if lag:
        history.remember(batch, run_of([output[-lag:] for output in outputs]))
    tree = random_tree(rng, batch)
    penalties = history.penalties(batch, tree, VOCABULARY)
    logits = torch.randn(len(reqs), WIDTH, VOCABULARY)
    for node in range(WIDTH - 1):
        got = logits[:, node].clone()
        rows = torch.arange(len(reqs))
        penalties.apply(got, rows, torch.full_like(rows, node))
        for row, (req, output) in enumerate(zip(reqs, outputs, strict=True)):
            tokens = output + path_tokens(tree, row, node)
            want = upstream_penalties(req, tokens, logits[row, node])
            torch.testing.assert_close(got[row], want, atol=1e-5, rtol=1e-5)
    # All nodes at once give the same as one after the other.
    request_of = torch.arange(len(reqs)).repeat_interleave(WIDTH)
    node_of = torch.arange(WIDTH).repeat(len(reqs))
    bulk = logits.view(-1, VOCABULARY).clone()
    penalties.apply(bulk, request_of, node_of)
    torch.testing.assert_close(bulk.view_as(logits)[:, WIDTH - 2], got)


def test_first_step_after_a_prefill_knows_its_root_only() -> None:
    """With overlap the host has no output token yet when the first verify step starts."""
    reqs = [request([5, 6], [3], presence_penalty=1.0), request([5], [2, 7], presence_penalty=1.0)]
    batch, history = Batch(reqs, lag=1), OutputHistory()
    # Another request had the first row before.
    history.remember(batch, run_of([[9, 9], [7]]))
    tree = random_tree(random.Random(0), batch)
    penalties = history.penalties(batch, tree, VOCABULARY)
    assert penalties.count.nonzero().tolist() == [[0, 3], [1, 2], [1, 7]]
    assert penalties.outputs.tolist() == [1, 2]
