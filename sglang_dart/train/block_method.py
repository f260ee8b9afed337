"""DFlash and Domino in training: blocks at drawn anchors learn what the text says next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dart.draft.dflash import DFlashModel
from sglang_dart.draft.domino import DominoModel
from sglang_dart.draft.layers import rotate
from sglang_dart.train.anchors import BlockRows, Seed, block_rows
from sglang_dart.train.block_attention import attend_blocks
from sglang_dart.train.capture import Capture
from sglang_dart.train.cross_entropy import Labels, cross_entropy
from sglang_dart.train.loss import Distilled
from sglang_dart.train.method import Batch


class BlockMethod(nn.Module):
    """Cross-entropy of every level of every drawn block; a Domino head reads the true path."""

    def __init__(
        self,
        model: DFlashModel,
        target_embedding: torch.Tensor,
        target_lm_head: torch.Tensor,
        *,
        mask_token_id: int,
        anchors: int,
        decay: float,
        base_until: float = 0.0,
        taught: bool = False,
        chunk: int = 2048,
    ) -> None:
        """The target's matrices [V, H] are read, never trained.

        anchors: at most so many blocks a text. Level j weighs exp(-j / decay). base_until: the
        share of training over which the base logits' part of a Domino loss falls from 1 to 0.
        taught: labels are the target's distributions rather than the text's tokens.
        """
        super().__init__()
        self.model = model.requires_grad_(True)
        self.levels = model.config.levels
        self.base_share = 0.0
        self.anchors, self.base_until, self.taught, self.chunk = anchors, base_until, taught, chunk
        device = target_lm_head.device
        level = torch.arange(self.levels, device=device, dtype=torch.float32)
        self._weight = torch.exp(-level / decay)
        self._row = torch.arange(model.config.block_size, device=device)
        self._mask_token_id = mask_token_id
        # Plain attributes, so that neither checkpoints nor gradient exchange carry them.
        self._lm_head, self._embedding = target_lm_head.detach(), target_embedding.detach()

    def schedule(self, done: float) -> None:
        """Set the base logits' part of the loss for the share of training that is behind us."""
        self.base_share = max(0.0, 1 - done / self.base_until) if self.base_until else 0.0

    def rows(self, turn: torch.Tensor, seed: Sequence[Seed]) -> BlockRows:
        """Draw blocks, and choose the rows that serving would draft from."""
        return block_rows(turn, self.levels, self.anchors, seed)

    def hidden(self, batch: Batch, capture: Capture) -> torch.Tensor:
        """The backbone's output for the batch's rows, [R, H]."""
        model, rows = self.model, _block_rows(batch)
        context = model.context(capture.feature)
        context_angle = model.angle(torch.arange(context.shape[1], device=context.device))
        angle = model.angle(rows.anchor[..., None] + self._row)
        root = batch.ids.gather(1, rows.anchor)[..., None]
        hidden = self._embedding[torch.where(self._row == 0, root, self._mask_token_id)]
        layers: list[Any] = list(model.layers)
        for layer in layers:
            normed = layer.input_layernorm(hidden)
            own_key, own_value = layer.key_value(normed)
            key, value = layer.key_value(context)
            attended = attend_blocks(
                rotate(layer.query(normed), angle),
                rotate(own_key, angle),
                own_value,
                rotate(key, context_angle),
                value,
                rows.anchor,
            )
            hidden = layer.finish(hidden, attended)
        # Without shifted labels the root's own row predicts nothing.
        predicting = hidden[:, :, hidden.shape[2] - self.levels :].flatten(0, 2)
        return model.norm(predicting.index_select(0, self._place(rows)))

    def correction(
        self, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The Domino head's low-rank term for rows hidden [R, H]: low [R, rank] and up [V, rank].

        The head's state at level j has read the text's own tokens from the anchor to anchor + j.
        """
        model, rows = self.model, _block_rows(batch)
        if not isinstance(model, DominoModel):
            return None
        last = batch.ids.shape[1] - 1
        # Past a text's end stands anything: no row of that level is trained.
        path = (rows.anchor[..., None] + torch.arange(self.levels, device=hidden.device)).clamp(
            max=last
        )
        token = batch.ids.gather(1, path.flatten(1)).view(path.shape)
        embedding = self._embedding[token]
        state = embedding.new_zeros(*rows.anchor.shape, model.domino.gru_hidden_dim)
        states = []
        for level in range(self.levels):
            state = model.step(state, embedding[:, :, level])
            states.append(state)
        read = torch.stack(states, dim=2).flatten(0, 2).index_select(0, self._place(rows))
        low = F.silu(model.hidden_part(hidden) + model.state_part(read))
        corrected = rows.level >= model.domino.pure_draft_prefix_len
        up: Any = model.embed_proj[2]
        return low * corrected[:, None], up.weight

    def _place(self, rows: BlockRows) -> torch.Tensor:
        """Each row's place among all levels of all blocks; no two rows have the same."""
        return rows.block * self.levels + rows.level

    def logits(self, batch: Batch, capture: Capture) -> torch.Tensor:
        """What the rows predict, [R, V]; for looking at, since it is large."""
        hidden = self.hidden(batch, capture)
        base, correction = hidden @ self._lm_head.T, self.correction(batch, hidden)
        return base if correction is None else base + correction[0] @ correction[1].T

    def forward(self, batch: Batch, capture: Capture) -> Distilled:
        """Loss and hits of a batch."""
        rows = batch.rows
        hidden = self.hidden(batch, capture)
        labels = Labels(
            rows,
            batch.ids.flatten()[rows.position + 1],
            capture.hidden.flatten(0, 1)[rows.position] if self.taught else None,
        )
        return cross_entropy(
            hidden,
            self._lm_head,
            self.correction(batch, hidden),
            labels,
            self._weight[rows.level],
            self.base_share,
            self.chunk,
        )


def _block_rows(batch: Batch) -> BlockRows:
    assert isinstance(batch.rows, BlockRows)
    return batch.rows
