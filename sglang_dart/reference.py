"""Both algorithms in plain torch, one request, no engine: to study, and to test others against.

    prefill -> draft -> grow, prune, pack -> verify -> commit -> draft -> ...

The target is a Hugging Face causal language model. Nothing here is fast and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sglang_dart.algorithms import (
    DARTREE_BUDGET,
    DEFAULT_BUDGET,
    dart_recipe,
    dartree_recipe,
    dartree_variant,
)
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.domino import DominoDrafter
from sglang_dart.draft.drafter import Drafter, Roots, Rows
from sglang_dart.options import DartOptions, DartreeOptions
from sglang_dart.score.causal import Causal
from sglang_dart.score.continuity import Continuity, NgramModel
from sglang_dart.score.marginal import Marginal
from sglang_dart.score.scorer import Scorer
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.plan import expandable
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe
from sglang_dart.types import Candidates, Tree
from sglang_dart.verify.accept import accept_tokens


@dataclass(frozen=True)
class Round:
    """What one round proposed, and what the target made of it.

    candidates and tree have a batch of 1. path: accepted nodes from the root down, root included.
    token: what the round committed, one token a node of the path: accepted drafts, then the bonus.
    """

    candidates: Candidates
    tree: Tree
    path: list[int]
    token: list[int]


@dataclass(frozen=True)
class Generation:
    """The new tokens, cut at `max_new_tokens` or after the first end token, and every round."""

    tokens: list[int]
    rounds: list[Round]

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per round, bonus included."""
        return sum(len(r.token) for r in self.rounds) / max(1, len(self.rounds))


