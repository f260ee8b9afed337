"""Target taps and teacher logits for a text: one forward of a frozen Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Models whose logits are lm_head(norm(stream)), nothing scaled or capped, attention causal.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Capture:
    """What one forward of the target leaves for its drafter.

    feature [B, T, taps * H]: residual stream after each tapped layer, taps in ascending order.
    hidden  [B, T, H]: normed output of the last layer, the target's `lm_head` input.
    """

    feature: torch.Tensor
    hidden: torch.Tensor


class FrozenTarget:
    """A causal language model that is only read."""

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        """Hook `taps`, 0-based layers. Raises ValueError for a family that is not known to fit."""
        if model.config.model_type not in MODEL_TYPES:
            raise ValueError(
                f"target of type {model.config.model_type!r}: the trainer knows "
                f"{', '.join(MODEL_TYPES)}"
            )
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self._decoder = model.get_decoder()
        self._tapped: list[torch.Tensor] = []
        for tap in sorted(taps):
            self._decoder.layers[tap].register_forward_hook(self._keep)

    @classmethod
    def load(
        cls,
        source: str | Path,
        taps: Callable[[int], Sequence[int]],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FrozenTarget:
        """Load a folder or hub id; `taps` gives the tapped layers for a layer count."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype)
        return cls(model.to(device), taps(model.config.num_hidden_layers))

    @property
    def lm_head(self) -> torch.Tensor:
        """The output matrix [V, H]."""
        return self.model.get_output_embeddings().weight

    @property
    def decoder(self) -> Any:
        """The layers and the final norm, without the output matrix."""
        return self._decoder

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., H] of ids [...]."""
        return self.model.get_input_embeddings()(ids)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output matrix on normed rows [..., H]: logits [..., V]."""
        return torch.nn.functional.linear(hidden, self.lm_head)

    @torch.no_grad()
    def capture(self, ids: torch.Tensor) -> Capture:
        """Run texts ids [B, T], padded at their ends.

        Attention is causal, so padding at the end changes no row before it and needs no mask.
        """
        self._tapped.clear()
        hidden = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        feature = torch.cat(self._tapped, dim=-1)
        self._tapped.clear()
        return Capture(feature, hidden)

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._tapped.append(output[0] if isinstance(output, tuple) else output)
