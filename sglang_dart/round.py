"""One decode round, from top to bottom. Read this first.

    candidates -> grow + prune + pack -> verify -> commit -> draft -> candidates of the next round

A round begins with what the last one left: every request has a root (its newest token, which the
target has not read yet) and the drafter's candidates for the positions after it. Drafting comes
last, because the taps of the verified rows and the new root exist as soon as the target has
answered; the engine then digests this round while the next candidates are being made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_dart.commit import RoundState, next_roots, shift_tail, verified_rows
from sglang_dart.draft.drafter import Drafter
from sglang_dart.tree.plan import TreePlanner, root_only
from sglang_dart.types import PackedTree, Tree


@dataclass(frozen=True)
class RoundBatch:
    """The running requests as a round sees them.

    row        the requests' rows in RoundState, on the host.
    row_index  [bs] int64: the same on the device.
    length     [bs] int64: committed positions before the root.
    slot_table [bs, W] int32 or int64: KV slot of each position, valid up to length + width.
    end        [bs, E] int64: tokens that end the answer, on the host; -1 fills up.
    """

    row: list[int]
    row_index: torch.Tensor
    length: torch.Tensor
    slot_table: torch.Tensor
    end: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """The target's answer to a packed tree, the accepted run moved to the front of each request.

    token   [bs, C] int64: token j follows accepted node j; the last valid one is the bonus.
    length  [bs] int32: tokens committed, bonus included (1 .. C).
    feature [bs, C, taps * H]: tapped states of accepted node j; beyond `length` anything.
    slot    [bs, C] int64: KV slot where accepted node j now stands.
    """

    token: torch.Tensor
    length: torch.Tensor
    feature: torch.Tensor
    slot: torch.Tensor


class Verifier(Protocol):
    """Runs the target over packed trees, accepts, and moves the accepted KV to the front."""

    def verify(self, packed: PackedTree, levels: int) -> Verdict:
        """`levels` is the depth that no node exceeds."""


def decode_round(
    batch: RoundBatch,
    *,
    width: int,
    state: RoundState,
    planner: TreePlanner,
    verifier: Verifier,
    drafter: Drafter,
    draft: bool = True,
) -> tuple[Tree, Verdict]:
    """Verify a tree of `width` nodes (root included) a request, then draft for the next round.

    Without `draft` the next round of these requests must have width 1.
    """
    tail = state.tail(batch.row_index)
    if width == 1:
        # Plain decoding: nothing is grown, so there is nothing to wait for.
        tree, packed = root_only(tail[:, -1], batch.length)
    else:
        candidates, context = state.take(batch.row, batch.row_index)
        tree, packed = planner.plan(candidates, context, batch.length, width, batch.end)
    verdict = verifier.verify(packed, planner.levels(width))

    drafter.append(verified_rows(verdict, batch.length))
    tail = shift_tail(tail, verdict)
    proposed = None
    if draft:
        roots = next_roots(verdict, batch.length, batch.slot_table)
        proposed = drafter.draft(roots, planner.candidates)
    state.put(batch.row, batch.row_index, proposed, tail)
    return tree, verdict
