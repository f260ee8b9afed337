"""Runs a module's tests in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(module: str) -> None:
    """The interpreter must be chosen before a kernel is imported: a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
