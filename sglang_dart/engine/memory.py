"""What the drafter's things take, and one line when there is no room for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def tensor_bytes(*owners: Any, beside: Any = None) -> int:
    """Bytes of the tensors that these objects hold as attributes, directly or in modules.

    Shared storage counts once; that of the module `beside` (the target) not at all.
    """
    seen = {_storage(tensor) for tensor in _tensors(beside)}
    total = 0
    for owner in owners:
        for tensor in _tensors(owner):
            if _storage(tensor) not in seen:
                seen.add(_storage(tensor))
                total += tensor.untyped_storage().nbytes()
    return total


@contextmanager
def room_for(what: str, way_out: str) -> Iterator[None]:
    """Turn a failed allocation in this block into RuntimeError, one line with the way out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(_shortage(what, way_out, error)) from error
    except RuntimeError as error:
        # The host's allocator has no class of its own (torch 2.14.1).
        if "can't allocate memory" not in str(error):
            raise
        raise RuntimeError(_shortage(what, way_out, error)) from error


def mib(size: float) -> str:
    """Bytes as text."""
    return f"{size / 2**20:.1f} MiB"


def _shortage(what: str, way_out: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"out of memory for {what}: {way_out} ({reason})"


def _tensors(owner: Any) -> Iterator[torch.Tensor]:
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, torch.nn.Module):
        yield from owner.parameters()
        yield from owner.buffers()
    elif isinstance(owner, (list, tuple)):
        for item in owner:
            yield from _tensors(item)
    elif hasattr(owner, "__dict__") and type(owner).__module__.startswith("sglang_dart"):
        for value in vars(owner).values():
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
