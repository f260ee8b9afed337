"""What counts as a step's cost, on stand-ins whose products sleep."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from sglang_dart.engine.step_cost import ROWS, measure_linear

MS = 1e-3


class Product:
    """Takes a millisecond a row and notes how many rows it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        time.sleep(MS * len(x))
        return x


def layer() -> torch.nn.Module:
    made = torch.nn.Linear(3, 5, bias=False)
    made.quant_method = Product()
    return made


class Model(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = layer()
        self.inner = layer()
        self.norm = torch.nn.LayerNorm(3)
        self.lm_head = self.embed if tied else layer()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed


@pytest.mark.parametrize("tied", [False, True])
def test_every_product_once_and_no_lookup(tied: bool) -> None:
    model = Model(tied)
    prior = measure_linear(model)
    asked = [1, *ROWS]
    assert model.inner.quant_method.rows == asked
    assert model.lm_head.quant_method.rows == asked
    assert model.embed.quant_method.rows == (asked if tied else [])
    # At least as long as its sleeps: two products of 4 and of 128 rows, the latter extrapolated.
    assert prior(2, 2) >= 8 * MS
    assert prior(8, 16) >= prior(8, 8) >= prior(1, 8)


def test_a_model_without_plain_weights_costs_nothing() -> None:
    model = Model(tied=False)
    for name in ("inner", "lm_head"):
        getattr(model, name).quant_method = None
    assert measure_linear(model)(4, 16) == 0
