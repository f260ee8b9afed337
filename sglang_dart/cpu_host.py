"""Prepares a host without an accelerator for SGLang, then declines to be a platform.

SGLang calls `activate` (entry point group `sglang.srt.platforms`) at the first look at the
platform, in every process, before it decides whether it runs on a CPU and before it imports
`sgl_kernel`. Imports no SGLang, which is half-imported at that time.
"""

from __future__ import annotations

import glob
import importlib.metadata
import logging
import math
import os
import sys
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
SHIM = Path(__file__).parent / "_cpu_shim"

# Distributions of sgl-kernel that hold its compiled CPU operators.
_CPU_KERNELS = ("sglang-kernel-cpu", "sgl-kernel-cpu")


def activate() -> None:
    """Choose SGLang's CPU engine where there is no accelerator, and give it what it imports.

    Environment, only where unset: SGLANG_USE_CPU_ENGINE=1 if no accelerator is visible; without
    SGLang's compiled CPU operators also OMP_NUM_THREADS and OMP_WAIT_POLICY (see
    `_thread_defaults`), which the processes that SGLang starts inherit. A user's own value of any
    of them is respected.
    Returns None: SGLang goes on to its own CPU platform.
    """
    if CPU_ENGINE not in os.environ and not _has_accelerator() and not _other_platform_plugins():
        os.environ[CPU_ENGINE] = "1"
        if _hidden_gpus():
            logger.warning(
                "sglang-dart: NVIDIA devices exist but CUDA cannot use them; serving on the CPU. "
                "Check the driver (nvidia-smi), or set %s=0 to make SGLang insist on the GPU",
                CPU_ENGINE,
            )
    if os.environ.get(CPU_ENGINE) != "1" or has_cpu_kernels():
        # SGLang's own CPU build brings its operators and binds its threads.
        return
    _thread_defaults()
    if str(SHIM) not in sys.path:
        # In front: the CUDA wheel of sgl_kernel is installed too, and fails to load here.
        sys.path.insert(0, str(SHIM))


def has_cpu_kernels() -> bool:
    """Whether SGLang's compiled CPU operators are installed."""
    for name in _CPU_KERNELS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def has_fast_bfloat16() -> bool:
    """Whether matrix products in bfloat16 have fast kernels on this CPU.

    oneDNN needs AVX-512 (x86) or the bf16 extension (Arm). Without them torch multiplies row by
    row, so that a verify step of n rows costs n decode steps. Measured on an EPYC with AVX2, one
    thread, all linear layers of SmolLM2-135M: 1 / 8 / 32 rows take 29 / 221 / 851 ms in bfloat16,
    36 / 77 / 146 ms in float32.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def preferred_dtype() -> str:
    """What `--dtype auto` should mean on this CPU for a bfloat16 checkpoint."""
    return "bfloat16" if has_fast_bfloat16() else "float32"


def describe() -> str:
    """One line for the log: which CPU path runs, and what would be faster."""
    kernels = "sgl_kernel (CPU build)" if has_cpu_kernels() else "plain torch operators"
    isa = torch.backends.cpu.get_cpu_capability()
    dtype = preferred_dtype()
    why = "" if has_fast_bfloat16() else " (bfloat16 has no fast kernels without AVX-512 or AMX)"
    return f"CPU path: {kernels}, {isa}, {usable_cores()} cores, dtype {dtype}{why}"


def usable_cores() -> int:
    """Cores that this process may use: its affinity, bounded by the control group's quota."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _cgroup_quota())))


def _thread_defaults() -> None:
    """Threads that sleep while they wait, and no more of them than there are cores.

    libgomp's waiting threads spin by default. Where cores are shared that is disastrous: with a
    load of 8 on 2 cores, all linear layers of SmolLM2-135M for 8 rows took 2.1 s (spinning)
    against 0.27 s (passive) and 0.16 s (one thread). torch counts the cores of the affinity mask
    but not the quota of a container.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _has_accelerator() -> bool:
    # CUDA, ROCm, XPU, MPS and registered devices such as NPU; false for hidden or broken ones.
    if torch.accelerator.is_available():
        return True
    return getattr(torch.version, "musa", None) is not None


def _other_platform_plugins() -> bool:
    """Another platform plug-in may drive a device that torch does not name: leave it the choice."""
    plugins = importlib.metadata.entry_points(group="sglang.srt.platforms")
    return any(plugin.module != __name__ for plugin in plugins)


def _hidden_gpus() -> bool:
    """GPUs that the user did not hide and that CUDA does not see all the same."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return hidden is None and bool(glob.glob("/dev/nvidia[0-9]*"))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU quota in cores, infinite if there is none (control groups version 2, then 1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    if quota in ("max", "-1"):
        return math.inf
    return int(quota) / int(period)
