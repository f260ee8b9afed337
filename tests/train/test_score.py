"""Levels of a saved drafter, scored on answers, against its drafts one root at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dart.draft.dart import DartDrafter, DartHead
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.export import dart_config, dflash_config, write_checkpoint
from sglang_dart.train.score import level_hits

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def answer(target_folder: Path) -> list[int]:
    """What the target says greedily."""
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False
    )
    return out[0, len(PROMPT) :].tolist()


def test_dart_levels_are_counted_as_they_are_served(
    target_folder: Path,
    target: FrozenTarget,
    tiny_head: DartHead,
    answer: list[int],
    tmp_path: Path,
) -> None:
    sizes = {"draft_length": 3, "draft_vocab_size": 160, "intermediate_size": 32}
    raw = dart_config(target.config.to_dict(), **sizes)
    write_checkpoint(tmp_path, raw, tiny_head.state_dict())
    texts = {"one": [(PROMPT, answer)], "two": [(PROMPT, answer), (PROMPT, answer[:5])]}
    found = level_hits("DART", str(tmp_path), str(target_folder), texts, "float32")

    right, asked = [0] * 4, [0] * 4
    drafter = DartDrafter(tiny_head, target.embed, 8)
    ids = torch.tensor([*PROMPT, *answer])
    feature, slot = target.capture(ids[None]).feature[0], torch.arange(1, len(ids))
    drafter.allocate(len(ids))
    drafter.append(Rows(feature[:-1], ids[1:], slot - 1, slot))
    for root in range(len(PROMPT), len(ids) - 1):
        last = feature[root - 1 : root]
        best = drafter.draft(Roots(ids[root][None], torch.tensor([root]), last, slot[None]), 1)
        for level, token in enumerate(ids[root + 1 : root + 5].tolist()):
            asked[level] += 1
            right[level] += int(best.token[0, level, 0]) == token
    assert found["one"] == (right, asked)
    assert asked == [19, 18, 17, 16]
    assert found["two"][1] == [23, 21, 19, 17]


def test_domino_levels_follow_the_text(
    target_folder: Path,
    block_target: FrozenTarget,
    make_block_method: Callable,
    answer: list[int],
    tmp_path: Path,
) -> None:
    method = make_block_method("domino", anchors=99)
    fields = {"pure_draft_prefix_len": 1, "emb_dim": 5, "gru_hidden_dim": 7, "shift_label": True}
    raw = dflash_config(
        block_target.config.to_dict(),
        layers=2,
        taps=[1, 4, 6],
        block_size=6,
        mask_token_id=263,
        intermediate_size=32,
        domino=fields,
    )
    write_checkpoint(tmp_path, raw, method.model.state_dict())
    texts = {"set": [(PROMPT, answer)]}
    right, asked = level_hits("DARTREE", str(tmp_path), str(target_folder), texts, "float32")["set"]
    assert asked == [19, 18, 17, 16, 15, 14]
    assert all(r <= a for r, a in zip(right, asked, strict=True))
