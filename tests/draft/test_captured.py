"""Captured drafting and growth give what eager ones give, in batches of any size.

On a GPU with real graphs, on the host with a stand-in that runs the functions again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sglang_dart.capture import Captured, CudaRecorder, map_tensors, tensors
from sglang_dart.draft.captured import CapturedDrafter
from sglang_dart.draft.dart import DartDrafter, DartHead
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.draft.topk import top_k, top_k_of_rows
from sglang_dart.tree.plan import TreePlanner
from sglang_dart.tree.recipe import best_first, pruned
from sglang_dart.types import Candidates
from tests.draft.test_block_graph import (
    HIDDEN,
    SLOTS,
    VOCABULARY,
    needs_gpu,
    planner_of,
    small_drafter,
    state_for,
)
from tests.test_capture import replayer

COLUMNS, TABLE, WIDTH, SIZES = 3, 20, 6, (1, 2, 4)
every_variant = pytest.mark.parametrize("variant", ["pruned", "fixed", "chain", "marginal"])
every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)


def dart_drafter(tiny_config: Any, device: str) -> DartDrafter:
    """A random drafter with the sizes of the block drafters' features."""
    generator = torch.Generator().manual_seed(5)
    config = dataclasses.replace(
        tiny_config, head_dim=16, hidden_size=HIDDEN, target_hidden_size=HIDDEN
    )
    head = DartHead(config).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    table = torch.randn(config.vocab_size, HIDDEN, generator=generator).to(device)
    drafter = DartDrafter(head.to(device), table.__getitem__, 7)
    drafter.allocate(SLOTS)
    return drafter


