"""The Domino drafter: a DFlash block whose logits a small causal head corrects along every path.

The head reads a path's tokens with a GRU and adds a low-rank term to the logits of the row that
comes next. Source: arXiv 2605.29707 and its released weights' layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dart.draft.dflash import DFlashDrafter, DFlashModel, load_dflash, load_weights
from sglang_dart.draft.dflash_config import DFlashConfig
from sglang_dart.draft.drafter import Roots
from sglang_dart.draft.layers import Embed
from sglang_dart.draft.topk import top_k_of_rows
from sglang_dart.types import Candidates


class DominoModel(DFlashModel):
    """The backbone and the causal head, parameters named as in the published file.

    prefix_gru reads token embeddings; embed_proj maps [hidden row ; GRU state] to logits to add.
    """

    def __init__(self, config: DFlashConfig) -> None:
        """Raises ValueError for the config of a drafter without a causal head."""
        super().__init__(config)
        if config.domino is None:
            raise ValueError("this is a plain DFlash config: it has no projector_type")
        self.domino = config.domino
        hidden, state, rank = (
            config.hidden_size,
            config.domino.gru_hidden_dim,
            config.domino.emb_dim,
        )
        self.prefix_gru = nn.GRU(hidden, state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.vocab_size, bias=False),
        )

    def hidden_part(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a hidden row [..., H] gives to the inner layer [..., rank], the same on any path."""
        return F.linear(hidden, self._into[:, : self.config.hidden_size])

    def state_part(self, state: torch.Tensor) -> torch.Tensor:
        """What a path's GRU state [..., S] gives to the inner layer [..., rank]."""
        return F.linear(state, self._into[:, self.config.hidden_size :])

    def token_part(self, token: torch.Tensor) -> torch.Tensor:
        """What maps the inner layer to the logits of token [...]: [..., rank]."""
        return cast(nn.Linear, self.embed_proj[2]).weight[token]

    def correction(self, inner: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What the head adds to logits: inner [bs, P, rank], out [bs, C, rank] -> [bs, P, C].

        `inner` is the sum of hidden and state part, `out` the candidates' token part.
        """
        return F.silu(inner) @ out.transpose(1, 2)

    def step(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """GRU states [..., S] after reading one more embedding [..., H]."""
        into, within = self.prefix_gru.all_weights[0]
        rows = embedding.flatten(0, -2), state.flatten(0, -2)
        return torch.gru_cell(*rows, into, within).view_as(state)

    @property
    def _into(self) -> torch.Tensor:
        """Weight of the inner layer, [rank, H + S]."""
        return cast(nn.Linear, self.embed_proj[0]).weight


def load_domino(
    source: str,
    config: DFlashConfig,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DominoModel:
    """Load a published Domino drafter from a folder or hub id. Raises ValueError."""
    with torch.device("meta"):
        model = DominoModel(config)
    load_weights(model, source, revision=revision, dtype=dtype, device=device)
    return model


def load_block_model(source: str, config: DFlashConfig, **options: Any) -> DFlashModel:
    """Load either kind, as the config says; options as for `load_dflash` and `load_domino`."""
    load = load_dflash if config.domino is None else load_domino
    return load(source, config, **options)


class DominoDrafter(DFlashDrafter):
    """Drafts like DFlash and hands over what the causal head needs of each level."""

    model: DominoModel

    @property
    def carry_size(self) -> int:  # type: ignore[override]
        """The rank of the correction."""
        return self.model.domino.emb_dim

    @torch.no_grad()
    def draft(self, roots: Roots, width: int) -> Candidates:
        """Candidates by base logits; `carry` is each level's part of the head's inner layer."""
        hidden = self.predicting(self.block_hidden(roots))
        candidates = top_k_of_rows(self.lm_head, hidden, width, normalise="vocabulary")
        return dataclasses.replace(candidates, carry=self.model.hidden_part(hidden))

    def path_head(self, candidates: Candidates, root: torch.Tensor) -> DominoPaths:
        """The causal head over these candidates, for one growth from root [bs]."""
        return DominoPaths(self.model, self.embed, candidates, root)


class DominoPaths:
    """Implements the protocol CausalHead of score/causal.py for a batch of trees."""

    def __init__(
        self, model: DominoModel, embed: Embed, candidates: Candidates, root: torch.Tensor
    ) -> None:
        assert candidates.carry is not None, "candidates of a drafter without a causal head"
        self.token = candidates.token
        self._model = model
        self._embed = embed
        self._base = candidates.log_prob
        self._carry = candidates.carry.to(model.norm.weight.dtype)
        self._out = model.token_part(candidates.token)
        self._root = root

    def initial_state(self) -> torch.Tensor:
        """State [bs, 1, S] after the root."""
        size = self._model.domino.gru_hidden_dim
        return self.step(self._carry.new_zeros(len(self._root), 1, size), self._root[:, None])

    @torch.no_grad()
    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        """Corrected logits [bs, P, C], up to a constant a level; base ones where it is exempt."""
        base = self._base[:, level, None]
        if level < self._model.domino.pure_draft_prefix_len:
            return base.expand(-1, state.shape[1], -1)
        inner = self._carry[:, level, None] + self._model.state_part(state)
        # Added in float32, the dtype of log-probabilities.
        return base + self._model.correction(inner, self._out[:, level])

    @torch.no_grad()
    def step(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """State [bs, P, S] after reading one more token [bs, P]."""
        return self._model.step(state, self._embed(token).to(state.dtype))
