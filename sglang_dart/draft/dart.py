"""The DART drafter: one decoder layer whose mask rows predict several positions at once.

Source: arXiv 2601.19278 and its released weights' layout.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from sglang_dart.draft.checkpoint import DartConfig, load_tensors
from sglang_dart.draft.context_kv import ContextKVHolder
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.draft.layers import MLP, Embed, RMSNorm, rope, rotate
from sglang_dart.draft.topk import top_k
from sglang_dart.types import Candidates

logger = logging.getLogger(__name__)


def dart_taps(target_layers: int) -> tuple[int, int, int]:
    """Give the 0-based target layers whose output a DART head reads.

    Raises ValueError for targets of fewer than 7 layers, where the three would coincide.
    """
    if target_layers < 7:
        raise ValueError(f"DART needs a target of at least 7 layers, got {target_layers}")
    return 1, target_layers // 2 - 1, target_layers - 4


def check_target(source: str, config: DartConfig, *, hidden_size: int, vocab_size: int) -> None:
    """Refuse a target that this head was not made for. Raises ValueError."""
    made_for = {"hidden_size": config.hidden_size, "target_hidden_size": config.target_hidden_size}
    for name, size in made_for.items():
        if size != hidden_size:
            raise ValueError(
                f"{source}: {name} is {size}, the target's hidden size is {hidden_size}; "
                "this drafter belongs to another target"
            )
    if config.vocab_size > vocab_size:
        raise ValueError(
            f"{source}: vocab_size {config.vocab_size} exceeds the target's {vocab_size}; "
            "this drafter belongs to another target"
        )


class DartHead(nn.Module):
    """The trained part, parameters named as in the published file (`state_dict()` is that file).

    Row functions are apart from attention, so that drafting (slots) and training (sparse blocks)
    share them.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(3 * config.target_hidden_size, hidden, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        # Offsets: target id = draft id + d2t[draft id].
        self.d2t: torch.Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def target_id(self) -> torch.Tensor:
        """Target id of each draft id, [Vd] int64."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def real_rows(
        self, feature: torch.Tensor, embedding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join each token's taps with the embedding of the token that follows it.

        feature [..., 3 * H_target], embedding [..., H] -> attention input [..., 2H], residual
        [..., H].
        """
        residual = self.fc(feature)
        layer = self.midlayer
        joined = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(residual)], dim=-1)
        return joined, residual

    def mask_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input [2H] and residual [H] of every mask row."""
        mask = self.midlayer.mask_rep
        return mask, mask[: self.config.hidden_size]

    def query(self, joined: torch.Tensor) -> torch.Tensor:
        """Unrotated queries [..., heads, head_dim]."""
        return self.midlayer.self_attn.q_proj(joined).unflatten(-1, (-1, self.config.head_dim))

    def key_value(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated keys and values, each [..., kv_heads, head_dim]."""
        attention, heads = self.midlayer.self_attn, (-1, self.config.head_dim)
        return (
            attention.k_proj(joined).unflatten(-1, heads),
            attention.v_proj(joined).unflatten(-1, heads),
        )

    def angle(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotation of rows at `position` [...], for `rotate`."""
        return rope(position, self.config.head_dim, self.config.rope_theta, self.norm.weight.dtype)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """From attention's output [..., heads, head_dim] to layer output [..., H], unnormed."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended.flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, hidden: torch.Tensor, final_norm_passes: int) -> torch.Tensor:
        """Layer output [..., H] -> draft logits [..., Vd]. The release norms twice."""
        for _ in range(final_norm_passes):
            hidden = self.norm(hidden)
        return self.lm_head(hidden)


class _MidLayer(nn.Module):
    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.mask_rep = nn.Parameter(torch.randn(2 * hidden))
        self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = _Attention(config)
        self.mlp = MLP(hidden, config.intermediate_size)


class _Attention(nn.Module):
    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        queries, keys = (
            config.num_attention_heads * head_dim,
            config.num_key_value_heads * head_dim,
        )
        self.q_proj = nn.Linear(2 * hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)


def load_head(
    source: str,
    config: DartConfig,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DartHead:
    """Load a published DART head from a folder or hub id.

    The target's embedding and `t2d` are not needed and may be present; `d2t` may be absent if the
    head covers the whole vocabulary. Raises ValueError listing every tensor that does not match.
    """
    with torch.device("meta"):
        head = DartHead(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    full = config.draft_vocab_size == config.vocab_size
    tensors = load_tensors(
        source,
        shapes,
        revision=revision,
        optional=("d2t",) if full else (),
        ignored=("t2d", "embed_tokens.weight"),
        dtype=dtype,
        device=device,
    )
    if "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)
    _check_vocabulary(source, tensors["d2t"], config.vocab_size)
    tensors["d2t"] = tensors["d2t"].to(torch.int64)
    head.load_state_dict(tensors, assign=True)
    return head.requires_grad_(False)


def _check_vocabulary(source: str, d2t: torch.Tensor, vocab_size: int) -> None:
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"{source}: d2t is {d2t.dtype}, not an integer type")
    target_id = torch.arange(d2t.shape[0], device=d2t.device) + d2t
    outside = (target_id < 0) | (target_id >= vocab_size)
    if outside.any():
        bad = int(outside.nonzero()[0])
        raise ValueError(
            f"{source}: d2t maps draft id {bad} to {int(target_id[bad])}, outside the target's "
            f"vocabulary of {vocab_size} (target id = draft id + d2t[draft id])"
        )
    if not d2t.any() and d2t.shape[0] < vocab_size:
        logger.warning("%s: d2t is all zero, so draft ids are taken as target ids", source)
    # Twins would give a tree siblings with one token: wasted rows, and sampling tries it twice.
    twins = d2t.shape[0] - target_id.unique().shape[0]
    if twins:
        raise ValueError(f"{source}: d2t maps {twins} draft ids to a target id that is taken")


class DartDrafter(ContextKVHolder):
    """Drafts M + 1 levels with one pass over M + 1 rows: the last real row and M mask rows."""

    reads_next_token = True
    carry_size = 0

    def __init__(
        self,
        head: DartHead,
        embed: Embed,
        target_layers: int,
        *,
        final_norm_passes: int = 2,
        levels: int | None = None,
    ) -> None:
        """`embed` maps target ids [...] to the target's embeddings [..., H], in any dtype.

        levels: how many of the head's levels are wanted; None: all.
        Raises ValueError if the target has too few layers.
        """
        config = head.config
        super().__init__(1, config.num_key_value_heads, config.head_dim, like=head.fc.weight)
        self.head = head
        self.embed = embed
        self.final_norm_passes = final_norm_passes
        # Mask rows see only those before them, so the last ones can be left out.
        self.levels = min(levels or config.draft_length + 1, config.draft_length + 1)
        self.taps: tuple[int, ...] = dart_taps(target_layers)
        self._target_id = head.target_id()
        rows = torch.arange(self.levels, device=self._device)
        self._row = rows
        self._causal = rows[:, None] >= rows
        # Mask rows differ by position alone: up to rotation they are constants.
        joined, self._mask_residual = head.mask_row()
        self._mask_query = head.query(joined)
        self._mask_key, self._mask_value = head.key_value(joined)

    @torch.no_grad()
    def append(self, rows: Rows) -> None:
        """Write draft KV of verified rows: projections only, real rows need no attention here."""
        joined, _ = self._real_rows(rows.feature, rows.next_token)
        key, value = self.head.key_value(joined)
        self.kv.append(0, rows.slot, rotate(key, self.head.angle(rows.position)), value)

    @torch.no_grad()
    def draft(self, roots: Roots, width: int) -> Candidates:
        """Propose the `width` best tokens for each of the next `levels` positions."""
        return top_k(self.draft_logits(roots), width, target_id=self._target_id)

    @torch.no_grad()
    def draft_logits(self, roots: Roots) -> torch.Tensor:
        """Logits [bs, levels, Vd] over draft ids; row 0 is the last real row's."""
        head, bs = self.head, roots.token.shape[0]
        joined, residual = self._real_rows(roots.last_feature, roots.token)
        query = self._block(head.query(joined), self._mask_query)
        key, value = (
            self._block(real, mask)
            for real, mask in zip(
                head.key_value(joined), (self._mask_key, self._mask_value), strict=True
            )
        )
        # The last real row is part of the block, so the context ends before it.
        context = roots.length - 1
        angle = head.angle(context[:, None] + self._row)
        attended = self.kv.attend(
            0,
            rotate(query, angle),
            rotate(key, angle),
            value,
            self._causal,
            roots.slot_table,
            context,
        )
        masks = self._mask_residual.expand(bs, self.levels - 1, -1)
        hidden = head.finish(torch.cat([residual[:, None], masks], dim=1), attended)
        return head.logits(hidden, self.final_norm_passes)

    def _real_rows(
        self, feature: torch.Tensor, next_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = self.embed(next_token).to(self._dtype)
        return self.head.real_rows(feature.to(self._dtype), embedding)

    def _block(self, real: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Put each request's real row [bs, heads, head_dim] before the mask rows."""
        masks = mask.expand(real.shape[0], self.levels - 1, *mask.shape)
        return torch.cat([real[:, None], masks], dim=1)
