"""Fixtures of the page: a tokenizer of bytes, and golden generations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dart.options import DartOptions, DartreeOptions
from sglang_dart.reference import Generation, generate
from tests import dartree
from tests.trace_page.drawn import BUDGET

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def generations(golden_drafter) -> dict[str, tuple[list[int], Generation]]:
    """Prompt and generation of each algorithm's golden models, 64 nodes a tree."""
    prompt = dartree.read("domino_e2e_greedy.json")[0]["prompt"]
    targets = {
        name: AutoModelForCausalLM.from_pretrained(
            GOLDEN / name / "target", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name in ("dart", "dartree")
    }
    start = json.loads((GOLDEN / "dart/e2e_greedy.json").read_text())["runs"][0]["prompt"]
    found = {"DART": (start, golden_drafter(), DartOptions(budget=BUDGET), "dart")}
    for variant in ("pruned", "fixed", "chain", "marginal"):
        options = DartreeOptions(variant=variant, budget=BUDGET)
        found[f"DARTREE {variant}"] = (
            *(prompt, dartree.drafter("domino_shift")),
            *(options, "dartree"),
        )
    return {
        name: (ids, generate(targets[target], drafter, ids, 40, options=options))
        for name, (ids, drafter, options, target) in found.items()
    }
