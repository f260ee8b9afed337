"""Which drafted nodes the target confirms: lossless, greedy and sampled.

The rule is the same for both. Take the target's own next token after a node, its argmax or a draw
from its filtered distribution. If a child of the node holds that token, the child is accepted and
the walk goes on from there; if none does, the token is the bonus. Every committed token is thus one
that plain decoding would have produced in this place, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dart.types import Accepted, PackedTree
from sglang_dart.verify.noise import gumbel

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(request [R], node [R]) -> the target's token after that node [R]."""


@dataclass(frozen=True)
class SamplingLaw:
    """How each request samples. All [bs]; filters apply in the order of the fields.

    temperature float > 0; top_k int, 1 is greedy and >= V is off; top_p float, 1 is off;
    min_p float, 0 is off: drops what has less than min_p times the largest probability.
    seed int64 or None: with it a draw depends on (seed, position) alone.
    top_p_after_top_k: whether top-p counts the mass that top-k left, or (False) all of it.
    SGLang 0.5.23 counts all of it, save for FlashInfer batches in which a request has min_p.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor | None = None
    top_p_after_top_k: bool = False

    def filters(self, vocabulary: int) -> bool:
        """Whether any request drops tokens. Synchronises with the host."""
        off = (self.top_k >= vocabulary) & (self.top_p >= 1) & (self.min_p <= 0)
        return not bool(off.all())

    def rows(self, request: torch.Tensor) -> SamplingLaw:
        """The laws of these requests, one a row; request [R]."""
        return SamplingLaw(
            self.temperature[request],
            self.top_k[request],
            self.top_p[request],
            self.min_p[request],
            None if self.seed is None else self.seed[request],
            self.top_p_after_top_k,
        )


def accept_greedy(tree: PackedTree, target_logits: torch.Tensor, levels: int) -> Accepted:
    """Accept along the target's argmax. target_logits [bs, N, V]; no node is deeper than `levels`.

    Never synchronises with the host.
    """
    return accept_tokens(tree, target_logits.argmax(-1), levels)


def accept_sampled(
    tree: PackedTree,
    target_logits: torch.Tensor,
    law: SamplingLaw,
    levels: int,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Accept along draws from the target. target_logits [bs, N, V] raw; law of bs requests.

    Draws at visited nodes only. Without seeds the noise comes from `generator`.
    """

    filters = law.filters(target_logits.shape[-1])

    def choose(request: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        position = tree.position[request, node]
        return draw(target_logits[request, node], law.rows(request), position, filters, generator)

    return accept_visited(tree, levels, choose)


def accept_tokens(tree: PackedTree, target_token: torch.Tensor, levels: int) -> Accepted:
    """Accept along given tokens, one after every node; target_token [bs, N].

    Loop-free: a node is accepted if it and all its ancestors hold the token that the target wants
    after their parents. Siblings are distinct, so these nodes form one path.
    Never synchronises with the host.
    """
    parent = parents(tree)
    wanted = target_token.gather(1, parent.clamp(min=0))
    right = (tree.token == wanted) & (parent >= 0)
    right[:, 0] = True
    # Padding does not see the root.
    accepted = (right.unsqueeze(1) | ~tree.mask).all(2) & tree.mask[:, :, 0]

    index = torch.arange(tree.token.shape[1], device=tree.token.device)
    # Column levels + 1 takes what is not accepted, and is cut off.
    column = torch.where(accepted, tree.mask.sum(2) - 1, levels + 1)
    node = torch.full((column.shape[0], levels + 2), -1, dtype=torch.int64, device=index.device)
    node = node.scatter_(1, column, index.expand_as(column))[:, :-1]
    token = target_token.gather(1, node.clamp(min=0)).masked_fill(node < 0, 0)
    return Accepted(node=node.int(), token=token, length=accepted.sum(1).int())


def accept_visited(tree: PackedTree, levels: int, choose: Choose) -> Accepted:
    """Accept along tokens that are chosen only where the walk comes by, level after level.

    For a CPU: the host decides at every level which requests go on.
    """
    bs = tree.token.shape[0]
    parent = parents(tree)
    node = torch.full((bs, levels + 1), -1, dtype=torch.int32, device=tree.token.device)
    token = torch.zeros((bs, levels + 1), dtype=torch.int64, device=tree.token.device)
    request = torch.arange(bs, device=tree.token.device)
    at = torch.zeros_like(request)
    for level in range(levels + 1):
        chosen = choose(request, at)
        node[request, level] = at.int()
        token[request, level] = chosen.long()
        match = (parent[request] == at.unsqueeze(1)) & (tree.token[request] == chosen.unsqueeze(1))
        found = match.any(1)
        if not found.any():
            break
        request, at = request[found], match[found].int().argmax(1)
    return Accepted(node=node, token=token, length=(node >= 0).sum(1).int())


def parents(tree: PackedTree) -> torch.Tensor:
    """Parent of every node, [bs, N] int64; -1 for the root and for padding."""
    index = torch.arange(tree.token.shape[1], device=tree.token.device)
    # Parents stand before their children, so the nearest ancestor is the latest one.
    ancestor = tree.mask & (index < index.unsqueeze(1))
    return torch.where(ancestor, index, -1).amax(2)


def draw(
    logits: torch.Tensor,
    law: SamplingLaw,
    position: torch.Tensor,
    filters: bool = True,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """One token a row. logits [R, V], law of R rows, position [R] of the token before -> [R].

    filters: whether any request of the batch drops tokens, be it in these rows or not. It decides
    what seeded noise is hashed with, the token's rank or its id, as in SGLang.
    """
    if filters:
        weight, token = filtered(logits, law)
    else:
        weight, token = scaled(logits, law), None
    if law.seed is None:
        rank = torch.multinomial(weight, 1, generator=generator)
    else:
        column = torch.arange(weight.shape[1], device=weight.device)
        noise = gumbel(law.seed, position, column)
        rank = (weight.double().log() + noise).argmax(1, keepdim=True)
    return rank.squeeze(1) if token is None else token.gather(1, rank).squeeze(1)


def filtered(logits: torch.Tensor, law: SamplingLaw) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after all filters, not normalised, and the tokens that they belong to.

    logits [R, V], law of R rows -> weight [R, V] float32, token [R, V] int64, likeliest first.
    """
    prob, token = scaled(logits, law).sort(dim=-1, descending=True)
    keep = torch.arange(prob.shape[1], device=prob.device) < law.top_k.unsqueeze(1)
    mass = prob
    if law.top_p_after_top_k:
        mass = prob * keep
        mass = mass / mass.sum(1, keepdim=True)
    # A token stays if those before it leave something of the mass to fill.
    keep &= mass.cumsum(1) - mass <= law.top_p.unsqueeze(1)
    keep &= prob >= prob[:, :1] * law.min_p.unsqueeze(1)
    return prob * keep, token


def scaled(logits: torch.Tensor, law: SamplingLaw) -> torch.Tensor:
    """Probabilities at each row's temperature. logits [R, V] -> [R, V] float32."""
    return torch.softmax(logits.float() / law.temperature.unsqueeze(1), dim=-1)
