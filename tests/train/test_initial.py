"""Where a head starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.export import dart_config
from sglang_dart.train.initial import draft_vocabulary, initial_head


def test_vocabulary_takes_the_most_frequent_and_what_it_must() -> None:
    count = np.array([5, 0, 9, 9, 1, 0])
    assert draft_vocabulary(count, 3, set()).tolist() == [0, 2, 3]
    assert draft_vocabulary(count, 3, {5}).tolist() == [2, 3, 5]
    assert draft_vocabulary(count, 5, set()).tolist() == [0, 1, 2, 3, 4]
    assert draft_vocabulary(count, 6, {1}).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("size", "always"), [(7, set()), (1, {0, 1}), (0, {1})])
def test_impossible_vocabulary_is_refused(size: int, always: set[int]) -> None:
    with pytest.raises(ValueError, match="draft vocabulary of"):
        draft_vocabulary(np.zeros(6), size, always)


@pytest.mark.parametrize("passes", [1, 2])
def test_borrowed_output_reads_the_targets_own_stream(target: FrozenTarget, passes: int) -> None:
    given = target.config.to_dict()
    config = dart_config(given, draft_length=3, draft_vocab_size=100)
    sizes = {k: config[k] for k in DartConfig.__dataclass_fields__ if k in config}
    vocabulary = torch.arange(100) * 2 + 1
    head = initial_head(DartConfig(**sizes), target, vocabulary, borrow=True, seed=0)
    assert torch.equal(head.target_id(), vocabulary)
    stream: list[torch.Tensor] = []
    handle = target.decoder.norm.register_forward_hook(lambda _m, i, _o: stream.append(i[0]))
    capture = target.capture(torch.arange(12)[None])
    handle.remove()
    expected = (capture.hidden @ target.lm_head.T)[..., vocabulary]
    with torch.no_grad():
        torch.testing.assert_close(head.logits(stream[0], passes), expected, atol=1e-4, rtol=1e-4)


def test_seed_decides_the_random_part(target: FrozenTarget) -> None:
    config = dart_config(target.config.to_dict(), draft_length=3)
    sizes = {k: config[k] for k in DartConfig.__dataclass_fields__ if k in config}
    vocabulary = torch.arange(target.config.vocab_size)

    def weights(seed: int) -> list[torch.Tensor]:
        head = initial_head(DartConfig(**sizes), target, vocabulary, borrow=True, seed=seed)
        return list(head.parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(0), weights(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(0), weights(1), strict=True))
