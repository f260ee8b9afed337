"""The mask layouts that SGLang's attention back-ends read."""

import pytest
import torch

from sglang_dart.engine.verifier import write_full_mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("lengths", [[0], [3], [5, 1, 17], [64, 64]])
def test_full_mask_is_row_after_row_behind_the_committed_columns(lengths, dtype):
    width = 3
    mask = torch.rand(len(lengths), width, width) < 0.5
    spare = 7
    cells = sum(width * (length + width) for length in lengths)
    flat = torch.ones(cells + spare, dtype=dtype)
    write_full_mask(mask, torch.tensor(lengths), flat)

    expected = [
        torch.cat([torch.ones(length, dtype=torch.bool), row])
        for tree, length in zip(mask, lengths, strict=True)
        for row in tree
    ]
    assert torch.equal(flat[:cells].bool(), torch.cat(expected))
    assert flat[cells:].bool().all()
