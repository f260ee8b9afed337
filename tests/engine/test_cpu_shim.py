"""The stand-ins for sgl_kernel's CPU operators, against small Python models."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from sglang_dart.cpu_host import SHIM

OP_CALLS = {
    "assign_draft_cache_locs_contiguous_cpu": 7,
    "build_tree_kernel_efficient_cpu": 12,
    "rotate_input_ids_cpu": 5,
}


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    loaded = sys.modules.get("sgl_kernel")
    if loaded is None:
        sys.path.insert(0, str(SHIM))
        loaded = importlib.import_module("sgl_kernel")
        sys.path.remove(str(SHIM))
    if str(SHIM) not in (loaded.__file__ or ""):
        pytest.skip("a genuine sgl_kernel is loaded")
    return loaded


def test_assign_and_gather_slots(shim: ModuleType) -> None:
    table = torch.full((4, 9), -1, dtype=torch.int32)
    rows = torch.tensor([2, 0, 3])
    start, end = torch.tensor([1, 4, 0]), torch.tensor([4, 4, 2])
    slots = torch.tensor([11, 12, 13, 21, 22])
    shim.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 9)
    assert table[2].tolist() == [-1, 11, 12, 13, -1, -1, -1, -1, -1]
    assert table[3].tolist() == [21, 22, -1, -1, -1, -1, -1, -1, -1]
    assert (table[:2] == -1).all()

    packed = torch.zeros(7, dtype=torch.int64)
    shim.assign_extend_cache_locs_cpu(rows, table, start, end, packed, 9)
    # What the spans do not fill stays as it was.
    assert packed.tolist() == [11, 12, 13, 21, 22, 0, 0]


def test_fill_accepted_slots(shim: ModuleType) -> None:
    accept = torch.tensor([[0, 3, -1, -1], [4, -1, -1, -1]], dtype=torch.int32)
    slots = torch.arange(100, 108)
    packed = torch.zeros(8, dtype=torch.int64)
    shim.fill_accept_out_cache_loc_cpu(accept, slots, packed)
    assert packed.tolist() == [100, 103, 104, 0, 0, 0, 0, 0]


def test_fill_bonus_tokens(shim: ModuleType) -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]], dtype=torch.int32)
    bonus = torch.empty(2, dtype=torch.int32)
    shim.fill_bonus_tokens_cpu(tokens, torch.tensor([3, 1], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [7, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copy_rows_reads_before_it_writes(shim: ModuleType, dtype: torch.dtype) -> None:
    buffers = [torch.arange(24).view(6, 2, 2).to(dtype) + layer for layer in range(3)]
    expected = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2, 3, 0]), torch.tensor([2, 3, 1, 0])
    for buffer in expected:
        buffer[target] = buffer[source]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers])
    shim.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for buffer, want in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, want)


def test_verify_tree_greedy(shim: ModuleType) -> None:
    #      0            tokens  0:1 1:5 2:6 3:7 4:8 5:9 (padding)
    #     / \           target after node 0 is 6, after 2 is 8, after 4 is 3
    #    1   2
    #       / \
    #      3   4
    child = torch.tensor([[1, -1, 3, -1, -1, -1]])
    sibling = torch.tensor([[-1, 2, -1, 4, -1, -1]])
    token = torch.tensor([[1, 5, 6, 7, 8, 9]])
    target = torch.tensor([[6, 0, 8, 0, 3, 0]])
    index = torch.arange(6).unsqueeze(0)
    predict = torch.zeros(6, dtype=torch.int32)
    accept = torch.full((1, 4), -1, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int32)
    shim.verify_tree_greedy_cpu(
        predicts=predict,
        accept_index=accept,
        accept_token_num=count,
        candidates=token,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=target,
    )
    assert accept.tolist() == [[0, 2, 4, -1]]
    assert count.tolist() == [2]
    assert predict[[0, 2, 4]].tolist() == [6, 8, 3]


def test_reconstruct_indices_from_tree_mask(shim: ModuleType) -> None:
    # Parents of two trees, parents first; the second is a chain.
    parents = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4]]
    width = 6
    mask = torch.zeros(2, width, width, dtype=torch.bool)
    for i, parent in enumerate(parents):
        for node in range(width):
            at = node
            while at >= 0:
                mask[i, node, at] = True
                at = parent[at]
    positions = torch.empty(2 * width, dtype=torch.int64)
    index, child, sibling = (torch.empty(2, width, dtype=torch.int64) for _ in range(3))
    speculative = importlib.import_module("sgl_kernel.speculative")
    speculative.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor([10, 20]), positions, index, child, sibling, 2, width
    )
    assert positions.view(2, width).tolist() == [
        [10, 11, 11, 12, 12, 13],
        [20, 21, 22, 23, 24, 25],
    ]
    assert index.flatten().tolist() == list(range(12))
    assert child.tolist() == [[1, 3, -1, 5, -1, -1], [1, 2, 3, 4, 5, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1, -1], [-1] * 6]


def test_murmur_is_reachable_as_a_torch_operator(shim: ModuleType) -> None:
    seed = torch.tensor([42, 7]).to(torch.uint64)
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
        seed, torch.tensor([3, 9]), torch.arange(5)
    )
    assert hashed.dtype == torch.uint32
    assert hashed.shape == (2, 5)


@pytest.mark.parametrize(("name", "arguments"), OP_CALLS.items())
def test_missing_operators_name_themselves(shim: ModuleType, name: str, arguments: int) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(shim, name)(*[None] * arguments)
