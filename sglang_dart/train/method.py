"""What the loop trains: a head, the rows that it learns from, and their loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from sglang_dart.draft.dart import DartHead
from sglang_dart.train.blocks import Rows, draft_rows, trained_rows
from sglang_dart.train.capture import Capture
from sglang_dart.train.loss import Distilled, Teacher, distil

# Names a draw: the same numbers give the same rows.
Seed = tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Texts, padded at their ends. ids [B, T] int64; rows: trained ones; sample: their numbers.

    seed: what their rows were drawn with.
    """

    ids: torch.Tensor
    rows: Rows
    sample: list[int]
    seed: Seed = ()

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`, copied without waiting."""
        # From memory that is not pinned, CUDA may wait for all that is queued.
        ids = self.ids.pin_memory() if device.type == "cuda" else self.ids
        return replace(self, ids=ids.to(device, non_blocking=True), rows=self.rows.to(device))


class Method(Protocol):
    """A drafter in training: an `nn.Module` whose parameters are all trained."""

    levels: int

    def rows(self, turn: torch.Tensor, seed: Sequence[Seed]) -> Rows:
        """Choose the rows to train from answer numbers turn [B, T], on the host.

        What is drawn depends on the seeds alone, one a text.
        """

    def schedule(self, done: float) -> None:
        """Follow the share of the run that is behind us, 0 .. 1; held-out texts are scored at 1."""

    def __call__(self, batch: Batch, capture: Capture) -> Distilled:
        """Loss and hits of a batch."""


class DartMethod(nn.Module):
    """DART: distil the target into the real row and the mask rows of every prefix."""

    def __init__(
        self,
        head: DartHead,
        target_embedding: torch.Tensor,
        target_lm_head: torch.Tensor,
        *,
        gamma: float,
        final_norm_passes: int,
        chunk: int = 512,
    ) -> None:
        """`gamma` ** j weighs level j. The target's matrices [V, H] are read, never trained."""
        super().__init__()
        self.head = head.requires_grad_(True)
        self.levels = head.config.draft_length + 1
        self.final_norm_passes = final_norm_passes
        self.chunk = chunk
        device = target_lm_head.device
        self._weight = gamma ** torch.arange(self.levels, device=device, dtype=torch.float32)
        target_id = head.target_id().to(device)
        draft_id = torch.full((target_lm_head.shape[0],), -1, device=device)
        draft_id[target_id] = torch.arange(len(target_id), device=device)
        # Plain attributes, so that neither checkpoints nor gradient exchange carry them.
        self._target = (target_lm_head.detach(), target_id, draft_id)
        self._embedding = target_embedding.detach()

    def rows(self, turn: torch.Tensor, seed: Sequence[Seed] = ()) -> Rows:
        """Choose the rows that serving would draft from; nothing is drawn."""
        return trained_rows(turn, self.levels)

    def schedule(self, done: float) -> None:
        """The loss stays the same."""

    def hidden(self, batch: Batch, capture: Capture) -> torch.Tensor:
        """Inputs of `lm_head` for the batch's rows, [R, H]."""
        # The last token has no successor; its row is nobody's key and is never trained.
        following = self._embedding[batch.ids.roll(-1, dims=1)]
        return draft_rows(self.head, capture.feature, following, batch.rows, self.final_norm_passes)

    def logits(self, batch: Batch, capture: Capture) -> torch.Tensor:
        """What the rows predict, [R, Vd]; for looking at, since it is large."""
        return self.head.lm_head(self.hidden(batch, capture))

    def forward(self, batch: Batch, capture: Capture) -> Distilled:
        """Loss and hits of a batch."""
        teacher = Teacher(capture.hidden.flatten(0, 1)[batch.rows.position], *self._target)
        return distil(
            self.hidden(batch, capture),
            self.head.lm_head.weight,
            batch.rows,
            teacher,
            self._weight,
            self.chunk,
        )
