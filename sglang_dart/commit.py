"""What a round leaves behind: rows for the draft KV, roots, token tails, the next candidates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.types import Candidates

if TYPE_CHECKING:
    from sglang_dart.round import Verdict


def verified_rows(verdict: Verdict, length: torch.Tensor) -> Rows:
    """The rows that the target has just verified, bs * C of them, for the draft KV.

    Fixed in number, so that nothing waits for the host: those beyond the accepted run are sent to
    the dummy slot 0. `length` [bs] is the committed length before the round.
    """
    columns = torch.arange(verdict.token.shape[1], device=length.device)
    valid = columns < verdict.length[:, None]
    return Rows(
        feature=verdict.feature.flatten(0, 1),
        next_token=verdict.token.flatten(),
        position=(length[:, None] + columns).flatten(),
        slot=torch.where(valid, verdict.slot, 0).flatten(),
    )


def next_roots(verdict: Verdict, length: torch.Tensor, slot_table: torch.Tensor) -> Roots:
    """Where the next round drafts from. `length` [bs]: committed length before this round."""
    last = (verdict.length - 1).long()[:, None]
    feature = verdict.feature.gather(
        1, last[..., None].expand(-1, 1, verdict.feature.shape[2])
    ).squeeze(1)
    return Roots(
        token=verdict.token.gather(1, last).squeeze(1),
        length=length + verdict.length,
        last_feature=feature,
        slot_table=slot_table,
    )


def shift_tail(tail: torch.Tensor, verdict: Verdict) -> torch.Tensor:
    """Append the committed run to each request's newest tokens.

    tail [bs, T] int64, oldest first, root last, -1 where the text is shorter -> [bs, T].
    """
    text = torch.cat([tail, verdict.token], dim=1)
    window = torch.arange(tail.shape[1], device=tail.device)
    return text.gather(1, verdict.length.long()[:, None] + window)


@dataclass(frozen=True)
class _Copy:
    """A copy to another device that may still be under way."""

    row: list[int]
    candidates: Candidates | None
    tail: torch.Tensor
    done: torch.cuda.Event


class RoundState:
    """What every request carries from one round to the next, by its row in the engine's table.

    A row is written by its request's prefill before any round reads it, so rows that the engine
    hands to another request need no clearing. Candidates live where the planner reads them, `home`.
    If that is the host and the drafter is on a GPU, copies are asynchronous: `take` waits for them,
    which is the one wait of a round; one of plain decoding takes nothing, and has none.
    """

    def __init__(
        self,
        rows: int,
        levels: int,
        candidates: int,
        tail: int,
        device: torch.device,
        *,
        carry: int = 0,
        home: torch.device | None = None,
    ) -> None:
        """`tail`: how many of its newest tokens a request remembers, the root included.

        carry: see Drafter.carry_size. home: by default `device`, the drafter's.
        """
        home = home or device
        self._candidates = Candidates(
            token=torch.zeros(rows, levels, candidates, dtype=torch.int64, device=home),
            log_prob=torch.full((rows, levels, candidates), -torch.inf, device=home),
            carry=torch.zeros(rows, levels, carry, device=home) if carry else None,
        )
        self._tail = torch.full((rows, tail), -1, dtype=torch.int64, device=device)
        # The device needs the tails too, since it appends to them.
        self._home_tail = self._tail if home.type == device.type else self._tail.to(home)
        self._pending: deque[_Copy] = deque()

    @property
    def tail_length(self) -> int:
        return self._tail.shape[1]

    def tail(self, row_index: torch.Tensor) -> torch.Tensor:
        """The newest tokens of each request, [bs, T], on the device."""
        return self._tail[row_index]

    def put(
        self,
        row: list[int],
        row_index: torch.Tensor,
        candidates: Candidates | None,
        tail: torch.Tensor,
    ) -> None:
        """Keep candidates [bs, D, K] and tails [bs, T]; returns before they reach the host.

        None leaves the candidates of an earlier round.
        """
        self._tail[row_index] = tail
        if self._home_tail is self._tail:
            self._write(row_index, candidates)
            return
        self._receive(wait=False)
        copied = candidates and candidates.map(_to_host)
        host_tail = _to_host(tail)
        done = torch.cuda.Event()
        done.record()
        self._pending.append(_Copy(row, copied, host_tail, done))

    def take(self, row: list[int], row_index: torch.Tensor) -> tuple[Candidates, torch.Tensor]:
        """Candidates and tails of these requests, at home."""
        if self._home_tail is self._tail:
            return self._candidates.map(lambda column: column[row_index]), self._tail[row_index]
        self._receive(wait=True)
        return self._candidates.map(lambda column: column[row]), self._home_tail[row]

    def _receive(self, *, wait: bool) -> None:
        """Read the copies that have arrived, or all."""
        while self._pending and (wait or self._pending[0].done.query()):
            copy = self._pending.popleft()
            copy.done.synchronize()
            self._write(copy.row, copy.candidates)
            self._home_tail[copy.row] = copy.tail

    def _write(self, row: list[int] | torch.Tensor, candidates: Candidates | None) -> None:
        if candidates is None:
            return
        kept = self._candidates
        kept.token[row] = candidates.token
        kept.log_prob[row] = candidates.log_prob
        if kept.carry is not None:
            assert candidates.carry is not None
            kept.carry[row] = candidates.carry.to(kept.carry.dtype)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
