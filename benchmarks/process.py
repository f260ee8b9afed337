"""Run a command and watch what it and its children take: time, processor, memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_EVERY_S = 0.05


@dataclass(frozen=True)
class Usage:
    """Of a process tree. Peaks are of the sums over its processes, sampled 20 times a second.

    private_mib: memory that is theirs alone and must stay in memory. resident_mib: with the pages
    of mapped files, which the system writes out and drops when memory is short.
    """

    wall_s: float
    cpu_s: float
    private_mib: int
    resident_mib: int
    answer: dict[str, Any]
    """The JSON object in the last line of its output."""


def run_watched(command: Sequence[str], limit_bytes: int = 0) -> Usage:
    """Run a command; limit_bytes (as root) is all memory that it gets, cached file pages included.

    Raises subprocess.CalledProcessError if it fails.
    """
    group = _limited_group(limit_bytes) if limit_bytes else None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, preexec_fn=(lambda: _join(group)) if group else None
    )
    try:
        private, resident = _peaks(child)
        output = child.communicate()[0]
        wall = time.perf_counter() - start
    finally:
        child.kill()
        child.wait()
        if group:
            group.rmdir()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer = json.loads(output.splitlines()[-1])
    return Usage(round(wall, 2), round(cpu, 2), private >> 20, resident >> 20, answer)


def _peaks(child: subprocess.Popen[bytes]) -> tuple[int, int]:
    private = resident = 0
    root = psutil.Process(child.pid)
    while child.poll() is None:
        sums = [0, 0]
        for process in (root, *_children(root)):
            for i, value in enumerate(_memory(process.pid)):
                sums[i] += value
        private, resident = max(private, sums[0]), max(resident, sums[1])
        time.sleep(_EVERY_S)
    return private, resident


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _memory(pid: int) -> tuple[int, int]:
    """Private and resident bytes, 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    anonymous, whole = (
        int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "VmRSS")
    )
    return anonymous, whole


def _limited_group(limit: int) -> Path:
    unified = (_CGROUP / "cgroup.controllers").exists()
    parent, name = (
        (_CGROUP, "memory.max") if unified else (_CGROUP / "memory", "memory.limit_in_bytes")
    )
    group = parent / f"benchmark-{os.getpid()}"
    group.mkdir()
    (group / name).write_text(str(limit))
    return group


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
