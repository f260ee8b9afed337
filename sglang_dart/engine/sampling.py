"""The target's tokens on a tree, chosen by SGLang's own sampler.

Plain decoding and speculation then draw from one law: the same filters in the same order, the same
noise for a seed and a position, the same penalties, biases and processors along every path.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor, create_sampler
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

from sglang_dart.engine.penalties import OutputHistory
from sglang_dart.types import Accepted, PackedTree
from sglang_dart.verify.accept import accept_tokens, accept_visited

Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TreeSampler:
    """Stands in for `eagle_sample` as `run_eagle_verify` calls it. One a worker.

    Upstream's kernels stay where they are exact. They are not: on a CPU, where every request is
    greedy; with penalties and custom processors, which they apply as at the root or not at all;
    with min_p, which they drop; with top-k and top-p in one batch, where top-p counts what top-k
    left and in plain decoding does not; with seeds, whose noise is not that of plain decoding.
    """

    def __init__(self) -> None:
        self._history = OutputHistory()

    def sample(
        self,
        upstream: Callable[..., Verdict],
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        **options: Any,
    ) -> Verdict:
        """Accept along the target's tokens.

        Reads `verify_input.tree` (PackedTree); without one, upstream is called. Changes
        `logits_output.next_token_logits` [bs * N, V] at the visited nodes as plain decoding changes
        its own, for the log-probabilities that are computed afterwards.
        Returns predict [bs * N] int32, right at visited nodes; accept_lens [bs] int32 with the
        bonus; accept_index [bs, D + 1] int32, flat, -1 after the end.
        """
        tree = getattr(verify_input, "tree", None)
        logits = logits_output.next_token_logits
        simulated = SIMULATE_ACC_LEN > 0
        if tree is None or simulated or _upstream_is_exact(batch.sampling_info, logits):
            return upstream(verify_input, batch, logits_output, grammar_mask, **options)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        levels = verify_input.max_tree_depth - 1
        accepted = self._accept(tree, batch, logits, levels)
        return _as_upstream(accepted, tree)

    def _accept(self, tree: PackedTree, batch: Any, logits: torch.Tensor, levels: int) -> Accepted:
        info = batch.sampling_info
        bs, width = tree.token.shape
        tokens = _TargetTokens(tree, batch, logits.view(bs, width, -1), self._history)
        if not logits.is_cuda or info.has_custom_logit_processor:
            # Processors get every context once, in order, as in plain decoding.
            accepted = accept_visited(tree, levels, tokens)
        else:
            node = torch.arange(bs * width, device=logits.device)
            token = tokens(node // width, node % width)
            accepted = accept_tokens(tree, token.view(bs, width).long(), levels)
        if tokens.keeps_history:
            self._history.remember(batch, accepted)
        return accepted


class _TargetTokens:
    """(request [R], node [R]) -> token [R]: what plain decoding would put out after these nodes."""

    def __init__(
        self, tree: PackedTree, batch: Any, logits: torch.Tensor, history: OutputHistory
    ) -> None:
        self._tree = tree
        self._reqs = batch.reqs
        self._logits = logits
        self._info = info = batch.sampling_info
        # SGLang sets its own, inexact penalties whenever a request has any.
        penalised = info.acc_additive_penalties is not None
        self._penalties = history.penalties(batch, tree, logits.shape[-1]) if penalised else None
        self._unseen: list[list[int]] | None = None
        if info.has_custom_logit_processor:
            token, unseen = history.unseen(batch, tree.token[:, 0])
            self._unseen = [row[new].tolist() for row, new in zip(token, unseen, strict=True)]
        self.keeps_history = penalised or info.has_custom_logit_processor

    def __call__(self, request: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        rows = self._logits[request, node]
        info = _select(self._info, request)
        changed = False
        if self._penalties is not None:
            self._penalties.apply(rows, request, node)
            changed = True
        if self._info.logit_bias is not None:
            rows += self._info.logit_bias[request]
            changed = True
        if info.has_custom_logit_processor:
            info.custom_params = self._params_at(info.custom_params, request, node)
            apply_custom_logit_processor(rows, info)
            info.has_custom_logit_processor = False
            changed = True
        if changed:
            self._logits[request, node] = rows
        # The sampler works in place, on this copy.
        output = LogitsProcessorOutput(next_token_logits=rows)
        return _sampler()(output, info, False, [], [], self._tree.position[request, node])

    def _params_at(
        self, params: list[dict[str, Any] | None], request: torch.Tensor, node: torch.Tensor
    ) -> list[dict[str, Any] | None]:
        """Parameters whose request shows the outputs that it would have at its node."""
        assert self._unseen is not None
        placed = []
        for given, row, at in zip(params, request.tolist(), node.tolist(), strict=True):
            if given is not None and "__req__" in given:
                path = self._tree.mask[row, at].nonzero().flatten()[1:]
                more = self._unseen[row] + self._tree.token[row, path].tolist()
                given = given | {"__req__": _RequestAt(self._reqs[row], more)}
            placed.append(given)
        return placed


class _RequestAt:
    """A request as it will be once these tokens are put out."""

    def __init__(self, req: Any, more: list[int]) -> None:
        self._req = req
        self.output_ids = req.output_ids + array("q", more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class _NoPenalties:
    """Takes the orchestrator's place in a selection: penalties are applied already."""

    def filter(self, keep_indices: torch.Tensor) -> None:
        """Nothing to keep."""


@functools.cache
def _sampler() -> torch.nn.Module:
    return create_sampler()


def _select(info: Any, request: torch.Tensor) -> Any:
    """The sampling settings of these requests, one a row; `info` stays as it is."""
    chosen = dataclasses.replace(
        info,
        penalizer_orchestrator=_NoPenalties(),
        # Applied already, or of no meaning for a row.
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        grammars=None,
        grammar_mask=None,
    )
    # The host's list is read for processors only, which do not come with a GPU's bulk selection.
    host = request.tolist() if info.has_custom_logit_processor else []
    chosen.filter_batch(host, request)
    return chosen


def _upstream_is_exact(info: Any, logits: torch.Tensor) -> bool:
    if not logits.is_cuda or info.has_custom_logit_processor:
        return False
    if info.acc_additive_penalties is not None:
        return False
    if info.is_all_greedy:
        return True
    both = info.need_top_k_sampling and info.need_top_p_sampling
    return not (both or info.need_min_p_sampling or info.sampling_seed is not None)


def _as_upstream(accepted: Accepted, tree: PackedTree) -> Verdict:
    """The tuple that `eagle_sample` returns."""
    bs, width = tree.token.shape
    node, after_end = accepted.node.long(), accepted.node < 0
    predict = torch.zeros(bs, width, dtype=torch.int32, device=node.device)
    # What lies after the end writes the root's own token once more.
    token = torch.where(after_end, accepted.token[:, :1], accepted.token)
    predict.scatter_(1, node.clamp(min=0), token.int())
    first = torch.arange(bs, device=node.device).unsqueeze(1) * width
    accept_index = torch.where(after_end, -1, node + first).int()
    return predict.flatten(), accepted.length, accept_index
