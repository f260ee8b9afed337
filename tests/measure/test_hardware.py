"""What the driver says, through a stand-in for nvidia-smi; and a host without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_dart.measure.hardware import gpu_memory_mib, hardware

NVIDIA_SMI = """#!/bin/sh
case "$*" in
*--query-gpu=name*--id=1) echo "NVIDIA H200" ;;
*--query-gpu=name*) printf 'NVIDIA H200\\nNVIDIA H200\\n' ;;
*--query-gpu=memory.used*--id=1) echo 1000 ;;
*--query-gpu=memory.used*) printf '24\\n1000\\n' ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nvidia-smi that knows two GPUs, all of them visible."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


def test_all_gpus_or_the_visible_ones(driver: Path, monkeypatch) -> None:
    assert hardware() == "2 x NVIDIA H200"
    assert gpu_memory_mib() == 1024
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware() == "1 x NVIDIA H200"
    assert gpu_memory_mib() == 1000


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_do_not_count(driver: Path, monkeypatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert gpu_memory_mib() is None
    assert hardware().endswith(" cores")


def test_a_driver_that_does_not_answer_is_none(driver: Path) -> None:
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory_mib() is None
    assert hardware().endswith(" cores")
