"""`python -m sglang_dart.train`."""

import sys

from sglang_dart.cli import run_tool
from sglang_dart.train.cli import app

if __name__ == "__main__":
    sys.exit(run_tool(app, "sglang-dart train"))
