"""What SGLang carries from one of our rounds to the next, beside RoundState."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass
class RoundCarry(SpecInput):
    """The roots of the running requests, in batch order.

    With overlap the scheduler keeps the tokens in a table of its own and sets `future_indices`;
    then only those are cut and joined here. Without overlap `bonus_tokens` [bs] itself is.
    """

    bonus_tokens: torch.Tensor | None
    future_indices: torch.Tensor | None = None
    # Read by the scheduler's relay; None keeps it from relaying anything but the roots.
    topk_p: None = None
    topk_index: None = None
    hidden_states: None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep these requests."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            assert self.bonus_tokens is not None
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: RoundCarry) -> None:
        """Append the requests of `other`."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            assert self.bonus_tokens is not None
            assert other.bonus_tokens is not None
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
