"""What a step of the target costs by its rows, measured before serving."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_dart.tree.budget import Prior

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64)
# More than this is not spent on measuring; what is then unknown is extended from what is known.
SECONDS = 10.0


@torch.no_grad()
def measure_linear(model: Any) -> Prior:
    """Time all linear layers of a model on the host for a few numbers of rows.

    They read every weight, so a step of few rows takes little else. Gives seconds by requests and
    rows a request. An input embedding is looked up, so it counts only where it is the head too.
    """
    embedding, head = model.get_input_embeddings(), getattr(model, "lm_head", None)
    layers = [layer for layer in model.modules() if layer is not embedding or layer is head]
    products = [product for layer in layers if (product := _product(layer))]
    if not products:
        return lambda requests, width: 0.0
    _seconds(products, 1)  # packs weights, fills caches
    rows, seconds, started = [], [], time.perf_counter()
    for count in ROWS:
        rows.append(count)
        seconds.append(_seconds(products, count))
        if time.perf_counter() - started > SECONDS and len(rows) > 1:
            break
    logger.info(
        "sglang-dart: all linear layers take %s ms for %s rows",
        "/".join(f"{1000 * value:.0f}" for value in seconds),
        "/".join(map(str, rows)),
    )
    # A larger product never takes less.
    known = np.maximum.accumulate(seconds)
    slope = (known[-1] - known[-2]) / (rows[-1] - rows[-2])

    def prior(requests: int, width: int) -> float:
        count = requests * width
        return float(np.interp(count, rows, known)) + slope * max(0, count - rows[-1])

    return prior


def _product(layer: Any) -> Callable[[int], torch.Tensor] | None:
    """Multiplies so many rows of zeros with the layer's weight; None, if it has no plain one."""
    weight = getattr(layer, "weight", None)
    apply = getattr(getattr(layer, "quant_method", None), "apply", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or apply is None:
        return None
    return lambda rows: apply(layer, weight.new_zeros(rows, weight.shape[1]))


def _seconds(products: list[Callable[[int], torch.Tensor]], rows: int) -> float:
    started = time.perf_counter()
    for product in products:
        product(rows)
    return time.perf_counter() - started
