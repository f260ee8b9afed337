"""On a GPU no step waits for the host, and a captured round gives what an eager one gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.draft.dart import DartDrafter, DartHead
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.score.marginal import Marginal
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, beam, best_first, chain, fixed, pruned
from sglang_dart.types import Candidates, PackedTree

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_recipe = pytest.mark.parametrize(
    "recipe",
    [chain(4), fixed(9), pruned(9, 4), beam(9, 3), best_first(9)],
    ids=["chain", "fixed", "pruned", "beam", "best_first"],
)


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def drafters(request, tiny_config: DartConfig) -> tuple[DartDrafter, DartDrafter]:
    """The same random drafter on the CPU and on the GPU."""
    generator = torch.Generator().manual_seed(5)
    config = dataclasses.replace(tiny_config, head_dim=16, hidden_size=32, target_hidden_size=32)
    head = DartHead(config).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    embedding = torch.randn(config.vocab_size, 32, generator=generator)
    made = []
    for device in ("cpu", "cuda"):
        copy = DartHead(config).requires_grad_(False)
        copy.load_state_dict(head.state_dict())
        table = embedding.to(device, request.param)
        made.append(DartDrafter(copy.to(device, request.param), table.__getitem__, 7))
        made[-1].allocate(64)
    return made[0], made[1]


def inputs(device: str, dtype: torch.dtype, seed: int) -> tuple[Rows, Roots]:
    """Rows of two requests, 5 and 20 tokens, and their roots."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 20]
    feature = torch.randn(25, 96, generator=generator)
    token = torch.randint(17, (25,), generator=generator)
    slot = torch.randperm(63, generator=generator)[:25] + 1
    table = torch.zeros(2, 30, dtype=torch.int32)
    table[0, :5], table[1, :20] = slot[:5], slot[5:]
    last = torch.tensor(lengths).cumsum(0) - 1
    rows = Rows(feature, token, torch.cat([torch.arange(n) for n in lengths]), slot)
    roots = Roots(token[last], torch.tensor(lengths), feature[last], table)
    return on(device, dtype, rows), on(device, dtype, roots)


def on(device: str, dtype: torch.dtype, value: Any) -> Any:
    return type(value)(
        *(x.to(device, dtype if x.is_floating_point() else None) for x in columns(value))
    )


def columns(value: Any) -> list[torch.Tensor]:
    """The tensors themselves, where dataclasses.astuple would copy them."""
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


@pytest.mark.gpu
@needs_gpu
def test_gpu_equals_cpu_without_waiting(drafters):
    cpu, gpu = drafters
    dtype = cpu.head.fc.weight.dtype
    logits = []
    for device, drafter in (("cpu", cpu), ("cuda", gpu)):
        rows, roots = inputs(device, dtype, 0)
        if device == "cuda":
            drafter.draft(roots, 5)  # first calls may set libraries up
            with no_host_wait():
                drafter.append(rows)
                drafter.draft(roots, 5)
        else:
            drafter.append(rows)
        logits.append(drafter.draft_logits(roots).float().cpu())
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * logits[0].abs().max().item()
    torch.testing.assert_close(logits[1], logits[0], atol=tolerance, rtol=0)


def round_of(drafter: DartDrafter, recipe: TreeRecipe) -> Callable[[Rows, Roots], PackedTree]:
    end = torch.full((2, 2), -1, device="cuda")

    def run(rows: Rows, roots: Roots) -> PackedTree:
        drafter.append(rows)
        candidates: Candidates = drafter.draft(roots, 5)
        ledger = grow(Marginal(candidates, 0.9), recipe, roots.token, end)
        tree = prune(ledger, recipe.budget, recipe.depth_bonus, impl="torch")
        return pack(tree, roots.length, impl="torch")

    return run


@every_recipe
def test_host_reads_no_value(tiny_config: DartConfig, recipe: TreeRecipe):
    """Fake CUDA tensors have shapes but no values: reading one would raise. Needs no GPU."""
    with FakeTensorMode(), torch.device("cuda"):
        head = DartHead(tiny_config).requires_grad_(False)
        drafter = DartDrafter(head, torch.zeros(17, 12).__getitem__, 7)
        drafter.allocate(64)
        integers = torch.zeros(5, dtype=torch.int64)
        rows = Rows(torch.zeros(5, 36), integers, integers, integers)
        table = torch.zeros(2, 30, dtype=torch.int32)
        roots = Roots(integers[:2], integers[:2], torch.zeros(2, 36), table)
        packed = round_of(drafter, recipe)(rows, roots)
        assert packed.mask.shape == (2, recipe.budget + 1, recipe.budget + 1)
        with pytest.raises(DataDependentOutputException):
            int(roots.length.max())


@pytest.mark.gpu
@needs_gpu
@every_recipe
def test_captured_round_equals_eager(drafters, recipe):
    drafter = drafters[1]
    dtype = drafter.head.fc.weight.dtype
    run = round_of(drafter, recipe)
    static = inputs("cuda", dtype, 0)
    run(*static)
    with no_host_wait():
        run(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*static)
    for seed in (1, 2):
        fresh = inputs("cuda", dtype, seed)
        expected = [x.clone() for x in columns(run(*fresh))]
        for held, new in zip(static, fresh, strict=True):
            for into, value in zip(columns(held), columns(new), strict=True):
                into.copy_(value)
        graph.replay()
        for got, want in zip(columns(captured), expected, strict=True):
            assert torch.equal(got, want)
