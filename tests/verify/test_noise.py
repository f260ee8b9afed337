"""The hash behind seeded sampling, against MurmurHash3 written byte by byte."""

from __future__ import annotations

import math
import struct

import torch

from sglang_dart.verify.noise import gumbel, murmur3

MASK = 0xFFFFFFFF


def murmur3_bytes(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for lengths that are a multiple of four."""

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (32 - bits))) & MASK

    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = rotate(block * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        state = (rotate(state ^ block, 13) * 5 + 0xE6546B64) & MASK
    state ^= len(data)
    state = (state ^ (state >> 16)) * 0x85EBCA6B & MASK
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & MASK
    return state ^ (state >> 16)


def test_reference_value() -> None:
    # Published test vector: MurmurHash3_x86_32("test", seed 0).
    assert murmur3_bytes(b"test") == 0xBA6BD213


def test_equals_the_bytewise_hash() -> None:
    seed = torch.tensor([0, 42, 2**40 + 7, -1, -(2**63), 2**63 - 1])
    position = torch.tensor([0, 1, 131071, 5, 2**31, 17])
    column = torch.tensor([0, 1, 31999, 151935])
    expected = [
        [murmur3_bytes(struct.pack("<qII", s, p & MASK, c)) for c in column.tolist()]
        for s, p in zip(seed.tolist(), position.tolist(), strict=True)
    ]
    assert murmur3(seed, position, column).tolist() == expected
    assert murmur3(seed.to(torch.uint64), position.int(), column.int()).tolist() == expected


def test_gumbel_is_finite_and_has_the_gumbel_mean() -> None:
    noise = gumbel(torch.tensor([3, 4]), torch.tensor([0, 1]), torch.arange(100_000))
    assert noise.isfinite().all()
    assert noise.shape == (2, 100_000)
    # Mean of the standard Gumbel law: Euler's constant; standard deviation pi / sqrt(6).
    error = math.pi / math.sqrt(6 * 100_000)
    assert (noise.mean(1) - 0.577216).abs().max() < 5 * error
