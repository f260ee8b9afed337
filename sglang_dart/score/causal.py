"""Scores that depend on the whole path, through the recurrent state of a causal head."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_dart.score.scorer import Children, follow


class CausalHead(Protocol):
    """A head that corrects a drafter's candidates along every path. Made for one growth.

    token [bs, D, C] int64: candidates of each level, best base logit first.
    """

    token: torch.Tensor

    def initial_state(self) -> torch.Tensor:
        """State [bs, 1, S] after the root."""

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        """Corrected logits [bs, P, C] of the level's candidates after each path's state."""

    def step(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """State [bs, P, S] after reading one more token [bs, P]."""


class Causal:
    """A step scores the head's log-probability among the level's C candidates, in float32."""

    def __init__(self, head: CausalHead, expandable: int | None = None) -> None:
        """`expandable`: how many candidates, by base rank, may follow a path; None: all.

        The others only count in the normaliser (arXiv 2608.13524, section 3.2).
        """
        self.levels = head.token.shape[1]
        self._head = head
        self._expandable = expandable or head.token.shape[2]
        self._state = head.initial_state()

    def score(self, level: int) -> Children:
        """Children after each path: [bs, P, expandable]."""
        step = torch.log_softmax(self._head.logits(level, self._state).float(), dim=-1)
        token = self._head.token[:, level, None].expand(step.shape)
        return Children(token[..., : self._expandable], step[..., : self._expandable])

    def advance(self, parent: torch.Tensor, token: torch.Tensor) -> None:
        """Only the survivors' states step."""
        self._state = self._head.step(follow(self._state, parent), token)
