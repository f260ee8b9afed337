"""The kernel against its twin: on a GPU, and on the host in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from sglang_dart.train import cross_entropy
from sglang_dart.train.blocks import Rows
from sglang_dart.train.cross_entropy import Labels
from sglang_dart.train.entropy import Given, entropy_plain
from tests.kernels.interpreter import run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter cuts the bits off that a GPU rounds.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 8e-3 if INTERPRETED else 4e-3}

on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
)
on_gpu = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"
)


def compare(
    logit: torch.Tensor, label: torch.Tensor, dtype: torch.dtype, given: Given | None = None
) -> None:
    from sglang_dart.kernels.entropy import entropy

    logit, label = logit.to(DEVICE, dtype), label.to(DEVICE)
    for needed in (True, False):
        loss, hit, slope = entropy(logit, label, given, needed)
        # Exact, from the logits as they were rounded.
        expected, best, steep = entropy_plain(logit.double(), label, given, True)
        torch.testing.assert_close(loss, expected.float(), atol=2e-5, rtol=1e-5)
        assert torch.equal(hit, best)
        if not needed:
            assert slope is None
            continue
        assert slope.dtype == dtype
        torch.testing.assert_close(slope.double(), steep, atol=1e-6, rtol=ROUNDING[dtype])


def rows_of(count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Even and peaked rows, each with labels that are likely and unlikely."""
    dice = torch.Generator().manual_seed(vocab)
    logit = torch.randn(count, vocab, generator=dice) * torch.linspace(0.1, 20, count)[:, None]
    label = torch.randint(0, vocab, (count,), generator=dice)
    label[::2] = logit[::2].argmax(1)
    return logit, label


# Less than a tile, tiles without a rest, and with one.
@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 264, 8192, 9001])
def test_equals_the_twin(vocab: int, dtype: torch.dtype) -> None:
    compare(*rows_of(6, vocab), dtype)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 264, 9001])
def test_equals_the_twin_for_distributions(vocab: int, dtype: torch.dtype) -> None:
    logit, label = rows_of(6, vocab)
    row = torch.tensor([0, 0, 1, 1, 1, 2], device=DEVICE)
    prob = (3 * torch.randn(3, vocab)).softmax(-1).to(DEVICE)
    # No token at all, as for a best one outside the draft vocabulary.
    label[5] = -1
    compare(logit, label, dtype, Given(prob, row))


@on_device
def test_without_rows() -> None:
    compare(torch.empty(0, 264), torch.empty(0, dtype=torch.int64), torch.float32)


@on_device
def test_a_logit_that_is_no_number_makes_a_loss_that_is_none() -> None:
    from sglang_dart.kernels.entropy import entropy

    logit = torch.zeros(3, 5000, device=DEVICE)
    logit[0, 4999], logit[1, 0] = torch.nan, torch.inf
    loss = entropy(logit, torch.zeros(3, dtype=torch.int64, device=DEVICE), None, True)[0]
    assert loss.isfinite().tolist() == [False, False, True]


@on_device
def test_the_first_of_equal_logits_is_the_best() -> None:
    from sglang_dart.kernels.entropy import entropy

    logit = torch.zeros(2, 9001, device=DEVICE)
    logit[0, 4500], logit[0, 8800], logit[0, 300 + 4096] = 1, 1, 1
    label = torch.tensor([300 + 4096, 0], device=DEVICE)
    assert entropy(logit, label, None, False)[1].all()


@on_device
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_gradients_equal_those_of_the_twin(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dart.kernels.entropy import entropy

    sizes = (7, 8), (7, 3), (264, 3), (264, 8)
    hidden, low, up, lm_head = (torch.randn(*size, device=DEVICE) for size in sizes)
    place = torch.arange(7, device=DEVICE)
    rows = Rows(place, place, place, place, list(range(8)))
    labels = Labels(rows, place * 30, None)
    found = []
    for kernel in (entropy, entropy_plain):
        monkeypatch.setattr(cross_entropy, "entropy", kernel)
        trained = [x.clone().requires_grad_() for x in (hidden, low, up)]
        weight = 1 / (1 + place)
        made = cross_entropy.cross_entropy(
            trained[0], lm_head, (trained[1], trained[2]), labels, weight, share, 4
        )
        found.append([made.loss, *torch.autograd.grad(made.loss, trained), made.correct])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="this is what it runs")
def test_interpreted_on_the_host() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_real_sizes(vocab: int, dtype: torch.dtype) -> None:
    logit, label = rows_of(300, vocab)
    compare(logit, label, dtype)
    prob = logit[:100].softmax(-1).to(DEVICE)
    compare(logit, label, dtype, Given(prob, torch.arange(300, device=DEVICE) // 3))
