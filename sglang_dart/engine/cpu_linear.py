"""Linear layers whose weights are packed for few rows, on hosts without a GPU.

A verify step multiplies a handful of rows with every weight. In float32 torch reads and reorders
the whole weight for that in every call: two rows cost two decode steps. oneDNN does it from a
weight that was reordered once. Plain decoding gains too.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

logger = logging.getLogger(__name__)

# From here on, as in prefill, packed weights gain nothing.
# Measured with one thread on an EPYC with AVX2, all linear layers of SmolLM2-135M, ms of CPU time,
# torch / packed: 1 row 42 / 42, 2 rows 80 / 44, 4 rows 87 / 53, 8 rows 112 / 76, 16 rows 132 / 97,
# 32 rows 194 / 164, 64 rows 354 / 261, 128 rows 450 / 457.
MOST_ROWS = 64

# Rows that oneDNN chooses its layout for.
_TYPICAL_ROWS = 8

# The packed copies may take this share of the free memory; the KV pools come later.
_MEMORY_SHARE = 0.25


class _Packed:
    """Multiplies with a packed copy of the layer's weight. One a layer."""

    _weight: torch.Tensor | None = None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] float32 -> [..., out]. Packs at first use."""
        if x.numel() > MOST_ROWS * x.shape[-1]:
            return torch.nn.functional.linear(x, layer.weight, bias)
        if self._weight is None:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(
                layer.weight.detach(), _TYPICAL_ROWS
            )
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")

    def forget(self) -> None:
        """The layer's weight has changed."""
        self._weight = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """SGLang calls this when it has loaded weights once more."""
        self.forget()


class PackedLinearMethod(_Packed, UnquantizedLinearMethod):
    """A linear layer."""


class PackedHeadMethod(_Packed, UnquantizedEmbeddingMethod):
    """An output layer, which may be the embedding as well."""


def pack(model: torch.nn.Module) -> None:
    """Let the float32 layers of a loaded model multiply with packed weights.

    Leaves the model as it is where memory is short. The weights themselves stay, for whoever reads
    or replaces them; after a replacement call `forget`.
    """
    layers: dict[Any, type[_Packed]] = {
        module: PackedLinearMethod
        for module in model.modules()
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
    }
    head: Any = getattr(model, "lm_head", None)
    if type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod:
        layers[head] = PackedHeadMethod
    layers = {layer: kind for layer, kind in layers.items() if layer.weight.dtype == torch.float32}
    if not layers or not torch.backends.mkldnn.is_available():
        return
    size = sum(layer.weight.nbytes for layer in layers)
    free = psutil.virtual_memory().available
    if size > _MEMORY_SHARE * free:
        logger.warning(
            "sglang-dart: packed weights of %.1f GiB would take more than %d %% of the %.1f GiB "
            "free; verify steps stay slower than they could be",
            size / 2**30,
            100 * _MEMORY_SHARE,
            free / 2**30,
        )
        return
    for layer, kind in layers.items():
        layer.quant_method = kind()
    logger.info("sglang-dart: %d linear layers packed, %.2f GiB", len(layers), size / 2**30)


def forget(model: torch.nn.Module) -> None:
    """The model's weights have been replaced: pack them anew at their next use."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, _Packed):
            method.forget()
