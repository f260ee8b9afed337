"""What the compiled module says of bad input, and that its stub is shipped."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

_core = pytest.importorskip("sglang_dart._core")

LEVELS, WIDTH = 2, 3


def tree_columns(bs: int = 1, nodes: int = 4) -> dict[str, np.ndarray]:
    shape = (bs, nodes)
    return {
        "token": np.zeros(shape, np.int64),
        "parent": np.zeros(shape, np.int32),
        "depth": np.zeros(shape, np.int32),
        "score": np.zeros(shape, np.float32),
    }


def recipe(**changes):
    settings = {"frontier": 2, "every_child": True, "ends_last": False, "depth_bonus": 0.0}
    return _core.Recipe(**settings | {"level_weight": [1.0] * LEVELS} | changes)


def grow(grower=None, trees=None, recipe_changes=None, **changes) -> None:
    grower = grower or _core.Grower(_core.ThreadPool(1), [1.0] * LEVELS)
    arguments = {
        "recipe": recipe(**recipe_changes or {}),
        "root": np.array([7]),
        "token": np.array([[[1, 2, 3]] * LEVELS]),
        "log_prob": np.full((1, LEVELS, WIDTH), -1, np.float32),
        "trees": trees or _core.Trees(**tree_columns()),
    }
    grower.grow(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frontier": -1}, "frontier must be 0 or more, got -1"),
        ({"frontier": 0}, "so only extended children may enter"),
        ({"depth_bonus": 0.5}, "depth_bonus must be 0 or less, got 0.5"),
        ({"depth_bonus": float("nan")}, "depth_bonus must be 0 or less, got nan"),
        ({"level_weight": []}, "one number a level, got none"),
        ({"level_weight": [1.0, -1.0]}, "level_weight must be 0 or more, got -1"),
    ],
)
def test_recipe_bounds(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root": np.array([7, 8])}, r"root has shape \[2\], expected \[1\]"),
        ({"root": np.array([-3])}, r"root token -3 is outside \[0, 2\^31\)"),
        ({"token": np.full((1, LEVELS, WIDTH), -2)}, r"candidate token -2 is outside"),
        ({"token": np.full((1, LEVELS, WIDTH), 1 << 31)}, r"candidate token 2147483648 is"),
        (
            {"log_prob": np.zeros((1, LEVELS, 4), np.float32)},
            r"log_prob has shape \[1, 2, 4\], expected \[1, 2, 3\]",
        ),
        ({"recipe_changes": {"level_weight": [1.0]}}, "candidates have 2 levels, the recipe 1"),
        ({"end": np.zeros((2, 1), np.int64)}, r"end has shape \[2, 1\], expected \[1, any\]"),
        ({"length": np.zeros(2, np.int64)}, r"length has shape \[2\], expected \[1\]"),
        ({"recipe_changes": {"frontier": 1 << 30}}, "is too large; the limit is 1073741824 nodes"),
    ],
)
def test_growth_bounds(changes, message):
    with pytest.raises(ValueError, match=message):
        grow(**changes)


def test_an_unused_rank_may_hold_any_token():
    columns = tree_columns()
    log_prob = np.full((1, LEVELS, WIDTH), -np.inf, np.float32)
    log_prob[0, 0, 1] = -1
    token = np.array([[[-9, 5, 1 << 40]] * LEVELS])
    grow(trees=_core.Trees(**columns), token=token, log_prob=log_prob)
    assert columns["token"].tolist() == [[7, 5, 0, 0]]
    assert columns["parent"].tolist() == [[-1, 0, -1, -1]]


def test_a_model_needs_the_newest_tokens(golden):
    model = _core.NgramModel.open(str(golden / "dart/ngram_order3.trie"))
    grower = _core.Grower(_core.ThreadPool(1), [1.0] * LEVELS, model, 0.5)
    with pytest.raises(ValueError, match="the n-gram model needs `tail`"):
        grow(grower)
    # Without weight the model is left out.
    grow(_core.Grower(_core.ThreadPool(1), [1.0] * LEVELS, model, 0.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 0.0],), "logit_weight must be above 0, got 0"),
        (([1.0], None, -1.0), "ngram_weight must be 0 or more, got -1"),
        (([1.0], None, 0.5, 0.0), "ngram_epsilon must be above 0, got 0"),
        (([1.0], None, 0.5, 1e-10, -1), "ngram_first_level must be 0 or more, got -1"),
    ],
)
def test_grower_bounds(arguments, message):
    with pytest.raises(ValueError, match=message):
        _core.Grower(_core.ThreadPool(1), *arguments)


def test_tree_arrays():
    columns = tree_columns(2, 5)
    with pytest.raises(ValueError, match=r"parent has shape \[1, 4\], expected \[2, 5\]"):
        _core.Trees(**columns | {"parent": tree_columns()["parent"]})
    with pytest.raises(ValueError, match="give both or neither"):
        _core.Trees(**columns, first_child=np.zeros((2, 5), np.int64))
    with pytest.raises(ValueError, match="trees have a width of 0"):
        _core.Trees(**tree_columns(1, 0))
    # Outputs are never converted: a copy would be written and lost.
    with pytest.raises(TypeError):
        _core.Trees(**columns | {"depth": columns["depth"].astype(np.int64)})
    with pytest.raises(TypeError):
        _core.Trees(**columns | {"token": columns["token"].T})
    trees = _core.Trees(**columns, position=np.zeros((2, 5), np.int64))
    with pytest.raises(ValueError, match="positions need the committed length"):
        _core.pack(_core.ThreadPool(1), None, trees)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 130])
def test_mask_bits_are_the_mask(width):
    random = np.random.default_rng(width)
    columns = tree_columns(1, width)
    parent = [-1, *(int(random.integers(node)) for node in range(1, width))]
    columns["parent"][0] = parent
    mask = np.zeros((1, width, width), np.bool_)
    bits = np.zeros((1, width, -(-width // 64)), np.uint64)
    trees = _core.Trees(**columns, mask=mask, mask_bits=bits)
    _core.pack(_core.ThreadPool(1), None, trees)
    node = np.arange(width)
    expanded = bits[0][:, node // 64] >> (node % 64).astype(np.uint64) & np.uint64(1)
    assert np.array_equal(expanded.astype(np.bool_), mask[0])
    assert mask[0].diagonal().all()


def test_staged_growth_checks_what_it_is_given():
    staged = _core.StagedGrower(_core.ThreadPool(1))
    with pytest.raises(ValueError, match="budget must be 1 to 8191, got 0"):
        staged.start(recipe(), 0, np.array([7]))
    staged.start(recipe(), 3, np.array([7]))
    assert (staged.size, staged.width) == (1, 1)
    step = np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ValueError, match=r"token has shape \[1, 2, 3\], expected \[1, 1, 3\]"):
        staged.extend(step.astype(np.int64), step)
    with pytest.raises(ValueError, match=r"trees are \[1, 6\], expected \[1, 4\]"):
        staged.finish(_core.Trees(**tree_columns(1, 6)))


def test_threads():
    assert _core.ThreadPool(3).size == 3
    assert _core.ThreadPool().size == _core.available_cores() >= 1
    with pytest.raises(ValueError, match="threads must be 0"):
        _core.ThreadPool(-1)


def test_the_stub_is_shipped():
    stub = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())
    names = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert {"Grower", "StagedGrower", "Trees", "Recipe", "ThreadPool", "prune", "pack"} <= names
