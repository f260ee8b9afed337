"""DARTREE's round from features to packed tree: no step reads a value on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_dart.commit import RoundState
from sglang_dart.draft.dflash import DFlashDrafter, DFlashModel
from sglang_dart.draft.dflash_config import DFlashConfig, DominoConfig
from sglang_dart.draft.domino import DominoDrafter, DominoModel
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.options import DartreeOptions
from sglang_dart.tree.plan import TreePlanner
from sglang_dart.types import PackedTree

VOCABULARY, HIDDEN, SLOTS = 40, 32, 64


@torch.library.register_fake("aten::_thnn_fused_gru_cell")
def _(into: torch.Tensor, within: torch.Tensor, state: torch.Tensor, *_: Any) -> Any:
    """Torch 2.14 has no fake of it."""
    return torch.empty_like(state), state.new_empty(len(state), 5 * state.shape[1])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_variant = pytest.mark.parametrize("variant", ["pruned", "fixed", "chain", "marginal"])


def small_config(domino: bool) -> DFlashConfig:
    return DFlashConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        block_size=5,
        mask_token_id=39,
        target_layer_ids=[1, 3],
        domino=DominoConfig(shift_label=True, emb_dim=8, gru_hidden_dim=12) if domino else None,
    )


def small_drafter(variant: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random drafter, the same on every device."""
    config = small_config(variant != "marginal")
    generator = torch.Generator().manual_seed(1)
    model = DFlashModel(config) if config.domino is None else DominoModel(config)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.1)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(device, dtype)
    head = torch.randn(HIDDEN, VOCABULARY, generator=generator).to(device, dtype)
    kind = DFlashDrafter if config.domino is None else DominoDrafter
    drafter: Any = kind(model.to(device, dtype), table.__getitem__, lambda x: x @ head, 8)
    drafter.allocate(SLOTS)
    return drafter


def planner_of(drafter: Any, variant: str, device: str) -> TreePlanner:
    from sglang_dart.algorithms import _plan_dartree

    options = DartreeOptions(width=4, candidates=6)
    return _plan_dartree(
        options, variant, VOCABULARY, drafter, 4, chain=False, device=torch.device(device)
    )


def one_round(
    drafter: Any, planner: TreePlanner, state: RoundState, rows: Rows, roots: Roots
) -> PackedTree:
    """Append, draft, keep for the next round, and plan that round's trees."""
    row = list(range(len(roots.token)))
    row_index = torch.arange(len(row), device=roots.token.device)
    drafter.append(rows)
    candidates = drafter.draft(roots, planner.candidates)
    state.put(row, row_index, candidates, roots.token[:, None])
    kept, tail = state.take(row, row_index)
    end = torch.full((len(row), 1), -1)
    width = planner.levels(100) + 1 if planner._recipe is None else 9
    _, packed = planner.plan(kept, tail, roots.length, width, end)
    return packed


def state_for(drafter: Any, planner: TreePlanner, device: str) -> RoundState:
    return RoundState(
        4,
        drafter.levels,
        planner.candidates,
        1,
        torch.device(device),
        carry=drafter.carry_size,
        home=planner.home,
    )


def inputs(device: str, dtype: torch.dtype, seed: int) -> tuple[Rows, Roots]:
    """Rows of two requests, 5 and 20 tokens, and their roots."""
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(25, 2 * HIDDEN, generator=generator).to(device, dtype)
    token = torch.randint(VOCABULARY, (25,), generator=generator).to(device)
    slot = torch.randperm(SLOTS - 1, generator=generator)[:25] + 1
    table = torch.zeros(2, 30, dtype=torch.int32)
    table[0, :5], table[1, :20] = slot[:5], slot[5:]
    position = torch.cat([torch.arange(5), torch.arange(20)])
    rows = Rows(feature, token, position.to(device), slot.to(device))
    roots = Roots(token[:2], torch.tensor([5, 20]).to(device), feature[:2], table.to(device))
    return rows, roots


@every_variant
def test_host_reads_no_value(variant):
    """Fake CUDA tensors have shapes but no values: reading one would raise. Needs no GPU."""
    real = inputs("cpu", torch.float32, 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        config = small_config(variant != "marginal")
        model = DFlashModel(config) if config.domino is None else DominoModel(config)
        head = torch.zeros(HIDDEN, VOCABULARY)
        kind = DFlashDrafter if config.domino is None else DominoDrafter
        drafter: Any = kind(
            model.requires_grad_(False), torch.zeros(VOCABULARY, HIDDEN).__getitem__,
            lambda x: x @ head, 8,
        )  # fmt: skip
        drafter.allocate(SLOTS)
        planner = planner_of(drafter, variant, "cuda")
        assert planner.home.type == "cuda"
        state = state_for(drafter, planner, "cuda")
        rows, roots = (
            type(value)(*(torch.zeros(c.shape, dtype=c.dtype) for c in vars(value).values()))
            for value in real
        )
        packed = one_round(drafter, planner, state, rows, roots)
        assert packed.mask.shape[:2] == packed.token.shape
        with pytest.raises(DataDependentOutputException):
            int(roots.length.max())


@every_variant
def test_torch_and_core_plan_the_same_trees(variant):
    """The planner's two ways, the device's and the host's."""
    drafter = small_drafter(variant, "cpu")
    rows, roots = inputs("cpu", torch.float32, 0)
    planner = planner_of(drafter, variant, "cpu")
    core = one_round(drafter, planner, state_for(drafter, planner, "cpu"), rows, roots)
    # Any device but the host: the torch way needs no GPU, it is only what GPUs take.
    planner = planner_of(drafter, variant, "meta")
    candidates = drafter.draft(roots, planner.candidates)
    end = torch.full((2, 1), -1)
    width = core.token.shape[1]
    _, plain = planner.plan(candidates, roots.token[:, None], roots.length, width, end)
    for mine, other in zip(vars(core).values(), vars(plain).values(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.gpu
@needs_gpu
@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_round_equals_eager_without_waiting(variant, dtype):
    drafter = small_drafter(variant, "cuda", dtype)
    planner = planner_of(drafter, variant, "cuda")
    state = state_for(drafter, planner, "cuda")
    static = inputs("cuda", dtype, 0)
    one_round(drafter, planner, state, *static)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_round(drafter, planner, state, *static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one_round(drafter, planner, state, *static)
    for seed in (1, 2):
        fresh = inputs("cuda", dtype, seed)
        expected = one_round(drafter, planner, state, *fresh)
        expected = [x.clone() for x in vars(expected).values()]
        for held, new in zip(static, fresh, strict=True):
            for into, value in zip(vars(held).values(), vars(new).values(), strict=True):
                into.copy_(value)
        graph.replay()
        for got, want in zip(vars(captured).values(), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@needs_gpu
@every_variant
def test_gpu_equals_cpu(variant):
    made = []
    for device in ("cpu", "cuda"):
        drafter = small_drafter(variant, device)
        planner = planner_of(drafter, variant, device)
        state = state_for(drafter, planner, device)
        packed = one_round(drafter, planner, state, *inputs(device, torch.float32, 0))
        made.append([x.cpu() for x in vars(packed).values()])
    for mine, other in zip(*made, strict=True):
        assert torch.equal(mine, other)
