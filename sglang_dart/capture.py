"""Functions of batches, replayed from CUDA graphs instead of launched operation by operation.

A graph has fixed shapes and addresses: a batch is copied into buffers and filled up to the next
captured size with zeros, and what a graph gives stands where its last replay left it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

# Replays a function, and what it gave when it was recorded, overwritten by each replay.
Recording = tuple[Callable[[], None], Any]
# Records a function of nothing.
Recorder = Callable[[Callable[[], Any]], Recording]


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, so that only one may run at a time.

    Results keep their own memory in the pool, and stay valid while other graphs run.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self.count = 0

    def __call__(self, run: Callable[[], Any]) -> Recording:
        """Run once to set libraries up and compile kernels, then record."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        self.count += 1
        return graph.replay, result


class Captured:
    """A function of batches, recorded for a few batch sizes.

    Its arguments and its result are tensors whose first axis is the batch, or tuples and
    dataclasses of such; rows of a batch must not depend on each other. A batch beyond the largest
    size goes to the function itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        like: tuple[Any, ...],
        sizes: Sequence[int],
        record: Recorder,
    ) -> None:
        """`like`: arguments with all axes but the first as long as they will ever be.

        Zeros must be harmless arguments: they fill batches up.
        """
        self._function = function
        self._sizes = sorted(sizes)
        largest = map_tensors(lambda one: one.new_zeros(self._sizes[-1], *one.shape[1:]), like)
        self._buffers = list(tensors(largest))
        # Rows of the buffers that may be other than zero.
        self._used = 0
        self._recordings: dict[int, Recording] = {}
        # Largest first: then the smaller ones find room in what it has allocated.
        for size in reversed(self._sizes):
            self._recordings[size] = record(partial(function, *first_rows(largest, size)))

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives; of a captured size, valid until the next call."""
        given = list(tensors(arguments))
        count = given[0].shape[0]
        at = bisect.bisect_left(self._sizes, count)
        if at == len(self._sizes):
            return self._function(*arguments)
        for buffer, tensor in zip(self._buffers, given, strict=True):
            # Other axes may be shorter than the buffer's, as those of a slot table are.
            buffer[tuple(map(slice, tensor.shape))].copy_(tensor)
            if count < self._used:
                buffer[count : self._used].zero_()
        self._used = count
        replay, result = self._recordings[self._sizes[at]]
        replay()
        return first_rows(result, count)


def first_rows(value: Any, count: int) -> Any:
    """The first `count` rows of every tensor in it."""
    return map_tensors(lambda tensor: tensor[:count], value)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same tuple, dataclass, tensor or None, with every tensor in it changed."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return change(value)
    changed = (map_tensors(change, part) for part in _parts(value))
    return tuple(changed) if isinstance(value, tuple) else type(value)(*changed)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in it, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        yield from itertools.chain.from_iterable(map(tensors, _parts(value)))


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return tuple(getattr(value, field.name) for field in dataclasses.fields(value))