@torch.no_grad()
def generate(
    target: Any,
    drafter: Drafter,
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    options: DartOptions | DartreeOptions | None = None,
    ngram: NgramModel | None = None,
    end: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Generation:
    """Generate from the prompt `ids` with speculation; the drafter's KV is allocated anew.

    options: of DART or of DARTREE, as the drafter needs; None: that algorithm's defaults. target: a
    Hugging Face causal language model with eager or SDPA attention, in eval mode.
    Temperature 0 decodes greedily. Raises ValueError for an empty prompt.
    """
    if not ids:
        raise ValueError("the prompt is empty; a drafter needs at least one token to draft from")
    options = options or (DartreeOptions() if isinstance(drafter, DFlashDrafter) else DartOptions())
    device = target.device
    reader = TargetReader(target, drafter.taps)
    drafter.allocate(len(ids) + max_new_tokens + drafter.levels + 1)

    # Prefill: the target reads the prompt, and its answer to the last token is the first root.
    prompt = torch.tensor(ids, device=device)
    position = torch.arange(len(ids), device=device)
    logits, feature = reader.read(prompt, position, position[:, None] >= position)
    reader.keep(position)
    text = [*ids, *_choose(logits[-1:], temperature, generator).tolist()]
    drafter.append(Rows(feature, torch.tensor(text[1:], device=device), position, position + 1))

    rounds: list[Round] = []
    while not _finished(text[len(ids) :], max_new_tokens, end):
        length = torch.tensor([len(text) - 1], device=device)
        root = torch.tensor(text[-1:], device=device)
        # The slot of a position is the position plus one, since slot 0 is the dummy.
        slots = torch.arange(1, len(text), device=device)[None]
        candidates = drafter.draft(Roots(root, length, feature[-1:], slots), options.candidates)
        tree = draft_tree(drafter, candidates, text, options, ngram, end)
        packed = pack(tree, length)

        logits, feature = reader.read(packed.token[0], packed.position[0], packed.mask[0])
        choice = _choose(logits, temperature, generator)
        accepted = accept_tokens(packed, choice[None], drafter.levels)
        path, token = (x[0, : accepted.length] for x in (accepted.node.long(), accepted.token))

        reader.keep(path)
        feature, position = feature[path], packed.position[0, path]
        drafter.append(Rows(feature, token, position, position + 1))
        text += token.tolist()
        rounds.append(Round(candidates, tree, path.tolist(), token.tolist()))
    return Generation(_cut(text[len(ids) :], max_new_tokens, end), rounds)


def draft_tree(
    drafter: Drafter,
    candidates: Candidates,
    text: Sequence[int],
    options: DartOptions | DartreeOptions,
    ngram: NgramModel | None = None,
    end: Sequence[int] = (),
) -> Tree:
    """Grow the tree of one request after `text`, whose last token is the root."""
    device = candidates.token.device
    root = torch.tensor(text[-1:], device=device)
    if isinstance(options, DartOptions):
        recipe = dart_recipe(options, options.budget or DEFAULT_BUDGET)
        scorer: Scorer = Marginal(candidates, options.logit_decay)
    else:
        recipe, scorer = _dartree(drafter, candidates, root, options)
    if ngram is not None:
        missing = max(0, ngram.order - 1 - len(text))
        tail = torch.tensor([[-1] * missing + list(text)], device=device)
        scorer = Continuity(scorer, ngram, tail, options.ngram_weight)
    ends = torch.tensor([list(end) or [-1]], device=device)
    return prune(grow(scorer, recipe, root, ends), recipe.budget, recipe.depth_bonus)


def _dartree(
    drafter: Drafter, candidates: Candidates, root: torch.Tensor, options: DartreeOptions
) -> tuple[TreeRecipe, Scorer]:
    variant = dartree_variant(options, causal=isinstance(drafter, DominoDrafter))
    budget = drafter.levels if variant == "chain" else options.budget or DARTREE_BUDGET
    recipe = dartree_recipe(options, variant, budget)
    if variant == "marginal" or not isinstance(drafter, DominoDrafter):
        return recipe, Marginal(candidates)
    head = drafter.path_head(candidates, root)
    return recipe, Causal(head, expandable(candidates, recipe))


class TargetReader:
    """A Hugging Face model that reads rows under any mask, and forgets those it is told to."""

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        self._model = model
        self._taps = taps
        self._cache = DynamicCache()
        self._length = 0

    def read(
        self, token: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read rows after everything kept: logits [N, V] and tapped states [N, taps * H].

        token, position [N]; mask [N, N] bool: row i sees row j of this call.
        """
        rows = token.shape[0]
        seen = torch.cat([mask.new_ones(rows, self._length), mask], dim=1)
        bias = torch.zeros(seen.shape, dtype=self._model.dtype, device=seen.device)
        bias.masked_fill_(~seen, torch.finfo(bias.dtype).min)
        out = self._model(
            input_ids=token[None],
            position_ids=position[None],
            attention_mask=bias[None, None],
            past_key_values=self._cache,
            output_hidden_states=True,
        )
        # hidden_states[0] is the embedding, so layer t's output is at t + 1.
        feature = torch.cat([out.hidden_states[tap + 1][0] for tap in self._taps], dim=-1)
        return out.logits[0].float(), feature

    def keep(self, row: torch.Tensor) -> None:
        """Keep these rows of the last `read`, in this order, and forget its other rows."""
        before = torch.arange(self._length, device=row.device)
        kept = torch.cat([before, self._length + row])
        for layer in self._cache.layers:
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        self._length = len(kept)


def _choose(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> torch.Tensor:
    """The target's token after each row: [N, V] -> [N]. A draw, where it is not greedy."""
    if temperature == 0:
        return logits.argmax(-1)
    probability = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probability, 1, generator=generator).squeeze(1)


def _finished(tokens: list[int], limit: int, end: Sequence[int]) -> bool:
    return len(tokens) >= limit or any(token in end for token in tokens)


def _cut(tokens: list[int], limit: int, end: Sequence[int]) -> list[int]:
    for index, token in enumerate(tokens[:limit]):
        if token in end:
            return tokens[: index + 1]
    return tokens[:limit]
