"""How often each level of a drafter is right along given answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sglang_dart.draft.checkpoint import read_config
from sglang_dart.draft.dart import DartDrafter, dart_taps, load_head
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.dflash_config import read_dflash_config
from sglang_dart.draft.domino import load_block_model
from sglang_dart.draft.drafter import Drafter
from sglang_dart.options import load_dart_options
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.corpus import Corpus, collate, epoch_batches
from sglang_dart.train.fidelity import training_method
from sglang_dart.train.record import Tally

# A prompt's ids, and its answer's.
Text = tuple[Sequence[int], Sequence[int]]

_BATCH_TOKENS = {"cuda": 16384, "cpu": 1024}


@torch.no_grad()
def level_hits(
    algorithm: str,
    drafter: str,
    model: str,
    texts: Mapping[str, Sequence[Text]],
    dtype: str,
) -> dict[str, tuple[list[int], list[int]]]:
    """Right and asked by level, for each set of texts, on the best device at hand.

    Every place of an answer that could be a root is asked. A DART level is right if its best token
    is the target's; a level of a block drafter, if it is the text's, a causal head having read the
    text so far.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, loaded = _load(algorithm, drafter, model, getattr(torch, dtype), device)
    longest = max(len(answer) for group in texts.values() for _, answer in group)
    method = training_method(loaded, target, blocks=max(1, longest))
    method.schedule(1.0)
    found = {}
    for name, group in texts.items():
        corpus = _corpus(group)
        tally = Tally(method.levels, target.lm_head.device)
        for batch_texts in epoch_batches(corpus.lengths, _BATCH_TOKENS[device], seed=0, epoch=0):
            batch = collate(corpus, batch_texts, method).to(target.lm_head.device)
            tally.add(method(batch, target.capture(batch.ids)), batch.rows, batch.ids.numel())
        found[name] = tally.hits()
    return found


def _corpus(texts: Sequence[Text]) -> Corpus:
    ids = [[*prompt, *answer] for prompt, answer in texts]
    mask = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in texts]
    start = np.cumsum([0, *map(len, ids)])
    return Corpus(
        np.concatenate(ids).astype(np.int32), np.concatenate(mask).astype(np.int8), start, 0
    )


def _load(
    algorithm: str, source: str, model: str, dtype: torch.dtype, device: str
) -> tuple[FrozenTarget, Drafter]:
    if algorithm == "DART":
        config = read_config(source)
        target = FrozenTarget.load(model, dart_taps, dtype=dtype, device=device)
        head = load_head(source, config, dtype=dtype, device=device)
        passes = load_dart_options(config.raw).final_norm_passes
        layers = target.config.num_hidden_layers
        return target, DartDrafter(head, target.embed, layers, final_norm_passes=passes)
    block = read_dflash_config(source)
    target = FrozenTarget.load(model, block.taps, dtype=dtype, device=device)
    return target, DFlashDrafter(
        load_block_model(source, block, dtype=dtype, device=device),
        target.embed,
        target.logits,
        target.config.num_hidden_layers,
    )
