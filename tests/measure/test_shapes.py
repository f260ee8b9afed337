"""Folders of published shapes: what our loaders and the papers' tables say of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sglang_dart.draft.checkpoint import read_config
from sglang_dart.draft.dart import DartHead, load_head
from sglang_dart.draft.dflash_config import read_dflash_config
from sglang_dart.draft.domino import DominoModel, load_domino
from sglang_dart.measure.arms import Arm
from sglang_dart.measure.shapes import Shape, published_length, simulated


@pytest.fixture
def tiny(golden: Path) -> Shape:
    """The golden target's sizes."""
    return Shape.of(str(golden / "dart/target/config.json"))


# Parameters in billions, embedding included once where it is tied.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-1.7B", 1.72),
        ("Qwen3-4B", 4.02),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
        ("Qwen3-32B", 32.76),
    ],
)
def test_targets_have_their_published_size(tmp_path: Path, name: str, billions: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(Shape.of(name).write_target(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


# In millions, as the papers and their checkpoints have them.
@pytest.mark.parametrize(
    ("name", "dart", "domino"), [("Qwen3-4B", 218.3, 537 + 50.8), ("Qwen3-8B", 399.5, 1049 + 55.9)]
)
def test_drafters_have_their_published_size(
    tmp_path: Path, monkeypatch, name: str, dart: float, domino: float
) -> None:
    from sglang_dart.measure import shapes

    made = {}

    def keep(folder: Path, _, make) -> None:
        with torch.device("meta"):
            made[folder.name] = make()

    monkeypatch.setattr(shapes, "_write_random", keep)
    for kind in ("dart", "domino"):
        Shape.of(name).write_drafter(kind, tmp_path)
    sizes = {kind: sum(p.numel() for p in made[kind].parameters()) / 1e6 for kind in made}
    assert sizes["dart"] == pytest.approx(dart, abs=0.2)
    assert sizes["domino"] == pytest.approx(domino, abs=1.0)


def test_drafters_of_ours_load(tmp_path: Path, tiny: Shape) -> None:
    source = str(tiny.write_drafter("dart", tmp_path))
    head = load_head(source, read_config(source))
    assert isinstance(head, DartHead)
    assert 0 < head.fc.weight.abs().mean() < math.inf
    source = str(tiny.write_drafter("domino", tmp_path))
    assert isinstance(load_domino(source, read_dflash_config(source)), DominoModel)
    config = read_dflash_config(str(tiny.write_drafter("dflash", tmp_path)))
    assert config.domino is None
    assert config.levels == 15
    # Made once.
    weights = tmp_path / "dart" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    tiny.write_drafter("dart", tmp_path)
    assert weights.stat().st_mtime_ns == before
    eagle3 = json.loads((tiny.write_drafter("eagle3", tmp_path) / "config.json").read_text())
    assert eagle3["hidden_size"] == tiny.config["hidden_size"]
    assert eagle3["num_hidden_layers"] == 1


def test_an_arm_gets_a_drafter_and_a_length(tmp_path: Path, tiny: Shape) -> None:
    made = simulated(Arm.parse("DART"), tiny, tmp_path, None)
    assert made.drafter == str(tmp_path / "dart")
    # Nothing is published for a shape of one's own.
    assert made.env == {"SGLANG_SIMULATE_ACC_LEN": "2"}
    made = simulated(Arm.parse("NGRAM"), tiny, tmp_path, 3.25)
    assert (made.drafter, made.env) == ("", {"SGLANG_SIMULATE_ACC_LEN": "3.25"})
    own = simulated(Arm.parse("low:DART SGLANG_SIMULATE_ACC_LEN=1"), tiny, tmp_path, 3.25)
    assert own.env == {"SGLANG_SIMULATE_ACC_LEN": "1"}
    assert simulated(Arm.parse("plain"), tiny, tmp_path, 3.0) == Arm("plain", "plain")
    with pytest.raises(ValueError, match="drafter medusa: with --shapes, one of dart, domino"):
        simulated(Arm.parse("DART=medusa"), tiny, tmp_path, None)


@pytest.mark.parametrize(
    ("arm", "length"),
    [
        ("DART", 3.61),
        ("EAGLE3", 3.72),
        ("DARTREE", 9.91),
        ("DFLASH", 7.17),
        ("DFLASH=dflash", 5.95),
        ("NGRAM", None),
        ("plain", None),
    ],
)
def test_published_lengths(arm: str, length: float | None) -> None:
    assert published_length("Qwen3-8B", Arm.parse(arm)) == length
    assert published_length("my-shape", Arm.parse(arm)) is None


def test_an_unknown_shape_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither one of Qwen3-1\.7B, .* nor a readable"):
        Shape.of(str(tmp_path / "no.json"))
