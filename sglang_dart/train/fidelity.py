"""Whether the trainer's forward is the serving drafter's: their logits for the same prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_dart.draft.dart import DartDrafter
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.domino import DominoDrafter
from sglang_dart.draft.drafter import Drafter, Roots, Rows
from sglang_dart.train.block_method import BlockMethod
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.corpus import Corpus, collate
from sglang_dart.train.method import DartMethod

# Of a drafter with a causal head, which corrects these alone: candidates a level.
_CANDIDATES = 64


@torch.no_grad()
def logit_difference(
    drafter: Drafter, target: FrozenTarget, corpus: Corpus, prefixes: int = 8
) -> float:
    """Compare the trainer's forward with this serving drafter's on the first text of a corpus.

    Gives the largest absolute difference of logits over all levels of `prefixes` prefixes, each
    level's mean taken out, in standard deviations of the logits. A causal head is compared after
    the text's own tokens. Allocates the drafter's KV anew.
    """
    method = training_method(drafter, target, prefixes)
    batch = collate(corpus, [0], method).to(target.lm_head.device)
    capture = target.capture(batch.ids)
    trained = method.logits(batch, capture).float()

    ids, rows = batch.ids[0], batch.rows
    slots = torch.arange(1, len(ids), device=ids.device)
    drafter.allocate(len(ids))
    drafter.append(Rows(capture.feature[0, :-1], ids[1:], slots - 1, slots))
    worst = torch.zeros((), device=ids.device)
    # With one text, the flat prefix is the position of the token before the root.
    for prefix in rows.prefix.unique()[:prefixes]:
        roots = Roots(
            ids[prefix + 1][None],
            prefix[None] + 1,
            capture.feature[0, prefix][None],
            slots[None],
        )
        for level, (token, served) in enumerate(_served(drafter, roots, ids[prefix + 2 :])):
            own = trained[(rows.prefix == prefix) & (rows.level == level)]
            if len(own):
                gap = _centred(own[0, token]) - _centred(served.float())
                worst = torch.maximum(worst, gap.abs().max())
    return float(worst / trained.std())


def training_method(drafter: Drafter, target: FrozenTarget, blocks: int) -> Any:
    """The `Method` that would train this drafter; of `blocks` blocks a text, if it drafts any."""
    matrices = target.model.get_input_embeddings().weight, target.lm_head
    if isinstance(drafter, DartDrafter):
        passes = drafter.final_norm_passes
        return DartMethod(drafter.head, *matrices, gamma=1.0, final_norm_passes=passes)
    assert isinstance(drafter, DFlashDrafter)
    mask = drafter.model.config.mask_token_id
    assert mask is not None
    return BlockMethod(drafter.model, *matrices, mask_token_id=mask, anchors=blocks, decay=1.0)


def _served(
    drafter: Any, roots: Roots, path: torch.Tensor
) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor]]:
    """Tokens and their logits, level by level; `path` [P] is what follows the root."""
    if not isinstance(drafter, DominoDrafter):
        for logit in drafter.draft_logits(roots)[0]:
            yield slice(None), logit
        return
    width = min(_CANDIDATES, drafter.model.config.vocab_size)
    candidates = drafter.draft(roots, width)
    head = drafter.path_head(candidates, roots.token)
    state = head.initial_state()
    for level, token in enumerate(path[: drafter.levels]):
        yield candidates.token[0, level], head.logits(level, state)[0, 0]
        state = head.step(state, token.view(1, 1))


def _centred(logit: torch.Tensor) -> torch.Tensor:
    return logit - logit.mean()
