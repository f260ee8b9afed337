"""Attention over slots against a plain computation, one query at a time."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dart.draft.context_kv import ContextKV


def plain(kv, layer, query, key, value, block_mask, slot_table, length):
    """[bs, Q, heads, head_dim] by definition, in float64."""
    out = torch.zeros_like(query, dtype=torch.float64)
    bs, rows, heads, head_dim = query.shape
    group = heads // key.shape[2]
    for i in range(bs):
        slots = slot_table[i, : length[i]].long()
        for row in range(rows):
            seen = block_mask[row]
            keys = torch.cat([kv.key[layer, slots], key[i, seen]]).double()
            values = torch.cat([kv.value[layer, slots], value[i, seen]]).double()
            for head in range(heads):
                score = keys[:, head // group] @ query[i, row, head].double() / math.sqrt(head_dim)
                out[i, row, head] = torch.softmax(score, 0) @ values[:, head // group]
    return out


def case(lengths, rows, heads=6, kv_heads=2, head_dim=8, dtype=torch.float32, index=torch.int64):
    generator = torch.Generator().manual_seed(1)
    kv = ContextKV(2, 200, kv_heads, head_dim, dtype=dtype, device="cpu")

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    slots = torch.randperm(199, generator=generator)[: sum(lengths)] + 1
    for layer in range(2):
        rows_of = (len(slots), kv_heads, head_dim)
        kv.append(layer, slots, random(*rows_of), random(*rows_of))
    table = torch.full((len(lengths), max(lengths) + 5), 10**6, dtype=index)
    for row, part in zip(table, slots.split(lengths), strict=True):
        row[: len(part)] = part
    bs = len(lengths)
    return (
        kv,
        random(bs, rows, heads, head_dim),
        random(bs, rows, kv_heads, head_dim),
        random(bs, rows, kv_heads, head_dim),
        table,
        torch.tensor(lengths),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("lengths", [[0], [1], [3, 17, 65], [4, 4], [0, 9, 0]])
@pytest.mark.parametrize("rows", [1, 8])
def test_equals_plain(lengths, rows, causal, index):
    kv, query, key, value, table, length = case(lengths, rows, index=index)
    mask = torch.ones(rows, rows, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    for layer in range(2):
        got = kv.attend(layer, query, key, value, mask, table, length)
        expected = plain(kv, layer, query, key, value, mask, table, length)
        torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1)])
def test_groups(heads, kv_heads):
    kv, query, key, value, table, length = case([7, 30], 4, heads=heads, kv_heads=kv_heads)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    got = kv.attend(0, query, key, value, mask, table, length)
    expected = plain(kv, 0, query, key, value, mask, table, length)
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)


def test_bfloat16():
    kv, query, key, value, table, length = case([12, 40], 4, dtype=torch.bfloat16)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    got = kv.attend(0, query, key, value, mask, table, length)
    expected = plain(kv, 0, query, key, value, mask, table, length)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2e-2)


def test_dummy_slot_stays_zero():
    kv = ContextKV(1, 4, 1, 2, dtype=torch.float32, device="cpu")
    rows = torch.tensor([[[torch.nan, 1.0]], [[2.0, 3.0]], [[torch.inf, 0.0]]])
    kv.append(0, torch.tensor([0, 3, 0]), rows, rows)
    assert kv.key[0, 0].tolist() == [[0, 0]]
    assert kv.value[0, 3].tolist() == [[2, 3]]
