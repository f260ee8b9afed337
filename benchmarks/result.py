"""How a benchmark's figures are kept: the command, the machine, the numbers, as JSON."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from sglang_dart import _core


def write_result(output: Path, command: str, figures: dict[str, Any]) -> None:
    """Write `figures` beside what is needed to repeat and judge them."""
    output.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "command": command,
        "processor": _processor(),
        "cores": _core.available_cores(),
        # Above the number of cores: others disturbed the wall times.
        "load_average": round(os.getloadavg()[0], 1),
    }
    output.write_text(json.dumps(machine | figures, indent=1) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
