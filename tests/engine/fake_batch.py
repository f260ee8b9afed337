"""Batches as the tree sampler sees them, trees for them, and SGLang's own penalties."""

from __future__ import annotations

import copy
import dataclasses
import random
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_dart.tree.pack import pack
from sglang_dart.types import Accepted, PackedTree, Tree

VOCABULARY, WIDTH, LEVELS, EOS = 11, 9, 4, 10

PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"min_new_tokens": 5, "stop_token_ids": {1, 4}},
    {
        "frequency_penalty": 0.8,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.7,
        "min_new_tokens": 6,
    },
    {},
]


def request(prompt: list[int], output: list[int], **params: Any) -> SimpleNamespace:
    defaults = {
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
        "custom_params": None,
    }
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q", output),
        sampling_params=SimpleNamespace(**defaults | params),
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS),
    )


class Batch:
    """What the sampler reads of a ScheduleBatch; `lag` output tokens are unknown to the host."""

    device = "cpu"

    def __init__(self, reqs: list[Any], lag: int = 0, rows: int = 8) -> None:
        self.reqs = reqs
        outputs = [[*req.output_ids] for req in reqs]
        self.root = torch.tensor([output[-1] for output in outputs])
        prompts = torch.tensor([len(req.origin_input_ids) for req in reqs])
        self.seq_lens = prompts + torch.tensor([len(output) for output in outputs]) - 1
        self.req_pool_indices = torch.arange(len(reqs)) + 2
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.empty(rows, 1))
        for req, output in zip(reqs, outputs, strict=True):
            req.output_ids = array("q", output[: len(output) - min(lag, len(output))])
        self.sampling_info = settings(self)

    def to(self, device: str) -> Batch:
        """The same batch with its tensors on that device."""
        moved = copy.copy(self)
        for name in ("root", "seq_lens", "req_pool_indices"):
            setattr(moved, name, getattr(self, name).to(device))
        moved.sampling_info = dataclasses.replace(
            self.sampling_info,
            **{
                field: value.to(device)
                for field, value in vars(self.sampling_info).items()
                if isinstance(value, torch.Tensor)
            },
        )
        return moved


def settings(batch: Batch) -> SamplingBatchInfo:
    params = [req.sampling_params for req in batch.reqs]
    penalised = any(
        one.frequency_penalty or one.presence_penalty or one.min_new_tokens for one in params
    ) or any(one.repetition_penalty != 1 for one in params)
    return SamplingBatchInfo(
        temperatures=torch.tensor([[one.temperature] for one in params]),
        top_ps=torch.tensor([one.top_p for one in params]),
        top_ks=torch.tensor([one.top_k for one in params]),
        min_ps=torch.tensor([one.min_p for one in params]),
        is_all_greedy=all(one.top_k <= 1 for one in params),
        is_any_greedy=any(one.top_k <= 1 for one in params),
        need_top_p_sampling=any(one.top_p != 1 for one in params),
        need_top_k_sampling=any(one.top_k != TOP_K_ALL for one in params),
        need_min_p_sampling=any(one.min_p > 0 for one in params),
        vocab_size=VOCABULARY,
        device="cpu",
        acc_additive_penalties=torch.zeros(len(params), VOCABULARY) if penalised else None,
    )


def random_tree(rng: random.Random, batch: Batch) -> PackedTree:
    bs = len(batch.reqs)
    token = torch.zeros(bs, WIDTH, dtype=torch.int64)
    parent = torch.full((bs, WIDTH), -1, dtype=torch.int32)
    depth = torch.zeros(bs, WIDTH, dtype=torch.int32)
    for i in range(bs):
        token[i, 0], used, node = batch.root[i], set(), 1
        while node < WIDTH - 1:
            above, drafted = rng.randrange(node), rng.randrange(VOCABULARY)
            if (above, drafted) in used or depth[i, above] == LEVELS:
                continue
            used.add((above, drafted))
            token[i, node], parent[i, node], depth[i, node] = drafted, above, depth[i, above] + 1
            node += 1
    score = torch.zeros(bs, WIDTH)
    return pack(Tree(token, parent, depth, score), batch.seq_lens)


def path_tokens(tree: PackedTree, row: int, node: int) -> list[int]:
    """Drafted tokens from below the root down to the node."""
    path = tree.mask[row, node].nonzero().flatten()
    return tree.token[row, path].tolist()[1:]


class _Owner:
    """What the penalizers keep a weak reference to."""

    device = "cpu"

    def __init__(self, req: Any) -> None:
        self.reqs = [req]


def upstream_penalties(req: Any, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Feed SGLang's penalizers one token after the other, as plain decoding does."""
    owner = _Owner(req)
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCABULARY,
        batch=owner,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    for token in tokens:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits = logits.clone().unsqueeze(0)
    orchestrator.apply(logits, repeat=1)
    return logits[0]


def run_of(tokens: list[list[int]]) -> Accepted:
    length = torch.tensor([len(run) for run in tokens], dtype=torch.int32)
    padded = torch.tensor([run + [0] * (LEVELS + 1 - len(run)) for run in tokens])
    return Accepted(node=torch.zeros_like(padded).int(), token=padded, length=length)
