"""What the layers of every drafter are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Maps token ids [...] to the target's embeddings [..., H], in any dtype.
Embed = Callable[[torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, cast back, then the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            # One launch where the lines below take seven; the weight comes before the cast.
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rope(
    position: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation of integer positions [...], for `rotate`, from float32 angles.

    Cosines and sines [..., 1, head_dim], those of the low half negative.
    """
    half = head_dim // 2
    exponent = torch.arange(half, device=position.device, dtype=torch.float32) / half
    angle = position[..., None, None].float() * theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(x: torch.Tensor, angle: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary embedding, half-split layout, to x [..., heads, head_dim]."""
    cos, sin = angle
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class MLP(nn.Module):
    """Gated by SiLU, no biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
