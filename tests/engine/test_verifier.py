"""The mask layouts that SGLang's attention back-ends read."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sglang_dart.engine.verifier import RootVerifyInput, write_full_mask


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


def verify_input(kind: type[EagleVerifyInput], mask: torch.Tensor | None) -> EagleVerifyInput:
    """Of roots alone, in as far as FlashInfer asks."""
    return kind(
        draft_token=None,
        custom_mask=mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=0,
        topk=1,
        draft_token_num=1,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def test_roots_alone_are_laid_out_as_any_tree_but_without_a_mask():
    length = torch.tensor([5, 1, 17])

    def pack(plan, *, out, **_):
        out.copy_(torch.arange(len(out)))

    batch = {
        "req_pool_indices": torch.arange(3),
        "paged_kernel_lens": length,
        "paged_kernel_lens_sum": int(length.sum()),
        "translator": SimpleNamespace(pack_read_stream=pack),
        "plan": None,
    }
    tree = verify_input(EagleVerifyInput, torch.ones(0, dtype=torch.bool))
    *expected, mask = tree.generate_attn_arg_prefill(**batch)
    # Every cell of a single row is visible, so that no mask says the same.
    assert mask.all()
    root = verify_input(RootVerifyInput, None)
    for _ in range(2):
        *found, none = root.generate_attn_arg_prefill(**batch)
        assert none is None
        assert root.custom_mask is None
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert root.spec_input_type == tree.spec_input_type
    assert root.num_tokens_per_req == 1
