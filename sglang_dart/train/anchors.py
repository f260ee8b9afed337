"""Where DFlash and Domino place the blocks that they learn from, and the rows of those blocks.

An anchor p stands for a root: its block holds [x_p, MASK, MASK, ...], sees the taps of the tokens
before p, and its level j predicts x_{p+1+j}. Source: arXiv 2602.06036 and 2605.29707.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_dart.train.blocks import Rows, trained_rows
from sglang_dart.train.method import Seed


@dataclass(frozen=True)
class BlockRows(Rows):
    """The trained rows of the blocks of a batch [B, T]; `prefix` is b * T + p - 1.

    anchor [B, A] int64: the anchors of each text, ascending; 0, which is never one, fills up.
    block  [R] int64: b * A + a, the block that a row belongs to.
    """

    anchor: torch.Tensor
    block: torch.Tensor


def block_rows(turn: torch.Tensor, levels: int, most: int, seed: Sequence[Seed]) -> BlockRows:
    """Draw at most `most` anchors a text, and list the rows that serving would draft from them.

    turn [B, T] (host): k for the tokens of the k-th answer, 0 elsewhere; seed: one a text. An
    anchor and its successor lie in one answer and something stands before it. A row is trained if
    all tokens from its anchor to the one that it predicts lie in one answer.
    """
    possible = (turn > 0) & (turn == torch.nn.functional.pad(turn, (0, 1))[:, 1:])
    possible[:, 0] = False
    chosen = [
        _draw(np.flatnonzero(places), most, own)
        for places, own in zip(possible.numpy(), seed, strict=True)
    ]
    # A batch without anchors still has a block, of which no row is trained.
    longest = max([1, *map(len, chosen)])
    anchor = torch.zeros(len(chosen), longest, dtype=torch.int64)
    roots = torch.zeros_like(possible)
    number = torch.zeros(turn.shape, dtype=torch.int64)
    for text, places in enumerate(map(torch.from_numpy, chosen)):
        anchor[text, : len(places)] = places
        roots[text, places] = True
        number[text, places] = torch.arange(len(places)) + text * longest
    rows = trained_rows(turn, levels, roots)
    block = number.flatten()[rows.prefix + 1]
    return BlockRows(
        rows.prefix, rows.level, rows.teacher, rows.position, rows.start, anchor, block
    )


def _draw(places: np.ndarray, most: int, seed: Seed) -> np.ndarray:
    if len(places) > most:
        places = np.random.default_rng(seed).choice(places, most, replace=False, shuffle=False)
        places.sort()
    return places
