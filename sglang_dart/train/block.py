"""Train a DFlash or Domino drafter for a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from transformers import AutoTokenizer

from sglang_dart.draft.dflash_config import (
    NESTED,
    default_taps,
    parse_dflash_config,
    read_dflash_config,
)
from sglang_dart.train.block_method import BlockMethod
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.card import Card
from sglang_dart.train.corpus import Corpus
from sglang_dart.train.export import dflash_config
from sglang_dart.train.initial import (
    given_block_model,
    given_config,
    initial_block_model,
    mask_token,
)
from sglang_dart.train.run import OnStep, Ready, Settings, Trained, train

Labels = Literal["text", "target"]


@dataclass(frozen=True)
class BlockSettings(Settings):
    """What to train. taps: target layers, None: as many as `layers`, spread evenly.

    labels: "text", the tokens that follow, or "target", the target's distributions there.
    """

    layers: int = 5
    taps: tuple[int, ...] | None = None
    block_size: int = 16
    intermediate_size: int | None = None
    mask_token_id: int | None = None
    anchors: int = 512
    decay: float = 7.0
    labels: Labels = "text"
    borrow: bool = True
    chunk: int = 2048

    @classmethod
    def fixed_by(cls, start: str) -> dict[str, Any]:
        """The drafter's layers and block, and what it reads."""
        config = read_dflash_config(start)
        if (config.domino is not None) != issubclass(cls, DominoSettings):
            kind = "dflash" if config.domino is None else "domino"
            raise ValueError(f"{start}: a {kind} drafter; continue it with `train {kind}`")
        taps = config.target_layer_ids
        fixed = {
            "layers": config.num_hidden_layers,
            "taps": None if taps is None else tuple(taps),
            "block_size": config.block_size,
            "intermediate_size": config.intermediate_size,
        }
        # Early checkpoints name the mask by its text only.
        if config.mask_token_id is not None:
            fixed["mask_token_id"] = config.mask_token_id
        return fixed


@dataclass(frozen=True)
class DominoSettings(BlockSettings):
    """base_until: share of the run over which the base logits' part of the loss falls to 0."""

    anchors: int = 256
    shift_label: bool = True
    emb_dim: int = 256
    gru_hidden_dim: int = 1024
    base_until: float = 0.5

    @classmethod
    def fixed_by(cls, start: str) -> dict[str, Any]:
        """The causal head's sizes as well."""
        fixed, domino = super().fixed_by(start), read_dflash_config(start).domino
        assert domino is not None
        names = ("shift_label", "emb_dim", "gru_hidden_dim")
        return fixed | {name: getattr(domino, name) for name in names}


def train_block(
    folder: Path,
    settings: BlockSettings,
    *,
    device: str,
    command: str,
    on_step: OnStep = lambda *_: None,
) -> Trained:
    """Run or resume the training of a Domino drafter, or of a plain DFlash one, as `train`."""
    recipe = BlockRecipe(settings)
    return train(folder, settings, recipe, device=device, command=command, on_step=on_step)


@dataclass(frozen=True)
class BlockRecipe:
    """Prepares a block drafter, with a causal head for `DominoSettings`: see `Recipe`."""

    settings: BlockSettings

    def __post_init__(self) -> None:
        if self.settings.labels not in get_args(Labels):
            raise ValueError(f"--labels {self.settings.labels}: must be text or target")
        self.settings.check_start()

    def taps(self, layers: int) -> Sequence[int]:
        """Those of the settings, or as many as the drafter has layers. Raises ValueError."""
        taps = self.settings.taps or default_taps(self.settings.layers, layers)
        # A server hands a layer's output over when it enters the next one.
        if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < layers - 1:
            raise ValueError(
                f"--taps {','.join(map(str, taps))}: must be ascending layers of the target, "
                f"0 .. {layers - 2}"
            )
        return taps

    def prepare(self, target: FrozenTarget, train: Corpus) -> Ready:
        """The drafter, its mask token chosen. Raises ValueError."""
        settings = self.settings
        mask = self._mask_token(target, train)
        if settings.start is None:
            raw = self._config(target, mask)
            config = parse_dflash_config(raw, "the drafter's settings")
            model = initial_block_model(
                config, target, borrow=settings.borrow, seed=settings.loop.seed
            )
        else:
            model = given_block_model(settings.start, target)
            raw = given_config(model.config.raw)
            raw[NESTED] = raw.get(NESTED, {}) | {"mask_token_id": mask}
        method = BlockMethod(
            model.to(target.lm_head.device),
            target.model.get_input_embeddings().weight,
            target.lm_head,
            mask_token_id=mask,
            anchors=settings.anchors,
            decay=settings.decay,
            base_until=getattr(settings, "base_until", 0.0),
            taught=settings.labels == "target",
            chunk=settings.chunk,
        )
        return Ready(method, raw, model.state_dict, _card(settings, method.levels, mask))

    def _mask_token(self, target: FrozenTarget, train: Corpus) -> int:
        settings, vocab_size = self.settings, target.config.vocab_size
        mask = settings.mask_token_id
        if mask is None and settings.start is not None:
            raise ValueError(
                f"{settings.start}: its config.json has no mask_token_id; name one with "
                "--mask-token-id"
            )
        if mask is None:
            return _unused_token(settings.model, train, vocab_size)
        if mask >= vocab_size:
            raise ValueError(f"--mask-token-id {mask}: the target has {vocab_size} tokens")
        return mask

    def _config(self, target: FrozenTarget, mask: int) -> dict[str, Any]:
        settings = self.settings
        return dflash_config(
            target.config.to_dict(),
            layers=settings.layers,
            taps=self.taps(target.config.num_hidden_layers),
            block_size=settings.block_size,
            mask_token_id=mask,
            intermediate_size=settings.intermediate_size,
            domino=_domino_fields(settings),
        )


def _domino_fields(settings: BlockSettings) -> Mapping[str, Any] | None:
    if not isinstance(settings, DominoSettings):
        return None
    return {
        "pure_draft_prefix_len": 1,
        "emb_dim": settings.emb_dim,
        "gru_hidden_dim": settings.gru_hidden_dim,
        "shift_label": settings.shift_label,
    }


def _unused_token(model: str, train: Corpus, vocab_size: int) -> int:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    count = np.bincount(train.ids, minlength=vocab_size)
    spare = set(tokenizer.added_tokens_decoder) - set(tokenizer.all_special_ids)
    return mask_token(count, len(tokenizer), [token for token in spare if token < vocab_size])


def _card(settings: BlockSettings, levels: int, mask: int) -> Card:
    domino = isinstance(settings, DominoSettings)
    wanted = "the text's next one" if settings.labels == "text" else "the target's"
    return Card(
        kind="Domino drafter" if domino else "DFlash drafter",
        algorithm="DARTREE",
        tags=("dflash", "domino") if domino else ("dflash",),
        drafts=levels,
        hits=f"whose best draft token is {wanted}",
        data=f"At most {settings.anchors} blocks of {settings.block_size} were drawn a text and "
        f"epoch; token {mask} stands for masks.",
    )
