"""A wrong `shift_label` is found in a short text; a right one is never called wrong."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.draft.shift_check import ENOUGH, ShiftCheck
from sglang_dart.reference import TargetReader
from tests import dartree


@pytest.fixture(scope="module")
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """A text that the target continues by itself, [T], and its features, [T, taps * H]."""
    target = AutoModelForCausalLM.from_pretrained(
        dartree.GOLDEN / "target", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    run = dartree.read("dflash_cases.json")
    ids = torch.tensor(run["prompts"][1] + run["ar_tokens"][1][:70])
    position = torch.arange(len(ids))
    with torch.no_grad():
        _, feature = TargetReader(target, (1, 3, 5)).read(
            ids, position, position[:, None] >= position
        )
    return ids, feature


def check_of(name: str, *, flip: bool, text: tuple[torch.Tensor, torch.Tensor]) -> ShiftCheck:
    """A check of a golden drafter that has read the text, perhaps with the label turned over."""
    drafter = dartree.drafter(name, slots=128)
    if flip:
        config = drafter.model.config
        domino = dataclasses.replace(config.domino, shift_label=not config.domino.shift_label)
        drafter.model.config = dataclasses.replace(config, domino=domino)
        drafter = type(drafter)(drafter.model, dartree.embed, dartree.lm_head, 8)
        drafter.allocate(128)
    ids, feature = text
    position = torch.arange(len(ids))
    drafter.append(Rows(feature, ids, position, position + 1))
    return ShiftCheck(drafter, "some/drafter")


def roots_in(text: tuple[torch.Tensor, torch.Tensor]) -> tuple[Roots, torch.Tensor]:
    """Every token of the text but the first and the last as a root, and what follows it."""
    ids, feature = text
    position = torch.arange(1, len(ids) - 1)
    table = torch.arange(1, len(ids) + 1).expand(len(position), -1)
    return Roots(ids[1:-1], position, feature[:-2], table), ids[2:]


@pytest.mark.parametrize("name", dartree.DOMINO)
def test_a_wrong_label_is_found_and_named(name, text, caplog):
    check = check_of(name, flip=True, text=text)
    with caplog.at_level(logging.ERROR):
        check.observe(*roots_in(text))
    assert check.wrong
    assert check.done
    (record,) = caplog.records
    said = record.getMessage()
    assert "some/drafter" in said
    right = "true" if name == "domino_shift" else "false"
    assert f"set it to {right} (" in said


@pytest.mark.parametrize("name", [*dartree.DOMINO, "dflash_plain"])
def test_a_right_label_is_left_alone(name, text, caplog):
    check = check_of(name, flip=False, text=text)
    while not check.done:
        check.observe(*roots_in(text))
    assert not check.wrong
    assert check._seen < ENOUGH + 100
    assert not caplog.records


def test_noise_is_no_evidence(text):
    """Random tokens are found by neither slot, whatever the label."""
    check = check_of("domino_shift", flip=True, text=text)
    roots, following = roots_in(text)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        check.observe(roots, torch.randint(257, following.shape, generator=generator))
    assert not check.wrong
