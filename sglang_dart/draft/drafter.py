"""The protocol that every drafter implements: keep verified rows, draft from roots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_dart.types import Candidates


@dataclass(frozen=True)
class Rows:
    """Tokens that the target has verified and that the draft KV should now hold.

    feature    [R, taps * H] target dtype: tapped states of each token, taps in ascending order.
    next_token [R] int64: the token that follows each one (for the newest row: the root).
    position   [R] int64: position of each token (not of the token that follows it).
    slot       [R] int64: KV slot of each token; rows with slot 0 go to the dummy slot.
    """

    feature: torch.Tensor
    next_token: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor


@dataclass(frozen=True)
class Roots:
    """Where to draft from, one root a request.

    token        [bs] int64: newest committed token, not yet run through the target.
    length       [bs] int64: committed positions before the root; the root stands at this position.
    last_feature [bs, taps * H]: tapped states of the token just before the root.
    slot_table   [bs, W] int64 or int32: KV slot of position j of request i, valid for j < length.
    """

    token: torch.Tensor
    length: torch.Tensor
    last_feature: torch.Tensor
    slot_table: torch.Tensor


class Drafter(Protocol):
    """Which tokens may come next. It owns its weights and its KV; it knows no engine."""

    levels: int
    """Drafted levels D."""
    taps: tuple[int, ...]
    """0-based target layers whose output (the residual stream) the drafter reads."""
    reads_next_token: bool
    """Whether a row depends on the token after it, not only on its own."""
    carry_size: int
    """Numbers a level in Candidates.carry; 0 if there is none."""

    def kv_bytes_per_slot(self) -> int:
        """Bytes of draft KV for one token."""

    def allocate(self, slots: int) -> None:
        """Make draft KV for slots 0 .. slots - 1; slot 0 is a dummy that may hold anything."""

    def append(self, rows: Rows) -> None:
        """Write draft KV of verified rows at their slots. Never synchronises with the host."""

    def draft(self, roots: Roots, width: int) -> Candidates:
        """Propose the `width` best tokens for each of the next `levels` positions.

        Reads draft KV of positions < length. Never synchronises with the host.
        """
