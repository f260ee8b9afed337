"""config.json of DFlash and Domino drafters: the published fields, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from sglang_dart.draft.checkpoint import (
    CONFIG,
    Size,
    check_heads,
    layer_fields,
    read_json,
    validate,
)

# Where the drafter's own settings stand; early checkpoints have them at the top level.
NESTED = "dflash_config"
# Names that published checkpoints give the causal head.
PROJECTORS = {"domino": "domino", "causal_v5": "domino"}

TokenId = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(extra="ignore", strict=True))
class DominoConfig:
    """Sizes of the causal correction head."""

    shift_label: bool
    """Whether slot k of the block predicts position s + 1 + k (root at s); else slot k predicts
    s + k, and slot 0 nothing."""
    emb_dim: Size
    """Rank of the correction."""
    gru_hidden_dim: Size
    pure_draft_prefix_len: Annotated[int, Field(ge=0)] = 1
    """Levels whose logits are left uncorrected, from the first."""


@dataclass(frozen=True, config=ConfigDict(extra="ignore", strict=True))
class DFlashConfig:
    """Sizes of a block drafter; `domino` if it has a causal head."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    rms_norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)]
    block_size: Annotated[int, Field(ge=2)]
    """Rows of a block: the root and block_size - 1 masks."""
    mask_token_id: TokenId | None = None
    mask_token: str = "<|MASK|>"
    """Token of the target's tokenizer that stands for a mask, if there is no mask_token_id."""
    target_layer_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """Tapped target layers, ascending; None: see `taps`."""
    num_target_layers: Size | None = None
    hidden_act: Literal["silu"] = "silu"
    rope_scaling: Literal[None] = None
    attention_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None
    domino: DominoConfig | None = None

    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The whole config.json, for settings that are not sizes (`dartree_config`)."""

    @property
    def levels(self) -> int:
        """Positions that one block predicts."""
        shifted = self.domino is not None and self.domino.shift_label
        return self.block_size if shifted else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """Slot of the block that predicts the first position after the root."""
        return self.block_size - self.levels

    @property
    def tap_count(self) -> int:
        return len(self.target_layer_ids or range(self.num_hidden_layers))

    def taps(self, target_layers: int) -> tuple[int, ...]:
        """The 0-based target layers whose output the drafter reads."""
        if self.target_layer_ids is not None:
            return tuple(self.target_layer_ids)
        return default_taps(self.num_hidden_layers, target_layers)


def default_taps(count: int, target_layers: int) -> tuple[int, ...]:
    """`count` layers of the target, evenly from layer 1 to the third from the end."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def read_dflash_config(source: str, revision: str | None = None) -> DFlashConfig:
    """Read a block drafter's config.json from a folder or hub id.

    Raises ValueError, one line that names the file and the field.
    """
    return parse_dflash_config(read_json(source, CONFIG, revision), f"{source}/{CONFIG}")


def parse_dflash_config(raw: Mapping[str, Any], where: str) -> DFlashConfig:
    """Check a config.json. Raises ValueError naming `where` and the field."""
    nested = raw.get(NESTED, {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"{where}: {NESTED}: expected an object, got {type(nested).__name__}")
    given = layer_fields(raw) | dict(nested)
    # Ours are made here; what a file has under these names is not meant for us.
    given |= {"raw": raw, "domino": _domino(given, where)}
    config = validate(DFlashConfig, given, where)
    check_heads(where, config.num_attention_heads, config.num_key_value_heads)
    taps = config.target_layer_ids
    # The target hands its layers over in the order in which it runs them.
    if taps is not None and taps != sorted(set(taps)):
        raise ValueError(f"{where}: target_layer_ids: must be ascending, got {taps}")
    return config


def _domino(given: Mapping[str, Any], where: str) -> DominoConfig | None:
    projector = given.get("projector_type")
    if projector is None:
        return None
    if projector not in PROJECTORS:
        raise ValueError(
            f"{where}: projector_type: must be one of {', '.join(PROJECTORS)}, got {projector!r}"
        )
    fields = dict(given)
    fields.setdefault("gru_hidden_dim", fields.get("emb_dim"))
    return validate(DominoConfig, fields, where)


def check_target(
    source: str, config: DFlashConfig, *, hidden_size: int, vocab_size: int, layers: int
) -> None:
    """Refuse a target that this drafter was not made for. Raises ValueError."""
    other = "this drafter belongs to another target"
    if config.hidden_size != hidden_size:
        raise ValueError(
            f"{source}: hidden_size is {config.hidden_size}, the target's is {hidden_size}; {other}"
        )
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"{source}: vocab_size is {config.vocab_size}, the target's is {vocab_size}; {other}"
        )
    if config.num_target_layers not in (None, layers):
        raise ValueError(
            f"{source}: num_target_layers is {config.num_target_layers}, the target has {layers}; "
            f"{other}"
        )
    taps = config.taps(layers)
    # The target hands a layer's output over when it enters the next one.
    if not 0 <= taps[0] <= taps[-1] < layers - 1 or len(set(taps)) < len(taps):
        raise ValueError(
            f"{source}: taps the outputs of layers {', '.join(map(str, taps))} (from 0), which "
            f"must lie below the last of the target's {layers}; {other}"
        )
    if config.mask_token_id is not None and config.mask_token_id >= vocab_size:
        raise ValueError(
            f"{source}: mask_token_id {config.mask_token_id} is outside the target's vocabulary of "
            f"{vocab_size}; {other}"
        )
