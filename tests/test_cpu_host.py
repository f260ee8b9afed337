"""The preparation of a host without an accelerator, each case in a fresh process."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dart import cpu_host

# Loading torch takes seconds; `activate` asks it two questions, which this answers.
NO_DEVICE = """
import sys
from types import ModuleType, SimpleNamespace
torch = sys.modules["torch"] = ModuleType("torch")
torch.accelerator = SimpleNamespace(is_available=lambda: False)
torch.version = SimpleNamespace(musa=None)
"""
REPORT = """
import json, os, sys
import sglang_dart.cpu_host as cpu_host
{prepare}
result = cpu_host.activate()
shim = str(cpu_host.SHIM)
print(json.dumps(dict(
    result=result, engine=os.environ.get("SGLANG_USE_CPU_ENGINE"), first=sys.path[0] == shim,
    count=sys.path.count(shim), threads=os.environ.get("OMP_NUM_THREADS"),
    policy=os.environ.get("OMP_WAIT_POLICY"), sglang="sglang" in sys.modules,
)))
"""


def run(prepare: str = "", *, torch: str = NO_DEVICE, **environment: str) -> dict:
    ours = ("SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "SGLANG_PLATFORM")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    # `-c` puts the working directory in front of the path; the package is found wherever it is.
    env["PYTHONPATH"] = str(Path(cpu_host.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", torch + REPORT.format(prepare=prepare)],
        env=env | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout) | {"stderr": done.stderr}


def test_without_accelerator_takes_the_cpu_engine() -> None:
    seen = run(torch="import torch\n")
    assert seen["result"] is None
    assert seen["engine"] == "1"
    assert seen["first"]
    assert seen["threads"] == str(cpu_host.usable_cores())
    assert seen["policy"] == "passive"
    assert not seen["sglang"]


def test_twice_changes_nothing_more() -> None:
    assert run("cpu_host.activate()")["count"] == 1


def test_explicit_choice_is_respected() -> None:
    seen = run(SGLANG_USE_CPU_ENGINE="0")
    assert seen["engine"] == "0"
    assert seen["count"] == 0
    assert seen["threads"] is None


def test_own_thread_settings_are_respected() -> None:
    seen = run(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="active")
    assert (seen["threads"], seen["policy"]) == ("1", "active")


def test_accelerator_is_left_alone() -> None:
    seen = run("cpu_host.torch.accelerator.is_available = lambda: True")
    assert seen["engine"] is None
    assert seen["count"] == 0


def test_other_platform_plugin_is_left_the_choice() -> None:
    seen = run(
        "cpu_host.importlib.metadata.entry_points = lambda group: "
        "[cpu_host.importlib.metadata.EntryPoint('other', 'other:activate', group)]"
    )
    assert seen["engine"] is None


def test_genuine_cpu_kernels_are_not_shadowed() -> None:
    seen = run("cpu_host.has_cpu_kernels = lambda: True")
    assert seen["engine"] == "1"
    assert seen["count"] == 0
    assert seen["threads"] is None


def test_broken_driver_is_named() -> None:
    seen = run("cpu_host._hidden_gpus = lambda: True")
    assert seen["engine"] == "1"
    assert "Check the driver" in seen["stderr"]


def test_shim_wins_over_the_cuda_wheel_in_sglang() -> None:
    pytest.importorskip("sglang")
    seen = run(
        "cpu_host.activate(); import sgl_kernel, torch; "
        "assert str(cpu_host.SHIM) in sgl_kernel.__file__, sgl_kernel.__file__; "
        "assert not hasattr(torch.ops.sgl_kernel, 'convert_weight_packed')",
        torch="import torch\n",
    )
    assert seen["engine"] == "1"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_host._cgroup_quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (math.inf, None)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int | None) -> None:
    monkeypatch.setattr(cpu_host, "_cgroup_quota", lambda: quota)
    assert cpu_host.usable_cores() == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_dtype_follows_the_instruction_set(
    monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: str
) -> None:
    monkeypatch.setattr(cpu_host, "has_fast_bfloat16", lambda: fast)
    assert cpu_host.preferred_dtype() == dtype
    assert f"dtype {dtype}" in cpu_host.describe()


def test_bfloat16_answer_is_that_of_the_library() -> None:
    assert cpu_host.has_fast_bfloat16() is torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_entry_point_names_this_function() -> None:
    ours = [
        point
        for point in importlib.metadata.entry_points(group="sglang.srt.platforms")
        if point.module == cpu_host.__name__
    ]
    if not ours:
        pytest.skip("the package is not installed here")
    assert all(point.load() is cpu_host.activate for point in ours)
