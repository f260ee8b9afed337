"""The golden block drafters: the models, and what each case feeds them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_dart.draft.dflash import DFlashDrafter, load_dflash
from sglang_dart.draft.dflash_config import read_dflash_config
from sglang_dart.draft.domino import DominoDrafter, load_domino
from sglang_dart.draft.drafter import Roots, Rows

GOLDEN = Path(__file__).parent / "golden/dartree"
DOMINO = ("domino_shift", "domino_noshift")
TARGET_LAYERS = 8


@functools.cache
def read(name: str) -> Any:
    """A JSON file of the golden vectors."""
    return json.loads((GOLDEN / name).read_text())


@functools.cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name)


def embed(token: torch.Tensor) -> torch.Tensor:
    return tensors("target/model.safetensors")["model.embed_tokens.weight"][token]


def lm_head(hidden: torch.Tensor) -> torch.Tensor:
    weight = tensors("target/model.safetensors")["lm_head.weight"]
    return hidden @ weight.to(hidden.dtype).T


def drafter(name: str, slots: int = 64, dtype: torch.dtype = torch.float32) -> Any:
    """A golden drafter by the name of its folder, KV allocated."""
    source = str(GOLDEN / name)
    config = read_dflash_config(source)
    made: DFlashDrafter
    if config.domino is None:
        made = DFlashDrafter(load_dflash(source, config, dtype=dtype), embed, lm_head, 8)
    else:
        made = DominoDrafter(load_domino(source, config, dtype=dtype), embed, lm_head, 8)
    made.allocate(slots)
    return made


def slots_of(position: torch.Tensor) -> torch.Tensor:
    """Any injective map from positions (< 61) to slots that is not the identity."""
    return (position * 7) % 61 + 1


def rows_of(case: dict[str, Any], feature: torch.Tensor) -> Rows:
    """The rows that a case adds to the context."""
    position = torch.arange(case["start"] - case["new_context_rows"], case["start"])
    # Block drafters have no use for the token that follows a row.
    return Rows(feature, torch.full_like(position, -1), position, slots_of(position))


def roots_of(case: dict[str, Any]) -> Roots:
    table = torch.full((1, 40), 10**6)
    table[0, : case["start"]] = slots_of(torch.arange(case["start"]))
    return Roots(
        torch.tensor([case["root"]]),
        torch.tensor([case["start"]]),
        torch.full((1, 3 * 64), torch.nan),
        table,
    )
