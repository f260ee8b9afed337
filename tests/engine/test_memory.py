"""Start-up memory: what is counted, and the line when there is too little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dart.draft.dart import DartDrafter
from sglang_dart.engine import patches
from sglang_dart.engine.memory import room_for, tensor_bytes


def test_draft_kv_adds_its_slots(tiny_drafter: DartDrafter) -> None:
    before = tensor_bytes(tiny_drafter)
    weights = sum(tensor.nbytes for tensor in tiny_drafter.head.parameters())
    assert before >= weights + 64 * tiny_drafter.kv_bytes_per_slot()
    tiny_drafter.allocate(128)
    assert tensor_bytes(tiny_drafter) - before == 64 * tiny_drafter.kv_bytes_per_slot()


def test_shared_storage_counts_once_and_the_targets_not_at_all() -> None:
    target = torch.nn.Linear(8, 8, bias=False)
    own = torch.nn.Linear(4, 4, bias=False)
    views = [own.weight[0], own.weight[1:], target.weight.detach()]
    assert tensor_bytes(own, views, beside=target) == 4 * 4 * 4


def test_shortage_is_one_line_with_the_way_out() -> None:
    with (
        pytest.raises(RuntimeError) as caught,
        room_for("draft KV", "lower --max-total-tokens"),
    ):
        torch.empty(2**62, dtype=torch.uint8)
    message = str(caught.value)
    assert message.startswith("out of memory for draft KV: lower --max-total-tokens (")
    assert "\n" not in message


def test_a_gpus_shortage_too() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^out of memory for the drafter: take a smaller \("),
        room_for("the drafter", "take a smaller"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), room_for("x", "y"):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("algorithm", "of_draft_worker", "size"),
    [("DART", False, 1064), ("DARTREE", False, 1064), ("DART", True, None), (None, False, None)],
)
def test_a_slot_of_the_pool_costs_its_draft_kv_too(
    monkeypatch: pytest.MonkeyPatch, algorithm, of_draft_worker, size
) -> None:
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(patches, "get_spec", lambda: spec)
    asked = SimpleNamespace(
        is_draft_worker=of_draft_worker, spec_algorithm=SimpleNamespace(draft_bytes_per_slot=64)
    )
    assert patches._cell_size(1000, None, asked, 8) == size
