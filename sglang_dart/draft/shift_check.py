"""Does a block drafter's config say rightly which position its slots predict?

Checkpoints of either kind have the same shapes, so a wrong `shift_label` loads, serves and drafts
noise: accept lengths of about 1 and no other sign. Any text shows it, a prompt too: with the root
at s, the next token must be found by the slot that the config makes the first to predict, and it
is found by the neighbour if the config is wrong.
"""

from __future__ import annotations

import logging

import torch

from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.drafter import Roots

logger = logging.getLogger(__name__)

# Roots that are looked at, unless the answer is clear earlier.
ENOUGH = 512
# The config is called wrong from so many hits of the other slot on, if they are so many times more
# than those of the right one. Only hits of one slot alone count: where a text repeats itself both
# find the next token, since the one after next is the same.
FEWEST_HITS = 8
RATIO = 4


class ShiftCheck:
    """Counts which slot finds the next token, and says so once if it is the wrong one."""

    def __init__(self, drafter: DFlashDrafter, source: str) -> None:
        """`source`: the drafter's folder or hub id, for the message."""
        self._drafter = drafter
        self._source = source
        # Slot 0 is the first to predict with shift_label, slot 1 without.
        self._right = drafter.model.config.first_slot
        self._seen = 0
        self._hits = [0, 0]

    @property
    def done(self) -> bool:
        """Whether no more roots are needed."""
        return self._seen >= ENOUGH or self.wrong

    @property
    def wrong(self) -> bool:
        """Whether the other slot is clearly the one that finds the next token."""
        right, other = self._hits[self._right], self._hits[1 - self._right]
        return other >= FEWEST_HITS and other > RATIO * right

    def observe(self, roots: Roots, following: torch.Tensor) -> None:
        """Look at roots inside a text; following [bs] is the token after each. Waits for the host.

        The draft KV must hold the text before each root.
        """
        hidden = self._drafter.block_hidden(roots)[:, :2]
        found = self._drafter.lm_head(hidden).argmax(-1) == following[:, None]
        alone = found & (found.sum(1, keepdim=True) == 1)
        for slot, hits in enumerate(alone.sum(0).tolist()):
            self._hits[slot] += hits
        self._seen += len(following)
        if self.wrong:
            logger.error("sglang-dart: %s", self.report())

    def counted(self) -> str:
        """How often either slot was right, in words."""
        right, other = self._right, 1 - self._right
        return (
            f"slot {right} of the block alone found the next token {self._hits[right]} times, "
            f"slot {other} alone {self._hits[other]} times, at {self._seen} roots"
        )

    def report(self) -> str:
        """What is wrong, and what to do."""
        right, other = self._right, 1 - self._right
        return (
            f"{self._source}: shift_label {str(right == 0).lower()} in config.json is wrong, so "
            f"hardly any draft can be accepted; set it to {str(other == 0).lower()} "
            f"({self.counted()})"
        )