def inputs(bs: int, taps: int, vocabulary: int, seed: int, device: str) -> tuple[Rows, Roots]:
    """Verified rows of `bs` requests, some of them beyond the accepted run, and their roots."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(COLUMNS, 10, (bs,), generator=generator)
    table = (torch.randperm(SLOTS - 1, generator=generator) + 1)[: bs * 10].view(bs, 10).int()
    position = length[:, None] - COLUMNS + torch.arange(COLUMNS)
    slot = table.gather(1, position).long()
    accepted = torch.randint(1, COLUMNS + 1, (bs, 1), generator=generator)
    slot = torch.where(torch.arange(COLUMNS) < accepted, slot, 0)
    feature = torch.randn(bs * COLUMNS, taps * HIDDEN, generator=generator)
    feature[slot.flatten() == 0] = torch.nan
    token = torch.randint(vocabulary, (bs * COLUMNS,), generator=generator)
    rows = Rows(feature, token, position.flatten(), slot.flatten())
    last = torch.randn(bs, taps * HIDDEN, generator=generator)
    roots = Roots(token[::COLUMNS], length, last, table)
    on_device = map_tensors(lambda tensor: tensor.to(device), (rows, roots))
    return on_device[0], on_device[1]


def recorder(device: str) -> Any:
    return replayer if device == "cpu" else CudaRecorder()


def captured_drafter(drafter: Any, device: str) -> CapturedDrafter:
    return CapturedDrafter(
        drafter,
        WIDTH,
        feature=torch.zeros(1, len(drafter.taps) * HIDDEN, device=device),
        slot_table=torch.zeros(3, TABLE, dtype=torch.int32, device=device),
        rows=COLUMNS,
        sizes=SIZES,
        record=recorder(device),
    )


def capture_growth(planner: Any, state: Any, widths: list[int], device: str) -> None:
    number = torch.zeros(1, dtype=torch.int64, device=device)
    like = state.take([0], number)[0], number, number
    record = recorder(device)
    planner.capture(lambda growth, _: Captured(growth, like, SIZES, record), widths)


def check_drafting(eager: Any, twin: Any, vocabulary: int, device: str) -> None:
    """Rounds of all batch sizes, twice, with other inputs each time."""
    captured = captured_drafter(twin, device)
    for seed, bs in enumerate([1, 2, 3, 4, 5, 2, 1, 3]):
        rows, roots = inputs(bs, len(eager.taps), vocabulary, seed, device)
        eager.append(rows)
        captured.append(rows)
        for mine, other in ((eager.kv.key, twin.kv.key), (eager.kv.value, twin.kv.value)):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
            assert not other[:, 0].any(), "the dummy slot stays zero"
        expected, got = eager.draft(roots, WIDTH), captured.draft(roots, WIDTH)
        assert torch.equal(expected.token, got.token)
        for mine, other in zip(tensors(expected), tensors(got), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
        # Another width is not captured.
        assert captured.draft(roots, 2).token.shape[2] == 2


@every_device
@pytest.mark.parametrize("variant", ["pruned", "marginal"])
def test_block_drafter(variant, device):
    check_drafting(
        small_drafter(variant, device), small_drafter(variant, device), VOCABULARY, device
    )


@every_device
def test_dart_drafter(tiny_config, device):
    vocabulary = tiny_config.vocab_size
    eager, twin = (dart_drafter(tiny_config, device) for _ in range(2))
    check_drafting(eager, twin, vocabulary, device)


@every_device
def test_what_is_kept_outlives_the_next_draft(device):
    drafter = small_drafter("pruned", device)
    captured = captured_drafter(drafter, device)
    planner = planner_of(drafter, "pruned", device)
    state = state_for(drafter, planner, device)
    index = torch.arange(2, device=device)
    for seed in range(2):
        rows, roots = inputs(2, 2, VOCABULARY, seed, device)
        captured.append(rows)
        drafted = captured.draft(roots, WIDTH)
        state.put([0, 1], index + 2 * seed, drafted, roots.token[:, None])
        if seed == 0:
            first = drafted.map(torch.clone)
    kept, _ = state.take([0, 1], index)
    assert torch.equal(kept.token, first.token)
    assert torch.equal(kept.log_prob, first.log_prob)


@every_device
@every_variant
def test_growth(variant, device):
    drafter = small_drafter(variant, device)
    # Any device but the host takes the torch way.
    home = "meta" if device == "cpu" else device
    eager, captured = (planner_of(drafter, variant, home) for _ in range(2))
    widths = [eager.levels(100) + 1] if variant == "chain" else [5, 9]
    state = state_for(drafter, planner_of(drafter, variant, device), device)
    capture_growth(captured, state, widths, device)
    for seed, bs in enumerate([1, 2, 3, 4, 5, 2, 1, 3]):
        rows, roots = inputs(bs, 2, VOCABULARY, seed, device)
        drafter.append(rows)
        given = drafter.draft(roots, eager.candidates)
        end = torch.full((bs, 1), -1)
        for width in widths:
            plan = given, roots.token[:, None], roots.length, width, end
            pairs = zip(tensors(eager.plan(*plan)), tensors(captured.plan(*plan)), strict=True)
            for expected, got in pairs:
                assert expected.dtype == got.dtype
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@needs_gpu
@every_variant
def test_a_captured_round_waits_for_nothing(variant):
    drafter = small_drafter(variant, "cuda")
    planner = planner_of(drafter, variant, "cuda")
    state = state_for(drafter, planner, "cuda")
    captured = captured_drafter(drafter, "cuda")
    width = planner.levels(100) + 1 if variant == "chain" else 9
    capture_growth(planner, state, [width], "cuda")
    rows, roots = inputs(3, 2, VOCABULARY, 0, "cuda")
    end = torch.full((3, 1), -1)
    index = torch.arange(3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        captured.append(rows)
        drafted = captured.draft(roots, planner.candidates)
        state.put([0, 1, 2], index, drafted, roots.token[:, None])
        kept, tail = state.take([0, 1, 2], index)
        planner.plan(kept, tail, roots.length, width, end)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("recipe", [best_first, pruned])
@pytest.mark.parametrize("bs", [1, 5, 160])
def test_growth_of_real_size(recipe, bs):
    """Sorts of 4096 and 61505 scores, which the device does otherwise than short ones."""
    eager, captured = (TreePlanner(recipe, 16, 64, home=torch.device("cuda")) for _ in range(2))
    generator = torch.Generator(device="cuda").manual_seed(bs)
    logits = torch.randn(bs, 16, 64, device="cuda", generator=generator) * 3
    candidates = top_k(logits, 64)
    root = torch.arange(bs, device="cuda")
    record = CudaRecorder()
    like = candidates, root, root
    captured.capture(lambda growth, _: Captured(growth, like, [8, 160], record), [65])
    plan = candidates, root[:, None], root + 100, 65, torch.full((bs, 1), -1)
    for _ in range(2):
        pairs = zip(tensors(eager.plan(*plan)), tensors(captured.plan(*plan)), strict=True)
        assert all(torch.equal(expected, got) for expected, got in pairs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bs", [1, 3, 40])
def test_best_of_a_real_vocabulary(bs):
    weight = torch.randn(64, 151936, device="cuda", dtype=torch.bfloat16)

    def best(hidden: torch.Tensor) -> Candidates:
        return top_k_of_rows(lambda rows: rows @ weight, hidden, 64, normalise="vocabulary")

    hidden = torch.randn(bs, 16, 64, device="cuda", dtype=torch.bfloat16)
    captured = Captured(best, (hidden,), [bs], CudaRecorder())
    for _ in range(2):
        hidden = torch.randn_like(hidden)
        # Which of equal logits come first is not told.
        torch.testing.assert_close(captured(hidden).log_prob, best(hidden).log_prob)
