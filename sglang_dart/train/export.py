"""Drafter checkpoints in the published layout: config.json and model.safetensors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from sglang_dart.draft.checkpoint import CONFIG, SINGLE, DartConfig
from sglang_dart.draft.dart import DartHead
from sglang_dart.draft.dflash_config import default_taps, parse_dflash_config
from sglang_dart.draft.domino import DominoModel


def dart_config(target: Mapping[str, Any], **sizes: int) -> dict[str, Any]:
    """The config.json of a DART head for a target with this config.json.

    Layer sizes follow the target unless `sizes` says otherwise (`draft_length`,
    `draft_vocab_size`, `intermediate_size`).
    """
    rope = target.get("rope_parameters") or target
    heads = target["num_attention_heads"]
    config = {
        "architectures": ["LlamaForCausalLMDart"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "target_hidden_size": target["hidden_size"],
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads", heads),
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "draft_length": 7,
        "tie_word_embeddings": False,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
    }
    return config | sizes


def dflash_config(
    target: Mapping[str, Any],
    *,
    layers: int,
    taps: Sequence[int],
    block_size: int,
    mask_token_id: int,
    intermediate_size: int | None = None,
    domino: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of a block drafter for a target with this config.json.

    Layers are Qwen3's, in the target's sizes. `domino`: the fields of a Domino head.
    """
    rope = target.get("rope_parameters") or target
    heads = target["num_attention_heads"]
    own = {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": intermediate_size or target["intermediate_size"],
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads", heads),
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "dtype": "bfloat16",
    }
    if domino is not None:
        own |= {"projector_type": "domino", **domino}
        # Published checkpoints have it in both places.
        config["emb_dim"] = domino["emb_dim"]
    return config | {"dflash_config": own}


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a checkpoint folder, replacing its two files; readers never see a half-written file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        weights, settings = Path(scratch) / SINGLE, Path(scratch) / CONFIG
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
            weights,
            metadata={"format": "pt"},
        )
        settings.write_text(json.dumps(config, indent=2) + "\n")
        # The config last: a folder with a config is complete.
        os.replace(weights, folder / SINGLE)
        os.replace(settings, folder / CONFIG)


def write_untrained_dart_head(target: Path, folder: Path, seed: int = 0) -> None:
    """Write a DART head of random weights that fits the target folder; it predicts nothing.

    It exists so that the whole path can run where no trained head is at hand.
    """
    config = dart_config(json.loads((target / CONFIG).read_text()))
    known = DartConfig.__dataclass_fields__.keys() & config.keys()
    head = DartConfig(**{name: config[name] for name in known})
    _write_untrained(folder, config, lambda: DartHead(head), seed)


def write_untrained_domino_drafter(target: Path, folder: Path, seed: int = 0) -> None:
    """Write a small Domino drafter of random weights, for the same end."""
    given = json.loads((target / CONFIG).read_text())
    layers = 2
    config = dflash_config(
        given,
        layers=layers,
        taps=default_taps(layers, given["num_hidden_layers"]),
        block_size=8,
        # Any token will do where nothing is learned.
        mask_token_id=given["vocab_size"] - 1,
        domino={
            "shift_label": True,
            "emb_dim": 64,
            "gru_hidden_dim": 128,
            "pure_draft_prefix_len": 1,
        },
    )
    parsed = parse_dflash_config(config, str(folder))
    _write_untrained(folder, config, lambda: DominoModel(parsed), seed)


def _write_untrained(
    folder: Path, config: Mapping[str, Any], make: Callable[[], nn.Module], seed: int
) -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = make()
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    write_checkpoint(folder, {**config, "trained": False}, tensors)
