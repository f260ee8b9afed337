"""Attention of grouped blocks equals attention of each block by itself."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.train.block_attention import attend_blocks


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    anchor: torch.Tensor,
) -> torch.Tensor:
    share = query.shape[3] // key.shape[3]
    out = torch.zeros_like(query)
    for text, block in torch.cartesian_prod(*map(torch.arange, anchor.shape)).tolist():
        before = int(anchor[text, block])
        keys = torch.cat([context_key[text, :before], key[text, block]])
        values = torch.cat([context_value[text, :before], value[text, block]])
        keys, values = (x.repeat_interleave(share, 1) for x in (keys, values))
        score = torch.einsum("qhd,khd->hqk", query[text, block], keys) * query.shape[-1] ** -0.5
        out[text, block] = torch.einsum("hqk,khd->qhd", score.softmax(-1), values)
    return out


# Texts longer and shorter than their blocks; one block, and numbers that no group divides.
@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (3, 2), (17, 5), (65, 13), (200, 7)])
def test_equals_blocks_one_by_one_and_so_do_gradients(length: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, 6, generator=generator).requires_grad_()

    inputs = [rows(blocks, 4, 6), rows(blocks, 4, 2), rows(blocks, 4, 2)]
    inputs += [rows(length, 2), rows(length, 2)]
    anchor = torch.randint(0, length + 1, (2, blocks), generator=generator)
    weight = torch.randn(2, blocks, 4, 6, 6, generator=generator)
    found, expected = attend_blocks(*inputs, anchor), one_by_one(*inputs, anchor)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-3)


def test_rows_after_the_anchor_do_not_matter() -> None:
    torch.manual_seed(0)
    own = [torch.randn(1, 2, 3, 2, 8) for _ in range(3)]
    key, value = torch.randn(1, 20, 2, 8), torch.randn(1, 20, 2, 8)
    anchor = torch.tensor([[4, 9]])
    before = attend_blocks(*own, key, value, anchor)
    key[:, 9:], value[:, 9:] = 1e3, 1e3
    assert torch.equal(attend_blocks(*own, key, value, anchor), before)
