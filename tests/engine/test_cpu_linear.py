"""Packed linear layers: torch's products, also after the weights were replaced."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

from sglang_dart.engine import cpu_linear
from sglang_dart.engine.cpu_linear import PackedHeadMethod, PackedLinearMethod

WIDTH, VOCABULARY = 48, 97


class Layer(torch.nn.Module):
    def __init__(self, out: int, method: type, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(out, WIDTH).to(dtype), requires_grad=False)
        self.quant_method = method()

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)


class Model(torch.nn.Module):
    """Two layers, and a head that is the embedding as well."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            [Layer(out, UnquantizedLinearMethod, dtype) for out in (WIDTH, 33)]
        )
        self.embed = Layer(VOCABULARY, UnquantizedEmbeddingMethod, dtype)
        self.lm_head = self.embed


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(rows: int, with_bias: bool) -> None:
    model = Model()
    cpu_linear.pack(model)
    x = torch.randn(rows, WIDTH)
    for layer in [*model.layers, model.lm_head]:
        bias = torch.randn(layer.weight.shape[0]) if with_bias else None
        want = torch.nn.functional.linear(x, layer.weight, bias)
        torch.testing.assert_close(layer(x, bias), want, atol=1e-4, rtol=1e-4)


def test_replaces_what_it_knows_only() -> None:
    model = Model()
    cpu_linear.pack(model)
    assert [type(layer.quant_method) for layer in model.layers] == [PackedLinearMethod] * 2
    assert type(model.lm_head.quant_method) is PackedHeadMethod
    ids = torch.tensor([3, 96])
    assert torch.equal(
        model.embed.quant_method.embedding(model.embed, ids), model.embed.weight[ids]
    )
    half = Model(torch.bfloat16)
    cpu_linear.pack(half)
    assert type(half.layers[0].quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize("way", ["update", "reload"])
def test_replaced_weights_are_packed_anew(way: str) -> None:
    model = Model()
    cpu_linear.pack(model)
    layer, x = model.layers[0], torch.randn(3, WIDTH)
    before = layer(x)
    # As weight loaders write: behind the parameter's version counter.
    layer.weight.data.copy_(torch.randn_like(layer.weight))
    if way == "update":
        cpu_linear.forget(model)
    else:
        layer.quant_method.process_weights_after_loading(layer)
    want = torch.nn.functional.linear(x, layer.weight)
    assert not torch.allclose(before, want)
    torch.testing.assert_close(layer(x), want, atol=1e-4, rtol=1e-4)


def test_short_memory_leaves_the_model_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        cpu_linear.psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * WIDTH)
    )
    model = Model()
    with caplog.at_level(logging.WARNING):
        cpu_linear.pack(model)
    assert type(model.layers[0].quant_method) is UnquantizedLinearMethod
    assert "free" in caplog.text
