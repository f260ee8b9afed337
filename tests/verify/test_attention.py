"""Tree attention, folded and chunked, against attention written out row by row."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.verify import attention
from sglang_dart.verify.attention import as_bias, attend, attend_chunk, gather, tree_visibility

SHAPES = [(4, 4), (6, 2), (9, 3)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request: query [n, H, D], key and value [S, HK, D], visible [n, S]; float64."""
    group = query.shape[1] // key.shape[1]
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for row in range(query.shape[0]):
        seen = visible[row].nonzero().flatten()
        for head in range(query.shape[1]):
            k, v = (part[seen, head // group].double() for part in (key, value))
            weight = (k @ query[row, head].double() * scale).softmax(0)
            out[row, head] = weight @ v
    return out


def tree_mask(parents: list[int]) -> torch.Tensor:
    width = len(parents)
    mask = torch.eye(width, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


#        0
#      /   \
#     1     2       and padding 5, which sees itself
#     |     |
#     3     4
TREE = [-1, 0, 0, 1, 2, -1]


def test_tree_visibility_drawn() -> None:
    visible = tree_visibility(tree_mask(TREE).unsqueeze(0), torch.tensor([2]), 9)
    rows = ["".join(".x"[int(cell)] for cell in row) for row in visible[0]]
    assert rows == [
        "xxx......",
        "xxxx.....",
        "xxx.x....",
        "xxxx.x...",
        "xxx.x.x..",
        "xx.....x.",
    ]


def test_window_counts_positions_not_columns() -> None:
    visible = tree_visibility(tree_mask(TREE).unsqueeze(0), torch.tensor([3]), 9, window=2)
    rows = ["".join(".x"[int(cell)] for cell in row) for row in visible[0]]
    # Nodes 3 and 4 stand at position 5 and see 3 .. 5: the root, a parent, themselves.
    assert rows == [
        ".xxx.....",
        "..xxx....",
        "..xx.x...",
        "...xx.x..",
        "...x.x.x.",
        ".xx.....x",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("window", [None, 3])
def test_trees_of_unequal_requests(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    width, slots, dim = 6, 64, 8
    length = torch.tensor([1, 17, 9])
    columns = int(length.max()) + width
    cache = torch.randn(2, slots, kv_heads, dim).to(dtype)
    # What no request owns must not matter.
    cache[:, 0] = float("nan")
    table = torch.stack([torch.randperm(slots - 1)[:columns] + 1 for _ in length])
    mask = tree_mask(TREE).expand(3, width, width)
    query = torch.randn(3, width, heads, dim).to(dtype)
    visible = tree_visibility(mask, length, columns, window)
    key, value = (gather(part, table) for part in cache)
    out = attend(query, key, value, as_bias(visible, dtype), scale=0.3)
    assert out.dtype == dtype
    for i in range(3):
        want = naive(query[i], key[i], value[i], visible[i], 0.3)
        torch.testing.assert_close(
            out[i].double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_single_token_needs_no_mask() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 6, 8), torch.randn(1, 11, 2, 8), torch.randn(1, 11, 2, 5)
    out = attend(query, key, value, None, scale=0.3)
    want = naive(query[0], key[0], value[0], torch.ones(1, 11, dtype=torch.bool), 0.3)
    torch.testing.assert_close(out[0].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("window", [None, 0, 4, 100])
@pytest.mark.parametrize(("prefix", "rows"), [(0, 1), (0, 17), (5, 1), (13, 17), (3, 16)])
def test_chunks(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    window: int | None,
    prefix: int,
    rows: int,
) -> None:
    monkeypatch.setattr(attention, "CHUNK_ROWS", 8)
    torch.manual_seed(0)
    total = prefix + rows
    query, key, value = (
        torch.randn(n, h, 8) for n, h in ((rows, heads), (total, kv_heads), (total, kv_heads))
    )
    position, column = torch.arange(prefix, total).unsqueeze(1), torch.arange(total)
    visible = column <= position
    if window is not None:
        visible &= column >= position - window
    out = attend_chunk(query, key, value, scale=0.3, window=window)
    want = naive(query, key, value, visible, 0.3)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_key_dtype_follows_the_query() -> None:
    query = torch.randn(1, 2, 2, 8)
    cache = torch.randn(1, 5, 2, 8).bfloat16()
    visible = tree_visibility(torch.ones(1, 2, 2, dtype=torch.bool).tril(), torch.tensor([3]), 5)
    out = attend(query, cache, cache, as_bias(visible, torch.float32))
    want = attend(query, cache.float(), cache.float(), as_bias(visible, torch.float32))
    torch.testing.assert_close(out, want)
