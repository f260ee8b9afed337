"""Recipes: their numbers and their bounds."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dart.tree.recipe import TreeRecipe, beam, best_first, chain, fixed, pruned


def test_level_weights_are_float32():
    weights = [beam().level_weight(level) for level in range(8)]
    assert weights == [float(np.float32((level + 1) ** -0.7)) for level in range(8)]
    assert pruned().level_weight(5) == 1.0


@pytest.mark.parametrize(
    ("recipe", "levels", "quotas"),
    [
        (fixed(64), 16, [4] * 16),
        (fixed(64), 15, [5] * 4 + [4] * 11),
        (fixed(3), 8, [1, 1, 1, 0, 0, 0, 0, 0]),
        (chain(4), 4, [1] * 4),
        (pruned(64, 12), 3, [12] * 3),
        (beam(60, 20), 2, [20] * 2),
        (best_first(9), 2, [9] * 2),
    ],
)
def test_quotas(recipe, levels, quotas):
    entered, got = 0, []
    for level in range(levels):
        got.append(recipe.quota(level, levels, entered))
        entered += got[-1]
    assert got == quotas


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"frontier": -1}, "frontier must be at least 0, got -1"),
        ({"frontier": 0, "every_child": True}, "frontier 0 shares the budget"),
        ({"depth_bonus": 0.1}, r"depth_bonus must be at most 0, got 0\.1"),
        ({"level_exponent": -1.0}, "level_exponent must be at least 0"),
    ],
)
def test_bounds(settings, message):
    with pytest.raises(ValueError, match=message):
        TreeRecipe(**({"budget": 4, "frontier": 2, "every_child": False} | settings))
