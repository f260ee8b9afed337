"""Scores that depend on level and candidate only."""

from __future__ import annotations

import numpy as np
import torch

from sglang_dart.score.scorer import Children
from sglang_dart.types import Candidates


def logit_weight(decay: float, level: int) -> float:
    """Weight of a log-probability at `level`, rounded to float32: decay ** level."""
    return float(np.float32(decay**level))


class Marginal:
    """A step scores logit_decay ** level * log_prob, whatever came before it."""

    def __init__(self, candidates: Candidates, logit_decay: float = 1.0) -> None:
        self.levels = candidates.levels
        self._candidates = candidates
        self._decay = logit_decay

    def score(self, level: int) -> Children:
        """Children after any path: [bs, 1, K]."""
        token = self._candidates.token[:, level, None]
        step = self._candidates.log_prob[:, level, None]
        return Children(token, step * logit_weight(self._decay, level))

    def advance(self, parent: torch.Tensor, token: torch.Tensor) -> None:
        """Nothing to follow."""
