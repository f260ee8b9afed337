"""The kernel against its twin: on a GPU, and on the host in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from sglang_dart.draft.context_kv import ContextKV
from tests.kernels.interpreter import run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Atol and rtol by dtype: products of rounded weights, summed in float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
)
on_gpu = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"
)


def compare(
    lengths: list[int],
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    slots: int = 0,
) -> None:
    """Random inputs in scattered slots; unused columns of the table point beyond the KV."""
    from sglang_dart.kernels.block_attention import block_attention

    generator = torch.Generator().manual_seed(1)
    slots = slots or sum(lengths) + 9
    bs = len(lengths)
    kv = ContextKV(2, slots, kv_heads, dim, dtype=dtype, device=DEVICE)
    used = torch.randperm(slots - 1, generator=generator)[: sum(lengths)] + 1
    # Rows that no request owns must not be read: 0 * NaN is NaN.
    kv.key.fill_(torch.nan)[:, 0] = 0
    kv.value.fill_(torch.nan)[:, 0] = 0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    shape = (len(used), kv_heads, dim)
    for layer in range(2):
        kv.append(layer, used.to(DEVICE), random(*shape), random(*shape))
    # A slice of a wider table, as the engine's is.
    table = torch.full((bs, max(lengths) + 40), 2**30, dtype=index)
    for line, part in zip(table, used.split(lengths), strict=True):
        line[: len(part)] = part
    table = table.to(DEVICE)[:, : max(lengths) + 3]
    mask = torch.ones(rows, rows, dtype=torch.bool, device=DEVICE)
    mask = mask.tril() if causal else mask
    query = random(bs, rows, heads, dim)
    key, value = random(bs, rows, kv_heads, dim), random(bs, rows, kv_heads, dim)
    length = torch.tensor(lengths, device=DEVICE)
    got = block_attention(query, key, value, mask, kv.key[1], kv.value[1], table, length)
    want = kv.attend_plain(1, *(x.float() for x in (query, key, value)), mask, table, length)
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@on_device
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "rows"),
    [
        ([0], 1, 1, 1),
        ([1, 0], 2, 2, 3),
        ([70], 3, 1, 5),
        ([33, 0, 150], 6, 2, 9),
    ],
    ids=["nothing", "almost nothing", "one", "three"],
)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_twin(lengths, heads, kv_heads, rows, causal):
    index = torch.int64 if causal else torch.int32
    compare(lengths, rows, heads, kv_heads, 16, causal=causal, index=index)


@on_device
@pytest.mark.parametrize("programs", [1, 16, 64])
def test_parts(programs, monkeypatch):
    """One part, which nothing joins; four; sixteen, more than there are tiles."""
    from sglang_dart.kernels import block_attention

    monkeypatch.setattr(block_attention, "PROGRAMS", programs)
    compare([300, 17], 3, 4, 2, 16)


@on_device
@pytest.mark.parametrize("dim", [8, 20, 80])
def test_head_sizes(dim):
    compare([40, 7], 4, 3, 3, dim)


@on_device
def test_more_rows_than_a_tile():
    compare([20, 3], 9, 15, 1, 8)


@on_device
def test_half_precision():
    """Not bfloat16, whose products Triton 3.8's interpreter takes for integers."""
    compare([90, 5], 4, 4, 2, 16, dtype=torch.float16)


@on_device
def test_a_negative_length_is_none():
    from sglang_dart.kernels.block_attention import block_attention

    block = torch.randn(2, 3, 2, 16, device=DEVICE)
    mask = torch.ones(3, 3, dtype=torch.bool, device=DEVICE)
    context = torch.full((4, 2, 16), torch.nan, device=DEVICE)
    table = torch.zeros(2, 5, dtype=torch.int32, device=DEVICE)
    length = torch.tensor([-1, 0], device=DEVICE)
    got = block_attention(block, block, block, mask, context, context, table, length)
    assert got.isfinite().all()


@pytest.mark.skipif(INTERPRETED, reason="this is what it runs")
def test_interpreted_on_the_host():
    run_interpreted(__file__)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bs", [1, 4, 16, 64])
@pytest.mark.parametrize("rows", [9, 16])
def test_real_sizes(bs, rows, dtype):
    dice = torch.Generator().manual_seed(bs)
    lengths = torch.randint(1, 2049, (bs,), generator=dice).tolist()
    compare(lengths, rows, 32, 8, 128, dtype=dtype, causal=rows == 9)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(14, 2, 64), (9, 3, 64), (32, 8, 80), (24, 8, 96), (16, 2, 256), (64, 4, 128)],
)
def test_other_models(heads, kv_heads, dim, dtype):
    compare([700, 1, 0, 333], 16, heads, kv_heads, dim, dtype=dtype, index=torch.int64)


@pytest.mark.gpu
@on_gpu
def test_offsets_beyond_32_bits():
    compare([500, 64], 16, 32, 8, 128, dtype=torch.bfloat16, slots=2_500_000)
