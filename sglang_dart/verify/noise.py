"""Reproducible sampling noise: a hash of (seed, position, column), the same on every device.

With it a draw depends on the request's seed and on where it happens, not on what ran before.
Source: MurmurHash3 x86 32-bit (public domain) over the blocks seed low, seed high, position,
column, started at 0; SGLang 0.5.23 hashes the same blocks when it samples with a seed.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def murmur3(seed: torch.Tensor, position: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Hash every (seed, position) pair with every column.

    seed [n] int64 or uint64, position [n] integer, column [m] integer -> [n, m] int64 in [0, 2^32).
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    state = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, position.long() & _LOW):
        state = _mix(state, block)
    state = _mix(state[:, None], (column.long() & _LOW)[None, :])
    state = state ^ 16  # the key's length in bytes
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def gumbel(seed: torch.Tensor, position: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [n, m] float64: argmax(log-probability + noise) is a draw from that law."""
    uniform = murmur3(seed, position, column).double() / _LOW
    # The ends of the range would give infinities; the cap is one hash step below 1.
    log = uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return -torch.log(-log)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    # The product of two 32-bit numbers may wrap in int64; its low 32 bits stay right.
    return (value * factor) & _LOW


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _LOW
