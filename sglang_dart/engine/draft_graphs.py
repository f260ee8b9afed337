"""Drafting and tree growth captured before serving, for the batches of captured verify steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from sglang_dart.capture import Captured, CudaRecorder
from sglang_dart.commit import RoundState
from sglang_dart.draft.captured import CapturedDrafter
from sglang_dart.draft.drafter import Drafter
from sglang_dart.engine.memory import mib, room_for
from sglang_dart.tree.plan import TreePlanner

logger = logging.getLogger(__name__)


def capture_drafting(
    drafter: Drafter,
    planner: TreePlanner,
    state: RoundState,
    sizes: Mapping[int, Sequence[int]],
    *,
    feature: torch.Tensor,
    slot_table: torch.Tensor,
) -> tuple[CapturedDrafter, float]:
    """Capture a drafter's steps, and the growth of trees if they grow on the device.

    sizes: batch sizes by width of tree. feature [1, taps * H], slot_table [.., W]: see
    CapturedDrafter. Gives the captured drafter, and the bytes of all graphs with their buffers; the
    planner is captured in place.
    Raises RuntimeError, one line, if the device has too little memory.
    """
    torch.cuda.empty_cache()
    free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
    record = CudaRecorder()
    batches = sorted(set().union(*sizes.values()))
    way_out = "lower --cuda-graph-max-bs-decode or --mem-fraction-static"
    with room_for(f"the graphs of drafting for {batches[-1]} requests", way_out):
        captured = CapturedDrafter(
            drafter,
            planner.candidates,
            feature=feature,
            slot_table=slot_table,
            rows=planner.levels(max(sizes)) + 1,
            sizes=batches,
            record=record,
        )
        if planner.home.type != "cpu":
            number = torch.zeros(1, dtype=torch.int64, device=feature.device)
            like = state.take([0], number)[0], number, number
            planner.capture(
                lambda growth, width: Captured(growth, like, sizes[width], record), sizes
            )
    torch.cuda.empty_cache()
    used = free - torch.cuda.mem_get_info()[0]
    logger.info(
        "sglang-dart: memory: drafting graphs %s (%d graphs, up to %d requests, %.1f s)",
        mib(used),
        record.count,
        batches[-1],
        time.perf_counter() - started,
    )
    return captured, used
