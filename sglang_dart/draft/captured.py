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
        rows: Rows,
        roots: Roots,
        sizes: Sequence[int],
        record: Recorder,
    ) -> None:
        """`drafter` has its KV, and waits for no host value; `width`: candidates a level.

        rows, roots: zeros, as many as the largest of the batch sizes brings. Zeros are harmless:
        slot 0 is a dummy, and a root of length 0 reads no context.
        """
        self._drafter = drafter
        self._width = width
        self.levels, self.taps = drafter.levels, drafter.taps
        self.reads_next_token, self.carry_size = drafter.reads_next_token, drafter.carry_size
        a_request = len(rows.slot) // max(sizes)
        self._append = Captured(
            drafter.append, (rows,), [size * a_request for size in sizes], record
        )
        self._draft = Captured(lambda roots: drafter.draft(roots, width), (roots,), sizes, record)

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


def blanks(
    requests: int, columns: int, feature_size: int, table: torch.Tensor, dtype: torch.dtype
) -> tuple[Rows, Roots]:
    """Zeros: `columns` rows a request, and roots with as many slots as table [rows, W] has."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=table.device)

    count = requests * columns
    return (
        Rows(zeros(count, feature_size, dtype=dtype), zeros(count), zeros(count), zeros(count)),
        Roots(
            zeros(requests),
            zeros(requests),
            zeros(requests, feature_size, dtype=dtype),
            zeros(requests, table.shape[1], dtype=table.dtype),
        ),
    )
