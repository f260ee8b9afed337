"""What a measurement ran on, and how much memory its GPUs hold."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_QUERY_TIMEOUT_S = 30


def hardware() -> str:
    """One line: the GPUs that this process may use, or the processor and its usable cores."""
    gpus = _query("name")
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus)))
    from sglang_dart.cpu_host import usable_cores

    return f"{_processor()}, {usable_cores()} cores"


def gpu_memory_mib() -> int | None:
    """Memory in use on the GPUs that this process may use, by anybody; None without a GPU.

    By the driver's count: a server's process may not see itself by id inside a container.
    """
    used = _query("memory.used")
    return sum(map(int, used)) if used else None


def _query(field: str) -> list[str]:
    """One value a visible GPU; empty without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return []
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        # No driver, or none that answers: a host without a GPU.
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
