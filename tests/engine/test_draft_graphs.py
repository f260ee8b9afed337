"""Capture before serving: what is captured, the line that says so, and the one when it fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from sglang_dart.engine import draft_graphs
from sglang_dart.engine.draft_graphs import capture_drafting
from tests.draft.test_block_graph import HIDDEN, planner_of, small_drafter, state_for
from tests.test_capture import replayer


class Recorder:
    """Stands in for graphs; fails beyond a number of them."""

    most = 100

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Any) -> Any:
        self.count += 1
        if self.count > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return replayer(run)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(draft_graphs, "CudaRecorder", Recorder)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    free = iter([9 * 2**20, 2 * 2**20])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 2**30))


def capture(home: str, sizes: dict[int, list[int]]) -> Any:
    drafter = small_drafter("pruned", "cpu")
    planner = planner_of(drafter, "pruned", home)
    state = state_for(drafter, planner_of(drafter, "pruned", "cpu"), "cpu")
    feature = torch.zeros(1, len(drafter.taps) * HIDDEN)
    table = torch.zeros(4, 30, dtype=torch.int32)
    return capture_drafting(drafter, planner, state, sizes, feature=feature, slot_table=table)


@pytest.mark.parametrize(
    ("home", "graphs"),
    # Appends and drafts for 1, 2 and 4 requests; growths for 2 + 1 sizes, unless the host's.
    [("cpu", 2 * 3), ("meta", 2 * 3 + 2 + 1)],
)
def test_what_is_captured_and_said(home, graphs, caplog):
    with caplog.at_level(logging.INFO):
        captured, used = capture(home, {5: [1, 4], 9: [2]})
    assert used == 7 * 2**20
    line = f"drafting graphs 7.0 MiB ({graphs} graphs, up to 4 requests, "
    assert line in caplog.text
    with pytest.raises(RuntimeError, match="before graphs are captured"):
        captured.allocate(9)


@pytest.mark.parametrize("most", [0, 7])
def test_too_little_memory_is_one_line_with_the_way_out(most, monkeypatch):
    monkeypatch.setattr(Recorder, "most", most)
    with pytest.raises(RuntimeError) as caught:
        capture("meta", {9: [1, 2, 4]})
    message = str(caught.value)
    assert message.startswith(
        "out of memory for the graphs of drafting for 4 requests: "
        "lower --cuda-graph-max-bs-decode or --mem-fraction-static ("
    )
    assert "\n" not in message
