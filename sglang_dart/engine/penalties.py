"""Penalties on a tree, exactly as plain decoding would apply them along each path.

SGLang 0.5.23 counts only the last token of every accepted run, and gives all nodes of a tree the
penalties of its root. Here the counts come from the requests' outputs, from what the device has
committed and the host has not seen yet (overlap), and from the drafted tokens above each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_dart.types import Accepted, PackedTree


@dataclass(frozen=True)
class Penalties:
    """The penalties of one verify step.

    count [bs, V] float32: how often each request has put out each token, the root included.
    outputs [bs] int64: tokens put out, the root included; min_new [bs] int64: how many must be.
    stop [bs, E] int64, stop_bias [bs, E] float32: tokens that end the answer (-inf), filled (0).
    frequency, presence, repetition [bs, 1] float32.
    """

    tree: PackedTree
    count: torch.Tensor
    outputs: torch.Tensor
    min_new: torch.Tensor
    stop: torch.Tensor
    stop_bias: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    def apply(self, logits: torch.Tensor, request: torch.Tensor, node: torch.Tensor) -> None:
        """Penalise, in place, the logits [R, V] that follow these nodes [R]."""
        drafted = self.tree.mask[request, node]
        # The root is counted already.
        drafted[:, 0] = False
        count = self.count[request]
        count.scatter_add_(1, self.tree.token[request], drafted.to(count.dtype))
        seen = count > 0

        logits.sub_(count.mul_(self.frequency[request]))
        logits.sub_(torch.where(seen, self.presence[request], 0.0))
        early = self.outputs[request] + drafted.sum(1) < self.min_new[request]
        stop_bias = torch.where(early.unsqueeze(1), self.stop_bias[request], 0.0)
        logits.scatter_add_(1, self.stop[request], stop_bias.to(logits.dtype))
        scale = torch.where(seen, self.repetition[request], 1.0)
        logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))


class OutputHistory:
    """What the running requests have put out, on the device, without waiting for the host.

    With overlap the host learns of a run only after the next step was launched; until then the
    device remembers it. Only kept while a request has penalties.
    """

    def __init__(self) -> None:
        self._recent: torch.Tensor | None = None

    def penalties(self, batch: Any, tree: PackedTree, vocabulary: int) -> Penalties:
        """Count what each request of the batch has put out, and collect its settings."""
        device = tree.token.device
        params = [req.sampling_params for req in batch.reqs]

        def column(field: str, dtype: torch.dtype) -> torch.Tensor:
            values = [getattr(one, field) for one in params]
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        count, outputs = self._count(batch, tree, vocabulary)
        stop, stop_bias = (part.to(device, non_blocking=True) for part in _stop_tokens(batch.reqs))
        return Penalties(
            tree=tree,
            count=count,
            outputs=outputs,
            min_new=column("min_new_tokens", torch.int64),
            stop=stop,
            stop_bias=stop_bias,
            frequency=column("frequency_penalty", torch.float32).unsqueeze(1),
            presence=column("presence_penalty", torch.float32).unsqueeze(1),
            repetition=column("repetition_penalty", torch.float32).unsqueeze(1),
        )

    def unseen(self, batch: Any, root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Newest tokens of each request, and which of them the host does not know yet.

        root [bs] -> token [bs, C] int64, oldest first, unseen [bs, C] bool.
        """
        known = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
        known_length = torch.tensor(known).to(root.device, non_blocking=True)
        # The target has read `seq_lens` tokens; the root comes on top.
        missing = batch.seq_lens + 1 - known_length
        if self._recent is None:
            token = root.unsqueeze(1)
        else:
            token = self._recent[batch.req_pool_indices]
            # After a prefill the root is no run's last token, but the newest all the same.
            token[:, -1] = root
        age = torch.arange(token.shape[1], 0, -1, device=root.device)
        return token, age <= missing.unsqueeze(1)

    def remember(self, batch: Any, accepted: Accepted) -> None:
        """Keep the run that this step commits, right-aligned, under the request's row."""
        columns = accepted.token.shape[1]
        if self._recent is None or self._recent.shape[1] != columns:
            rows = batch.req_to_token_pool.req_to_token.shape[0]
            self._recent = accepted.token.new_zeros((rows, columns))
        index = torch.arange(columns, device=accepted.token.device)
        shift = accepted.length.long().unsqueeze(1) - columns
        run = accepted.token.gather(1, (index + shift).clamp(min=0))
        self._recent[batch.req_pool_indices] = run

    def _count(
        self, batch: Any, tree: PackedTree, vocabulary: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        root = tree.token[:, 0]
        lengths = [len(req.output_ids) for req in batch.reqs]
        # output_ids are 64-bit arrays: no element passes through Python.
        flat = np.concatenate([np.asarray(req.output_ids, np.int64) for req in batch.reqs])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        output, row = (_to_device(part, root.device) for part in (flat, rows))
        count = torch.zeros(len(lengths), vocabulary, device=root.device)
        count.view(-1).scatter_add_(
            0, row * vocabulary + output, torch.ones_like(output, dtype=count.dtype)
        )
        token, unseen = self.unseen(batch, root)
        count.scatter_add_(1, token, unseen.to(count.dtype))
        host = torch.tensor(lengths).to(root.device, non_blocking=True)
        return count, host + unseen.sum(1)


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        # From pageable memory the copy would wait for the stream.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _stop_tokens(reqs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that min_new_tokens forbids at first: those that end the answer by themselves."""
    ends = []
    for req in reqs:
        own = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
        if req.tokenizer is not None:
            own |= set(req.tokenizer.additional_stop_token_ids or ())
            own |= {req.tokenizer.eos_token_id} - {None}
        ends.append(sorted(own))
    width = max(map(len, ends))
    stop = torch.zeros(len(reqs), width, dtype=torch.int64)
    bias = torch.zeros(len(reqs), width)
    for i, tokens in enumerate(ends):
        stop[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        bias[i, : len(tokens)] = float("-inf")
    return stop, bias
