"""Grow, prune and pack in the C++ core: host tensors in, host tensors out.

The core leaves out early what prune() would drop, so it has no ledger to show; its trees equal
prune(grow(...)), ties included.
"""

from __future__ import annotations

import functools
import os

import numpy as np
import torch

import sglang_dart._core as _core
from sglang_dart.score import continuity
from sglang_dart.score.marginal import logit_weight
from sglang_dart.score.scorer import Children, Scorer
from sglang_dart.tree.recipe import TreeRecipe
from sglang_dart.types import Candidates, Ledger, PackedTree, Tree


class CoreGrower:
    """Grows trees on the cores that this process may use, one request a thread.

    Holds the working memory of its threads. Calls from several threads run one after the other.
    """

    def __init__(
        self,
        levels: int,
        *,
        logit_decay: float = 1.0,
        ngram: _core.NgramModel | None = None,
        ngram_weight: float = 0.0,
        threads: int = 0,
    ) -> None:
        """`levels`: most that candidates have. threads = 0 takes all cores of this process.

        logit_decay: see score.marginal. ngram, ngram_weight: see score.continuity; a weight of 0
        leaves the model out. Raises ValueError for settings out of bounds.
        """
        self._pool = thread_pool(threads)
        self._continuity = (ngram, ngram_weight, continuity.EPSILON, continuity.FIRST_LEVEL)
        weights = [logit_weight(logit_decay, level) for level in range(levels)]
        self._grower = _core.Grower(self._pool, weights, *self._continuity)

    def plan(
        self,
        recipe: TreeRecipe,
        candidates: Candidates,
        root: torch.Tensor,
        length: torch.Tensor,
        *,
        end: torch.Tensor | None = None,
        tail: torch.Tensor | None = None,
    ) -> tuple[Tree, PackedTree]:
        """The tree of each request, and the same packed; scores are marginal, with continuity.

        root, length [bs] int64, candidates, end [bs, E] (see tree.grow) and tail [bs, T] (see
        score.continuity; needed if there is a model) on the host.
        """
        tree = _new_tree(root.shape[0], recipe.budget + 1)
        packed = _new_packed(*tree[0].shape)
        self._grower.grow(
            _recipe(recipe, candidates.levels),
            root.numpy(),
            candidates.token.numpy(),
            candidates.log_prob.numpy(),
            _core.Trees(*tree, *packed),
            _numpy(end),
            _numpy(tail),
            length.numpy(),
        )
        grown = Tree(*map(torch.from_numpy, tree))
        return grown, PackedTree(grown.token, *map(torch.from_numpy, packed))

    def grow(
        self,
        recipe: TreeRecipe,
        scorer: Scorer,
        root: torch.Tensor,
        *,
        end: torch.Tensor | None = None,
        tail: torch.Tensor | None = None,
    ) -> Tree:
        """The tree of each request, whose paths `scorer` scores; continuity is added to it.

        The scorer sees only paths that can still be kept, padded to the widest request's; growth
        stops when there are none. It may be on any device.
        """
        staged = _core.StagedGrower(self._pool, *self._continuity)
        shape = _recipe(recipe, scorer.levels)
        staged.start(shape, recipe.budget, root.numpy(), _numpy(end), _numpy(tail))
        for level in range(scorer.levels):
            children = scorer.score(level)
            _extend(staged, children)
            if not staged.width:
                break
            scorer.advance(*_frontier(staged, children.step.device))
        tree = _new_tree(root.shape[0], recipe.budget + 1)
        staged.finish(_core.Trees(*tree))
        return Tree(*map(torch.from_numpy, tree))


def _extend(staged: _core.StagedGrower, children: Children) -> None:
    shape = (staged.size, staged.width, children.step.shape[2])
    columns = (column.expand(shape).contiguous().cpu() for column in children)
    staged.extend(*(column.numpy() for column in columns))


def _frontier(
    staged: _core.StagedGrower, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each path's parent in the frontier before, and its last token: [bs, P]."""
    token = np.empty((staged.size, staged.width), np.int64)
    origin, count = np.empty_like(token), np.empty(staged.size, np.int64)
    staged.frontier(token, origin, count)
    return torch.from_numpy(origin).to(device), torch.from_numpy(token).to(device)


def prune_cpp(ledger: Ledger, budget: int, depth_bonus: float) -> Tree:
    """See tree.prune."""
    tree = _new_tree(ledger.score.shape[0], budget + 1)
    columns = (ledger.token, ledger.parent, ledger.depth, ledger.score)
    _core.prune(thread_pool(), *(c.numpy() for c in columns), depth_bonus, _core.Trees(*tree))
    return Tree(*map(torch.from_numpy, tree))


def pack_cpp(tree: Tree, length: torch.Tensor) -> PackedTree:
    """See tree.pack."""
    packed = _new_packed(*tree.token.shape)
    columns = (tree.token, tree.parent, tree.depth, tree.score)
    _core.pack(
        thread_pool(),
        length.numpy(),
        _core.Trees(*(c.contiguous().numpy() for c in columns), *packed),
    )
    return PackedTree(tree.token, *map(torch.from_numpy, packed))


def thread_pool(threads: int = 0) -> _core.ThreadPool:
    """The one pool of this size in this process. 0 takes all cores that the process may use."""
    return _pool_of(threads, os.getpid())


@functools.cache
def _pool_of(threads: int, pid: int) -> _core.ThreadPool:
    # Threads do not survive a fork: each process makes its own.
    del pid
    return _core.ThreadPool(threads)


@functools.lru_cache(maxsize=64)
def _recipe(recipe: TreeRecipe, levels: int) -> _core.Recipe:
    return _core.Recipe(
        recipe.frontier,
        recipe.every_child,
        recipe.ends_last,
        recipe.depth_bonus,
        [recipe.level_weight(level) for level in range(levels)],
    )


# NumPy makes an array in a tenth of the time that a tensor takes, and these are many small ones.
def _new_tree(bs: int, width: int) -> list[np.ndarray]:
    """Columns of Tree."""
    return [np.empty((bs, width), t) for t in (np.int64, np.int32, np.int32, np.float32)]


def _new_packed(bs: int, width: int) -> list[np.ndarray]:
    """Columns of PackedTree after its token."""
    links = [np.empty((bs, width), np.int64) for _ in range(3)]
    return [*links, np.empty((bs, width, width), np.bool_)]


def _numpy(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()
