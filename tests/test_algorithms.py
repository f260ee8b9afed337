"""What the names mean, for every kind of drafter and variant, before any engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dart.algorithms import Method, Target, load_method
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.domino import DominoDrafter
from sglang_dart.ngram_model import Vocabulary
from sglang_dart.options import ENVIRONMENT, DartreeOptions, load_dartree_options
from tests import dartree


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def drafter(tmp_path: Path):
    """`drafter(name, **dartree_config)`: a copy of a golden drafter."""

    def make(name: str, **settings: Any) -> str:
        folder = shutil.copytree(dartree.GOLDEN / name, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dartree_config": settings}))
        return str(folder)

    return make


TARGET = Target(
    8, 64, 257, dartree.embed, torch.float32, torch.device("cpu"), dartree.lm_head,
    {"<|MASK|>": 256}.get,
)  # fmt: skip


def planner_of(method: Method, *, chain: bool | None = None) -> Any:
    return method.planner(
        method.load_drafter(TARGET),
        method.levels,
        chain=method.chain if chain is None else chain,
        vocabulary=Vocabulary(size=257),
    )


@pytest.mark.parametrize(
    ("name", "settings", "levels", "kind", "head", "recipe"),
    [
        ("domino_shift", {}, 8, DominoDrafter, True, (12, False, -0.2)),
        ("domino_noshift", {}, 7, DominoDrafter, True, (12, False, -0.2)),
        ("dflash_plain", {}, 7, DFlashDrafter, False, (40, True, 0.0)),
        ("domino_shift", {"variant": "fixed"}, 8, DominoDrafter, True, (0, False, 0.0)),
        ("domino_shift", {"variant": "marginal"}, 8, DominoDrafter, False, (40, True, 0.0)),
        ("domino_shift", {"width": 3, "depth_bonus": -1}, 8, DominoDrafter, True, (3, False, -1)),
        ("domino_shift", {"candidates": 5}, 8, DominoDrafter, True, (5, False, -0.2)),
    ],
)
def test_a_variant_is_a_head_and_a_recipe(drafter, name, settings, levels, kind, head, recipe):
    settings = {key: float(v) if key == "depth_bonus" else v for key, v in settings.items()}
    method = load_method("DARTREE", drafter(name, **settings), None)
    assert (method.levels, method.chain, method.default_width("cuda")) == (levels, False, 65)
    assert type(method.load_drafter(TARGET)) is kind
    planner = planner_of(method)
    assert (planner._head is not None) == head
    made = planner._recipe(40)
    assert (made.budget, made.frontier, made.every_child, made.depth_bonus) == (40, *recipe)
    assert planner.candidates == settings.get("candidates", 64)


@pytest.mark.parametrize("name", ["domino_shift", "dflash_plain"])
def test_chains(drafter, name):
    """By the variant, or by the flag with any variant."""
    source = drafter(name, variant="chain")
    method = load_method("DARTREE", source, None)
    assert method.chain
    assert planner_of(method)._recipe is None
    other = load_method("DARTREE", str(dartree.GOLDEN / name), None)
    assert not other.chain
    planner = planner_of(other, chain=True)
    assert planner._recipe is None
    assert (planner._head is not None) == (name == "domino_shift")


@pytest.mark.parametrize("variant", ["pruned", "fixed"])
def test_a_variant_that_needs_a_head_is_refused_without_one(drafter, variant):
    source = drafter("dflash_plain", variant=variant)
    with pytest.raises(ValueError, match=f"variant {variant} needs .* use marginal or chain") as e:
        load_method("DARTREE", source, None)
    assert str(e.value).startswith(source)


def test_small_vocabularies_have_fewer_candidates(drafter):
    method = load_method("DARTREE", drafter("domino_shift", candidates=1000), None)
    assert planner_of(method).candidates == 257


def test_mask_token_by_its_text(drafter):
    source = drafter("dflash_plain")
    config = json.loads((Path(source) / "config.json").read_text())
    del config["dflash_config"]["mask_token_id"]
    (Path(source) / "config.json").write_text(json.dumps(config))
    made: Any = load_method("DARTREE", source, None).load_drafter(TARGET)
    assert made._block.tolist() == [256] * 8


def test_drafter_of_the_other_algorithm_is_refused_in_one_line(golden):
    others = {"DART": dartree.GOLDEN / "domino_shift", "DARTREE": golden / "dart/head"}
    for name, source in others.items():
        with pytest.raises(ValueError, match="is this the right drafter") as caught:
            load_method(name, str(source), None)
        assert "\n" not in str(caught.value)


def test_target_of_another_size_is_refused():
    method = load_method("DARTREE", str(dartree.GOLDEN / "domino_shift"), None)
    method.check_target(hidden_size=64, vocab_size=257, layers=8)
    with pytest.raises(ValueError, match="belongs to another target"):
        method.check_target(hidden_size=64, vocab_size=257, layers=9)


def test_dartree_options_and_their_sources(monkeypatch):
    assert load_dartree_options({}) == DartreeOptions()
    monkeypatch.setenv(ENVIRONMENT, '{"variant": "fixed"}')
    given = {"dartree_config": {"variant": "chain", "width": 5}, "dart_config": {"beam": 3}}
    options = load_dartree_options(given)
    assert (options.variant, options.width) == ("fixed", 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"beam": 7}', "beam"),
        ('{"variant": "wide"}', "variant"),
        ('{"depth_bonus": 0.1}', "depth_bonus"),
        ('{"width": 0}', "width"),
    ],
)
def test_wrong_dartree_options_are_one_line(monkeypatch, text, says):
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ValueError, match=ENVIRONMENT) as caught:
        load_dartree_options({})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
