"""Points in the work of a round, told apart and timed without waiting for the device."""

from __future__ import annotations

import time
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A point in the work that has been given out so far."""

    def reached(self) -> bool:
        """Whether that work is done; what it has written may then be read. Does not wait."""

    def seconds_since(self, earlier: Self) -> float:
        """Time between two marks that are reached."""


class HostMark:
    """On the host, which works at once: always reached."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def reached(self) -> bool:
        return True

    def seconds_since(self, earlier: Self) -> float:
        return self._time - earlier._time


class DeviceMark:
    """In the current CUDA stream. Made at every round's start, two of them frame a round there."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def reached(self) -> bool:
        return self._event.query()

    def seconds_since(self, earlier: Self) -> float:
        return earlier._event.elapsed_time(self._event) / 1000


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host: itself, or a copy that is complete when a later mark is reached."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
