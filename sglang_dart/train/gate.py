"""The parity gate: what training promised is what the reference and the server keep."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_dart.algorithms import Target, load_method
from sglang_dart.draft.dart import dart_taps
from sglang_dart.draft.dflash_config import read_dflash_config
from sglang_dart.measure.client import Request, generate
from sglang_dart.measure.metrics import Acceptance, micro_length
from sglang_dart.measure.server import ServerError, serve
from sglang_dart.options import ENVIRONMENT, DartOptions, DartreeOptions, TreeOptions
from sglang_dart.reference import generate as generate_by_reference
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.corpus import Corpus
from sglang_dart.train.fidelity import logit_difference

# Accept lengths of the reference and the server may differ by so much.
ACCEPT_TOLERANCE = 0.03
# Largest logit difference of training and serving forward, in standard deviations of the logits.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
# What a server without a GPU takes by default.
_CPU_BUDGET = 15


@dataclass(frozen=True)
class Gate:
    """What was compared. None: not measured, and `note` says why."""

    logit_difference: float
    reference: float
    server: float | None
    prompts: int
    new_tokens: int
    budget: int
    note: str
    failures: tuple[str, ...]


def check_parity(
    algorithm: str,
    head: Path,
    model: str,
    held_out: Corpus,
    *,
    device: str,
    prompts: int,
    new_tokens: int,
    with_server: bool,
    server_flags: Sequence[str] = (),
) -> Gate:
    """Decode the first held-out prompts with the exported head, by reference and by server.

    Greedy; both use the same tree options and no n-gram. Accept lengths are over all rounds.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    taps = dart_taps if algorithm == "DART" else read_dflash_config(str(head)).taps
    target = FrozenTarget.load(model, taps, dtype=dtype, device=device)
    method = load_method(algorithm, str(head), None)
    # A tree has room for the deepest path.
    budget = method.budget if device == "cuda" else max(_CPU_BUDGET, method.levels)
    assert isinstance(method.options, DartOptions | DartreeOptions)
    # The server must not cut a tree that the reference verifies whole.
    options = dataclasses.replace(
        method.options, budget=budget, adaptive=False, cpu_rows=budget + 1, ngram=None
    )
    questions = [first_prompt(held_out, text) for text in range(min(prompts, len(held_out)))]
    ends = target.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    drafter = method.load_drafter(
        Target(
            target.config.num_hidden_layers,
            target.config.hidden_size,
            target.config.vocab_size,
            target.embed,
            dtype,
            torch.device(device),
            functools.partial(torch.nn.functional.linear, weight=target.lm_head),
        )
    )
    difference = logit_difference(drafter, target, held_out)
    found = [
        generate_by_reference(
            target.model, drafter, question, new_tokens, options=options, end=ends
        )
        for question in questions
    ]
    rounds = [round for answer in found for round in answer.rounds]
    reference = sum(len(round.token) for round in rounds) / max(1, len(rounds))
    server, note = None, "the server was not asked"
    if with_server:
        # The server needs the memory that the target holds here.
        del drafter, target
        torch.cuda.empty_cache()
        try:
            server = _by_server(
                algorithm, head, model, questions, new_tokens, options, dtype, server_flags
            )
            note = "" if server is not None else "the server reported no round"
        except ServerError as error:
            note = f"no server: {error}"
    return Gate(
        difference,
        reference,
        server,
        len(questions),
        new_tokens,
        budget,
        note,
        tuple(_failures(difference, LOGIT_TOLERANCE[dtype], reference, server)),
    )


def _failures(difference: float, limit: float, reference: float, server: float | None) -> list[str]:
    failures = []
    if not difference <= limit:
        failures.append(
            f"training and serving logits differ by {difference:.4f} standard deviations "
            f"(limit {limit})"
        )
    if server is not None and abs(server / reference - 1) > ACCEPT_TOLERANCE:
        failures.append(
            f"accept length {server:.3f} by the server, {reference:.3f} by the reference: "
            f"{server / reference - 1:+.1%} (limit {ACCEPT_TOLERANCE:.0%})"
        )
    return failures


def first_prompt(corpus: Corpus, text: int) -> list[int]:
    """A text up to its first answer."""
    span = slice(corpus.start[text], corpus.start[text + 1])
    return corpus.ids[span][: int(np.argmax(corpus.mask[span]))].tolist()


def _by_server(
    algorithm: str,
    head: Path,
    model: str,
    questions: Sequence[Sequence[int]],
    new_tokens: int,
    options: TreeOptions,
    dtype: torch.dtype,
    flags: Sequence[str],
) -> float | None:
    speculation = (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(head)),
    )
    name = str(dtype).removeprefix("torch.")
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens}
    environment = {ENVIRONMENT: json.dumps(dataclasses.asdict(options))}
    with serve(model, (*speculation, "--dtype", name, *flags), env=environment) as server:
        replies = generate(server.url, [Request(q, sampling) for q in questions])
    return micro_length(Acceptance.of(reply.meta) for reply in replies)
