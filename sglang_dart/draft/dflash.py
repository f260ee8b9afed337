"""The DFlash drafter: a block of mask rows, conditioned on features tapped from the target.

A block is the root and masks, which see one another in both directions and the context through
keys and values that are projected from the target's features. Embedding and output layer are the
target's own. Source: arXiv 2602.06036 and its released weights' layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from sglang_dart.draft.checkpoint import load_tensors
from sglang_dart.draft.context_kv import ContextKVHolder
from sglang_dart.draft.dflash_config import DFlashConfig
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.draft.layers import MLP, Embed, RMSNorm, rope, rotate
from sglang_dart.draft.topk import top_k_of_rows
from sglang_dart.types import Candidates

# Maps hidden rows [..., H] to the target's logits [..., V], whatever the dtype.
LMHead = Callable[[torch.Tensor], torch.Tensor]

# Names that exports of other trainers give the same tensors.
ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "logit_head.": ""}
# The target's own, which some exports repeat.
OF_TARGET = ("embed_tokens.weight", "lm_head.weight")


class DFlashModel(nn.Module):
    """The trained part, parameters named as in the published file (`state_dict()` is that file).

    Row functions are apart from attention, so that drafting (slots) and training (sparse blocks)
    share them.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.tap_count * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)

    def decoder_layers(self) -> list[DFlashLayer]:
        return [cast(DFlashLayer, layer) for layer in self.layers]

    def context(self, feature: torch.Tensor) -> torch.Tensor:
        """Tapped features [..., taps * H] -> context rows [..., H], the same for every layer."""
        return self.hidden_norm(self.fc(feature))

    def angle(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotation of rows at `position` [...], for `rotate`."""
        return rope(position, self.config.head_dim, self.config.rope_theta, self.norm.weight.dtype)


class DFlashLayer(nn.Module):
    """A decoder layer, whose keys and values are those of context rows and of the block's rows."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = _Attention(config)
        self.mlp = MLP(hidden, config.intermediate_size)

    def query(self, normed: torch.Tensor) -> torch.Tensor:
        """Block rows after `input_layernorm` [..., H] -> unrotated [..., heads, head_dim]."""
        attention = self.self_attn
        return attention.q_norm(attention.q_proj(normed).unflatten(-1, attention.heads))

    def key_value(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated keys and values, each [..., kv_heads, head_dim].

        row [..., H]: context rows as they are, block rows after `input_layernorm`.
        """
        attention = self.self_attn
        key = attention.k_norm(attention.k_proj(row).unflatten(-1, attention.heads))
        return key, attention.v_proj(row).unflatten(-1, attention.heads)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """From the layer's input [..., H] and attention's output to the layer's output [..., H]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        queries, keys = (
            config.num_attention_heads * head_dim,
            config.num_key_value_heads * head_dim,
        )
        self.heads = (-1, head_dim)
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)


def load_weights(
    model: DFlashModel,
    source: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Fill a model made on the meta device from a published checkpoint, and freeze it.

    Raises ValueError listing every tensor that does not match.
    """
    tensors = load_tensors(
        source,
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        revision=revision,
        ignored=OF_TARGET,
        aliases=ALIASES,
        dtype=dtype,
        device=device,
    )
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False)


def load_dflash(
    source: str,
    config: DFlashConfig,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DFlashModel:
    """Load a published DFlash drafter from a folder or hub id. Raises as `load_weights`."""
    with torch.device("meta"):
        model = DFlashModel(config)
    load_weights(model, source, revision=revision, dtype=dtype, device=device)
    return model


class DFlashDrafter(ContextKVHolder):
    """Drafts with one pass over the root and its mask rows. Slot k predicts position s + k."""

    model: DFlashModel
    reads_next_token = False
    carry_size = 0

    def __init__(
        self,
        model: DFlashModel,
        embed: Embed,
        lm_head: LMHead,
        target_layers: int,
        *,
        mask_token_id: int | None = None,
        levels: int | None = None,
    ) -> None:
        """`mask_token_id` must be given where the config has none. Raises ValueError without.

        levels: how many of the drafter's levels are wanted; None: all.
        """
        config = model.config
        super().__init__(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            like=model.fc.weight,
        )
        self.model = model
        self.embed = embed
        self.lm_head = lm_head
        self.levels = min(levels or config.levels, config.levels)
        self.taps = config.taps(target_layers)
        mask = config.mask_token_id if mask_token_id is None else mask_token_id
        if mask is None:
            raise ValueError(
                f"the drafter's config.json has no mask_token_id: set it to the id of the token "
                f"{config.mask_token} in the target's vocabulary"
            )
        self._row = torch.arange(config.block_size, device=self._device)
        # The root's place comes first.
        self._block = torch.full_like(self._row, mask)
        self._all = torch.ones(len(self._row), len(self._row), dtype=torch.bool).to(self._device)

    @torch.no_grad()
    def append(self, rows: Rows) -> None:
        """Write draft KV of verified rows in every layer: projections of their features only."""
        context = self.model.context(rows.feature.to(self._dtype))
        angle = self.model.angle(rows.position)
        for index, layer in enumerate(self.model.decoder_layers()):
            key, value = layer.key_value(context)
            self.kv.append(index, rows.slot, rotate(key, angle), value)

    @torch.no_grad()
    def draft(self, roots: Roots, width: int) -> Candidates:
        """Propose the `width` best tokens for each of the next `levels` positions."""
        hidden = self.predicting(self.block_hidden(roots))
        return top_k_of_rows(self.lm_head, hidden, width, normalise="vocabulary")

    @torch.no_grad()
    def draft_logits(self, roots: Roots) -> torch.Tensor:
        """Logits [bs, levels, V] from the block alone."""
        return self.lm_head(self.predicting(self.block_hidden(roots)))

    def predicting(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of block_hidden [bs, block_size, H] that predict, level by level."""
        first = self.model.config.first_slot
        return hidden[:, first : first + self.levels]

    @torch.no_grad()
    def block_hidden(self, roots: Roots) -> torch.Tensor:
        """The block's rows after the final norm, [bs, block_size, H]; row 0 is the root's."""
        token = torch.where(self._row == 0, roots.token[:, None], self._block)
        hidden = self.embed(token).to(self._dtype)
        # The root has no feature yet, so the context ends before it.
        angle = self.model.angle(roots.length[:, None] + self._row)
        for index, layer in enumerate(self.model.decoder_layers()):
            normed = layer.input_layernorm(hidden)
            key, value = layer.key_value(normed)
            attended = self.kv.attend(
                index,
                rotate(layer.query(normed), angle),
                rotate(key, angle),
                value,
                self._all,
                roots.slot_table,
                roots.length,
            )
            hidden = layer.finish(hidden, attended)
        return self.model.norm(hidden)
