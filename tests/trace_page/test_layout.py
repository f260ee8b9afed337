"""The layout: nothing overlaps, nothing crosses, order is kept."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dart.trace_page.layout import GUTTER, Drawing, draw, line, rows


@st.composite
def trees(draw_from: st.DrawFn, nodes: int = 65) -> list[list[int]]:
    """Children of every node; parents have smaller numbers."""
    count = draw_from(st.integers(1, nodes))
    children: list[list[int]] = [[] for _ in range(count)]
    for node in range(1, count):
        children[draw_from(st.integers(0, node - 1))].append(node)
    return children


def check(children: list[list[int]], drawing: Drawing) -> None:
    boxes = drawing.box
    for box in boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= drawing.width
        assert box.y + box.height <= drawing.height
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            apart = a.right <= b.x or b.right <= a.x
            assert apart or a.y + a.height <= b.y or b.y + b.height <= a.y, (a, b)
    # The upright parts of lines, one column of them after another.
    upright: dict[int, list[tuple[int, int]]] = {}
    for node, below in enumerate(children):
        if not below:
            continue
        heights = [boxes[child].middle for child in below]
        assert heights == sorted(heights)
        assert heights[0] == boxes[node].middle
        assert all(boxes[child].x >= boxes[node].right + GUTTER for child in below)
        turn = boxes[below[0]].x - GUTTER // 2
        assert all(boxes[child].x - GUTTER // 2 == turn for child in below)
        upright.setdefault(turn, []).append((heights[0], heights[-1]))
    for spans in upright.values():
        spans.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), spans


@given(trees(), st.data())
@settings(deadline=None)
def test_nothing_overlaps_or_crosses(children: list[list[int]], data: st.DataObject) -> None:
    size = len(children)
    widths = data.draw(st.lists(st.integers(1, 16), min_size=size, max_size=size))
    check(children, draw(children, widths))


@pytest.mark.parametrize(
    "children",
    [
        [[]],
        [[node + 1] for node in range(64)] + [[]],
        [list(range(1, 65)), *([] for _ in range(64))],
    ],
    ids=["root", "chain", "star"],
)
def test_extreme_trees(children: list[list[int]]) -> None:
    check(children, draw(children, [1 + node % 16 for node in range(len(children))]))


def test_subtrees_fill_the_room_beside_others() -> None:
    r"""0 ─ 1 ─ 4 ─ 6 ─ 7
    ├ 2         └ 8
    └ 3 ─ 5
    """
    assert rows([[1, 2, 3], [4], [], [5], [6], [], [7, 8], [], []]) == [0, 0, 1, 2, 0, 2, 0, 0, 1]


def test_lines_begin_and_end_at_their_boxes() -> None:
    drawing = draw([[1, 2], [], []], [1, 2, 3])
    root, child, other = drawing.box
    assert line(root, child) == f"M{root.right},{root.middle}H{child.x}"
    path = line(root, other)
    assert path.startswith(f"M{root.right},{root.middle}H")
    assert path.endswith(f"{other.middle}H{other.x}")
