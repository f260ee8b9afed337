"""The comparison of training with serving sees what it is for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dart.draft.dart import DartDrafter, DartHead
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.domino import DominoDrafter
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.corpus import Corpus, load_corpus
from sglang_dart.train.fidelity import logit_difference
from sglang_dart.train.gate import LOGIT_TOLERANCE


@pytest.fixture
def corpus(texts: Path) -> Corpus:
    return load_corpus([texts], 264, 512)


def in_dtype(target: FrozenTarget, taps: Any, dtype: torch.dtype) -> FrozenTarget:
    return FrozenTarget(copy.deepcopy(target.model).to(dtype), taps)


@pytest.fixture(params=["dart", "dflash", "domino"])
def make_drafter(
    request: pytest.FixtureRequest, tiny_head: DartHead, make_block_method: Callable
) -> Callable[[FrozenTarget, torch.dtype], Any]:
    """Makes a drafter for a target: `make_drafter(target, dtype)`; `.taps` are what it reads."""

    def make(target: FrozenTarget, dtype: torch.dtype) -> Any:
        if request.param == "dart":
            return DartDrafter(tiny_head.to(dtype).requires_grad_(False), target.embed, 8)
        kind = DominoDrafter if request.param == "domino" else DFlashDrafter
        model = make_block_method(request.param).model.to(dtype).requires_grad_(False)
        return kind(model, target.embed, target.logits, 8)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_weights_agree_and_others_do_not(
    make_drafter: Callable, target: FrozenTarget, corpus: Corpus, dtype: torch.dtype
) -> None:
    taps = make_drafter(target, torch.float32).taps
    own = in_dtype(target, taps, dtype)
    drafter = make_drafter(own, dtype)
    assert logit_difference(drafter, own, corpus) < LOGIT_TOLERANCE[dtype]

    # The serving side alone reads other taps.
    drafter.append = _disturbed(drafter.append)
    assert logit_difference(drafter, own, corpus) > LOGIT_TOLERANCE[dtype]


def _disturbed(append: Callable) -> Callable:
    def wrong(rows: Any) -> None:
        append(type(rows)(-rows.feature, rows.next_token, rows.position, rows.slot))

    return wrong
