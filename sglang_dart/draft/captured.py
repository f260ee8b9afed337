"""A drafter whose steps are replayed from graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dart.capture import Captured, Recorder
from sglang_dart.draft.drafter import Drafter, Roots, Rows
from sglang_dart.types import Candidates


class CapturedDrafter:
    """Appends and drafts as another drafter does; too many rows or roots go to that one itself.

    A draft is valid until the next one.
    """

    def __init__(
        self,
        drafter: Drafter,
        width: int,
        *,
        feature: torch.Tensor,
        slot_table: torch.Tensor,
        rows: int,
        sizes: Sequence[int],
        record: Recorder,
    ) -> None:
        """`drafter` has its KV and waits for no host value; `width`: candidates a level.

        feature [1, taps * H], slot_table [.., W]: like those to come, the table as wide as any;
        rows: how many a request appends at most; sizes: batch sizes.
        """
        self._drafter = drafter
        self._width = width
        self.levels, self.taps = drafter.levels, drafter.taps
        self.reads_next_token, self.carry_size = drafter.reads_next_token, drafter.carry_size
        # Zeros are harmless: slot 0 is a dummy, and a root of length 0 reads no context.
        number = torch.zeros(1, dtype=torch.int64, device=feature.device)
        row = Rows(feature, number, number, number)
        root = Roots(number, number, feature, slot_table)
        self._append = Captured(drafter.append, (row,), [size * rows for size in sizes], record)
        self._draft = Captured(lambda roots: drafter.draft(roots, width), (root,), sizes, record)

    def kv_bytes_per_slot(self) -> int:
        """Bytes of draft KV for one token."""
        return self._drafter.kv_bytes_per_slot()

    def allocate(self, slots: int) -> None:
        """Refused: the graphs hold the KV's address."""
        raise RuntimeError(
            f"draft KV for {slots} slots must be allocated before graphs are captured"
        )

    def append(self, rows: Rows) -> None:
        """Write draft KV of verified rows at their slots."""
        self._append(rows)

    def draft(self, roots: Roots, width: int) -> Candidates:
        """Propose the `width` best tokens for each of the next `levels` positions."""
        if width != self._width:
            return self._drafter.draft(roots, width)
        return self._draft(roots)
