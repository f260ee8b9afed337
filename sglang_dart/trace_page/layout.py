"""Where the nodes of a tree stand: a column for each depth, rows so that nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of drawings, in pixels.
COLUMN_WIDTH = 8
PADDING = 7
NODE_HEIGHT = 20
ROW_PITCH = 24
GUTTER = 30
MARGIN = 6
# Above the tree, for the numbers of the depths.
HEAD = 18


@dataclass(frozen=True)
class Box:
    """A node's rectangle; x, y its upper left corner."""

    x: int
    y: int
    width: int
    height: int = NODE_HEIGHT

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def middle(self) -> int:
        return self.y + self.height // 2


@dataclass(frozen=True)
class Drawing:
    """The boxes of a tree's nodes, where each depth's column begins, and the size of the whole."""

    box: list[Box]
    left: list[int]
    width: int
    height: int


def rows(children: Sequence[Sequence[int]]) -> list[int]:
    """The row of every node: a first child beside its parent, younger siblings below.

    children: of each node, in the order to be shown; node 0 is the root, and children have greater
    numbers than their parent. A subtree stands as high as those above it leave room, depth by
    depth. So the nodes of one depth keep their order, and lines that leave a parent, go down beside
    it and turn off to its children never cross.
    """
    offset = [0] * len(children)
    # First and last row of each subtree at every depth below its top, from its top's row.
    first: list[list[int]] = [[0]] * len(children)
    last: list[list[int]] = [[0]] * len(children)
    for node in reversed(range(len(children))):
        above_first: list[int] = []
        above_last: list[int] = []
        for child in children[node]:
            pairs = zip(above_last, first[child], strict=False)
            offset[child] = max((bottom + 1 - top for bottom, top in pairs), default=0)
            deeper = len(above_first)
            above_first += [row + offset[child] for row in first[child][deeper:]]
            lower = [row + offset[child] for row in last[child]]
            above_last = lower + above_last[len(lower) :]
        first[node], last[node] = [0, *above_first], [0, *above_last]
    for node, below in enumerate(children):
        for child in below:
            offset[child] += offset[node]
    return offset


def draw(children: Sequence[Sequence[int]], label_columns: Sequence[int]) -> Drawing:
    """Boxes for nodes whose labels take so many columns of a fixed-width font.

    children: see `rows`. A column of the drawing is as wide as its longest label.
    """
    depth = [0] * len(children)
    for node, below in enumerate(children):
        for child in below:
            depth[child] = depth[node] + 1
    width = [PADDING * 2 + COLUMN_WIDTH * count for count in label_columns]
    widest = [0] * (max(depth) + 1)
    for level, own in zip(depth, width, strict=True):
        widest[level] = max(widest[level], own)
    left = [MARGIN + sum(widest[:level]) + GUTTER * level for level in range(len(widest))]
    place = rows(children)
    boxes = [
        Box(left[level], HEAD + ROW_PITCH * row, own)
        for level, row, own in zip(depth, place, width, strict=True)
    ]
    return Drawing(
        boxes,
        left,
        left[-1] + widest[-1] + MARGIN,
        HEAD + ROW_PITCH * max(place) + NODE_HEIGHT + MARGIN,
    )


def line(parent: Box, child: Box) -> str:
    """The SVG path from a parent to a child: right, down beside the parent, right again."""
    turn = child.x - GUTTER // 2
    if parent.middle == child.middle:
        return f"M{parent.right},{parent.middle}H{child.x}"
    bend = 6
    return (
        f"M{parent.right},{parent.middle}H{turn - bend}"
        f"Q{turn},{parent.middle} {turn},{parent.middle + bend}"
        f"V{child.middle - bend}Q{turn},{child.middle} {turn + bend},{child.middle}H{child.x}"
    )
