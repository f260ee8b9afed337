"""Targets and drafters of published shapes with random weights, to time rounds without training.

A target is a config.json alone, which SGLang fills with `--load-format dummy`; so is an EAGLE3
drafter. Drafters that we load ourselves get a file of random weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dart.measure.arms import Arm
from sglang_dart.measure.report import PLAIN

SIMULATE = "SGLANG_SIMULATE_ACC_LEN"

# Qwen3's config.json: what differs between the sizes, and what does not.
_QWEN3 = {
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
}
_QWEN3_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
# Tokens that a DART or EAGLE3 head can draft: what EAGLE3 heads for Qwen3 are trained with. That
# of the published DART heads is not known to us.
_DRAFT_VOCABULARY = 32000
# A row of Qwen3's embedding that stands for no token.
_QWEN3_MASK = 151669
_BLOCK_LAYERS = 5
_BLOCK_SIZE = 16
_DOMINO = {
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": True,
}

# Accept lengths as published, means over the sets of a table, temperature 0.
_PUBLISHED: Mapping[tuple[str, str], Mapping[str, float]] = {
    # arXiv 2601.19278, table 1, which has EAGLE3 beside it.
    ("DART", "dart"): {
        "Qwen3-1.7B": 3.60,
        "Qwen3-4B": 3.87,
        "Qwen3-8B": 3.61,
        "Qwen3-14B": 3.67,
        "Qwen3-32B": 3.76,
    },
    ("EAGLE3", "eagle3"): {
        "Qwen3-1.7B": 3.80,
        "Qwen3-4B": 3.54,
        "Qwen3-8B": 3.72,
        "Qwen3-14B": 3.48,
        "Qwen3-32B": 3.85,
    },
    # arXiv 2608.13524, table 1: pruned trees of 64 nodes, and chains of the same drafters.
    ("DARTREE", "domino"): {"Qwen3-4B": 9.81, "Qwen3-8B": 9.91},
    ("DFLASH", "domino"): {"Qwen3-4B": 7.11, "Qwen3-8B": 7.17},
    ("DFLASH", "dflash"): {"Qwen3-4B": 5.97, "Qwen3-8B": 5.95},
}
# Where nothing is published: a round costs about the same, but nothing is projected.
UNPUBLISHED_ACCEPT_LENGTH = 2.0

_DRAFTER_OF = {"DART": "dart", "DARTREE": "domino", "EAGLE3": "eagle3", "DFLASH": "domino"}


@dataclass(frozen=True)
class Shape:
    """A target's name and its config.json."""

    name: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, text: str) -> Shape:
        """One of the published names, or the path of a config.json. Raises ValueError."""
        if text in _QWEN3:
            hidden, inner, layers, heads, tied = _QWEN3[text]
            own = {
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "tie_word_embeddings": tied,
                "max_window_layers": layers,
            }
            return cls(text, _QWEN3_COMMON | own)
        try:
            config = json.loads(Path(text).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"--shapes {text}: neither one of {', '.join(_QWEN3)} nor a readable config.json "
                f"({error})"
            ) from error
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        return cls(f"{Path(text).stem}-{digest}", config)

    def write_target(self, folder: Path) -> Path:
        """Write config.json to `folder`/target."""
        target = folder / "target"
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(dict(self.config), indent=2) + "\n")
        return target

    def write_drafter(self, kind: str, folder: Path) -> Path:
        """Write a drafter to `folder`/`kind`, unless it stands there.

        Raises ValueError for a kind that is not known.
        """
        if kind not in _WRITERS:
            raise ValueError(f"drafter {kind}: with --shapes, one of {', '.join(_WRITERS)}")
        drafter = folder / kind
        if not (drafter / "config.json").is_file():
            _WRITERS[kind](self.config, drafter)
        return drafter


def published_length(shape: str, arm: Arm) -> float | None:
    """Accept length published for this target and the arm's drafter; None if nothing is."""
    return _PUBLISHED.get((arm.algorithm, _kind(arm)), {}).get(shape)


def simulated(arm: Arm, shape: Shape, folder: Path, accept_length: float | None) -> Arm:
    """The arm with a drafter of this shape and a fixed accept length.

    The length: what the arm's own environment says, else `accept_length`, else as published.
    """
    if arm.algorithm in ("", PLAIN):
        return arm
    length = accept_length or published_length(shape.name, arm) or UNPUBLISHED_ACCEPT_LENGTH
    kind = _kind(arm)
    drafter = str(shape.write_drafter(kind, folder)) if kind else ""
    env = {SIMULATE: f"{length:g}", **arm.env}
    return Arm(arm.name, arm.algorithm, drafter, arm.own, env)


def _kind(arm: Arm) -> str:
    """Kind of the arm's drafter: the last part of its path or name; "" for none."""
    return Path(arm.drafter).name or _DRAFTER_OF.get(arm.algorithm, "")


def _write_dart(target: Mapping[str, Any], folder: Path) -> None:
    from sglang_dart.draft.checkpoint import DartConfig
    from sglang_dart.draft.dart import DartHead
    from sglang_dart.train.export import dart_config

    vocabulary = min(_DRAFT_VOCABULARY, target["vocab_size"])
    config = dart_config(target, draft_vocab_size=vocabulary)
    known = DartConfig.__dataclass_fields__.keys() & config.keys()
    _write_random(
        folder, config, lambda: DartHead(DartConfig(**{name: config[name] for name in known}))
    )


def _write_block(target: Mapping[str, Any], folder: Path, *, domino: bool) -> None:
    from sglang_dart.draft.dflash import DFlashModel
    from sglang_dart.draft.dflash_config import default_taps, parse_dflash_config
    from sglang_dart.draft.domino import DominoModel
    from sglang_dart.train.export import dflash_config

    config = dflash_config(
        target,
        layers=_BLOCK_LAYERS,
        taps=default_taps(_BLOCK_LAYERS, target["num_hidden_layers"]),
        block_size=_BLOCK_SIZE,
        mask_token_id=min(_QWEN3_MASK, target["vocab_size"] - 1),
        domino=_DOMINO if domino else None,
    )
    sizes = parse_dflash_config(config, str(folder))
    _write_random(folder, config, lambda: (DominoModel if domino else DFlashModel)(sizes))


def _write_random(
    folder: Path, config: Mapping[str, Any], make: Callable[[], Any], seed: int = 0
) -> None:
    """Write the module that `make` initialises at random, in bfloat16."""
    import torch

    from sglang_dart.train.export import write_checkpoint

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        module = make().to(torch.bfloat16)
    write_checkpoint(folder, dict(config) | {"trained": False}, module.state_dict())


def _write_eagle3(target: Mapping[str, Any], folder: Path) -> None:
    """An EAGLE3 head is one layer of Llama with a small vocabulary; SGLang makes its weights."""
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("rope_theta", "bos_token_id", "eos_token_id", "dtype"),
    )
    config = {name: target[name] for name in same if name in target} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": min(_DRAFT_VOCABULARY, target["vocab_size"]),
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


_WRITERS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "dart": _write_dart,
    "domino": lambda target, folder: _write_block(target, folder, domino=True),
    "dflash": lambda target, folder: _write_block(target, folder, domino=False),
    "eagle3": _write_eagle3,
}
