"""Which paths are extended and which nodes are kept: the recipe of a tree, and five presets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TreeRecipe:
    """How the level-by-level loop grows a tree. Raises ValueError for settings out of bounds."""

    budget: int
    """Nodes kept beside the root."""
    frontier: int
    """Paths extended at each level; 0 takes an equal share of what is left of the budget."""
    every_child: bool
    """Whether every scored child enters the ledger, or only those that are extended next."""
    ends_last: bool = False
    """Whether paths that end the answer are extended only where others leave room."""
    depth_bonus: float = 0.0
    """Added to a node's score for each level when nodes are kept; at most 0."""
    level_exponent: float = 0.0
    """A step at level l counts (l + 1) ** -level_exponent."""

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1, got {self.budget}")
        if self.frontier < 0:
            raise ValueError(f"frontier must be at least 0, got {self.frontier}")
        if self.every_child and not self.frontier:
            raise ValueError("frontier 0 shares the budget, so only extended nodes may enter")
        # Above 0 a child could outrank its parent, and the kept nodes would be no tree.
        if self.depth_bonus > 0:
            raise ValueError(f"depth_bonus must be at most 0, got {self.depth_bonus}")
        if self.level_exponent < 0:
            raise ValueError(f"level_exponent must be at least 0, got {self.level_exponent}")

    def level_weight(self, level: int) -> float:
        """Weight of a step at `level`, rounded to float32."""
        return float(np.float32((level + 1) ** -self.level_exponent))

    def quota(self, level: int, levels: int, entered: int) -> int:
        """Paths to extend after `level`, when `entered` nodes are in the ledger."""
        if self.frontier:
            return self.frontier
        return -(-(self.budget - entered) // (levels - level))


def chain(levels: int) -> TreeRecipe:
    """The best token after the best token."""
    return TreeRecipe(budget=levels, frontier=1, every_child=False)


def fixed(budget: int) -> TreeRecipe:
    """Equally many nodes at every level. Source: DARTree, arXiv 2608.13524."""
    return TreeRecipe(budget=budget, frontier=0, every_child=False)


def pruned(budget: int = 64, width: int = 12, depth_bonus: float = -0.2) -> TreeRecipe:
    """The best nodes of a tree of `width` nodes a level. Source: DARTree, arXiv 2608.13524."""
    return TreeRecipe(budget=budget, frontier=width, every_child=False, depth_bonus=depth_bonus)


def beam(budget: int = 60, width: int = 20, level_exponent: float = 0.7) -> TreeRecipe:
    """The best of all children that a beam search scores. Source: DART, arXiv 2601.19278."""
    return TreeRecipe(
        budget=budget,
        frontier=width,
        every_child=True,
        ends_last=True,
        level_exponent=level_exponent,
    )


def best_first(budget: int) -> TreeRecipe:
    """The `budget` best nodes of all: what a best-first heap would pop, level by level."""
    return TreeRecipe(budget=budget, frontier=budget, every_child=True)
