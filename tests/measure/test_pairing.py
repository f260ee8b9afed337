"""What the doctor says of block drafters; DART heads are in tests/test_doctor.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dart.measure.pairing import pairing
from tests import dartree

TARGET = str(dartree.GOLDEN / "target")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A copy of a golden Domino drafter."""
    return shutil.copytree(dartree.GOLDEN / "domino_shift", tmp_path / "drafter")


def edit(drafter: Path, nested: dict[str, Any], **fields: Any) -> None:
    config = json.loads((drafter / "config.json").read_text()) | fields
    config["dflash_config"] |= nested
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
    (drafter / "config.json").write_text(json.dumps(config))


def texts(drafter: Path | str, level: str) -> str:
    return "\n".join(text for found, text in pairing(TARGET, str(drafter)) if found == level)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("domino_shift", "a block of 8 rows: 8 levels; a causal head; shift_label true"),
        ("domino_noshift", "a block of 8 rows: 7 levels; a causal head; shift_label false"),
        ("dflash_plain", "a block of 8 rows: 7 levels; no causal head"),
    ],
)
def test_fitting_pairs(name: str, says: str) -> None:
    folder = str(dartree.GOLDEN / name)
    good = texts(folder, "good")
    assert says in good
    assert "--speculative-algorithm DARTREE" in good
    assert "layers 1, 3, 5 of 8" in good
    assert f"variant {'marginal' if name == 'dflash_plain' else 'pruned'}" in good
    assert texts(folder, "wrong") == texts(folder, "note") == ""


@pytest.mark.parametrize(
    ("nested", "fields", "message"),
    [
        ({}, {"hidden_size": 128}, "hidden_size is 128, the target's is 64"),
        ({}, {"num_target_layers": 36}, "num_target_layers is 36, the target has 8"),
        ({"target_layer_ids": [1, 3]}, {}, "fc.weight is [64, 192], not [64, 128]"),
        ({"projector_type": None}, {}, "unexpected prefix_gru.weight_hh_l0"),
        ({"shift_label": None}, {}, "shift_label is missing"),
        ({}, {"dartree_config": {"varriant": "fixed"}}, "varriant"),
    ],
)
def test_wrong_pairs(drafter: Path, nested: dict, fields: dict, message: str) -> None:
    edit(drafter, nested, **fields)
    assert message in texts(drafter, "wrong")


@pytest.mark.parametrize(
    ("nested", "fields", "message"),
    [
        ({}, {"rope_theta": 10000.0}, "rope_theta 10000, the target's is 1e+06"),
        ({}, {"eos_token_id": 3}, "eos_token_id 3, the target's is 255"),
        ({}, {"trained": False}, "this head is untrained"),
        ({"mask_token_id": None}, {}, "no mask_token_id"),
    ],
)
def test_likely_reasons_of_few_accepted_drafts(
    drafter: Path, nested: dict, fields: dict, message: str
) -> None:
    edit(drafter, nested, **fields)
    assert message in texts(drafter, "note")
    assert texts(drafter, "wrong") == ""


def test_broken_weights(drafter: Path) -> None:
    file = drafter / "model.safetensors"
    tensors = load_file(file)
    tensors["prefix_gru.weight_hh_l0"][0, 0] = torch.nan
    save_file(tensors, file)
    assert "not finite: prefix_gru.weight_hh_l0" in texts(drafter, "wrong")
