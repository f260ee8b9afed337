"""A generation as a page shows it: every round's tree with its labels, places and words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dart.reference import Generation, Round
from sglang_dart.trace_page.labels import TokenText, columns, shortened, visible
from sglang_dart.trace_page.layout import Box, draw, line

LABEL_COLUMNS = 16
# Characters of text before a round.
TEXT_BEFORE = 600
# The score that gets half of the full colour.
HALF_TINT = 3.0
THIN, THICK = 1.0, 4.0

ROOT, ACCEPTED, DRAFT, TARGET = "root", "accepted", "draft", "target"


@dataclass(frozen=True)
class Node:
    """kind: root, accepted, draft, or target: what the target says where the tree stopped.

    tint 0 .. 100: how good the score is. stops: whether it is the last accepted node.
    """

    kind: str
    label: str
    detail: str
    box: Box
    tint: int
    stops: bool = False


@dataclass(frozen=True)
class Line:
    """From a parent to a child, of the child's kind."""

    kind: str
    path: str
    thickness: float


@dataclass(frozen=True)
class Piece:
    """Text of one token; kind as of nodes, or `cut`: committed beyond the end of the answer."""

    kind: str
    text: str


@dataclass(frozen=True)
class RoundView:
    """One round. before: the text up to the root, which is the first of `pieces`.

    left: where the column of each depth begins.
    """

    number: int
    before: str
    pieces: list[Piece]
    nodes: list[Node]
    lines: list[Line]
    left: list[int]
    width: int
    height: int
    stopped: str

    @property
    def drafted(self) -> int:
        return sum(node.kind in (ACCEPTED, DRAFT) for node in self.nodes)

    @property
    def committed(self) -> list[Piece]:
        return self.pieces[1:]


@dataclass(frozen=True)
class TraceView:
    """The whole page. histogram: rounds by their number of accepted drafts, 0 first."""

    prompt: str
    first: str
    rounds: list[RoundView]
    tokens: int
    accept_length: float
    histogram: list[int]
    settings: dict[str, str]


def view(
    generation: Generation, prompt: Sequence[int], text: TokenText, settings: dict[str, str]
) -> TraceView:
    """settings: what the header says beside the totals, by name."""
    rounds = generation.rounds
    accepted = Counter(len(r.path) - 1 for r in rounds)
    levels = max((r.candidates.levels for r in rounds), default=0)
    committed = [generation.tokens[0], *(token for r in rounds for token in r.token)]
    pieces = text.pieces(committed)
    ask = "".join(text.pieces(prompt))
    views, at = [], 1
    for number, r in enumerate(rounds, start=1):
        kinds = [ACCEPTED] * (len(r.token) - 1) + [TARGET]
        end = len(generation.tokens)
        kinds = [k if at + i < end else "cut" for i, k in enumerate(kinds)]
        shown = [Piece(ROOT, pieces[at - 1])]
        shown += [Piece(k, p) for k, p in zip(kinds, pieces[at:], strict=False)]
        before = ask + "".join(pieces[: at - 1])
        if len(before) > TEXT_BEFORE:
            before = "…" + before[-TEXT_BEFORE:]
        views.append(_round(number, r, before, shown, text))
        at += len(r.token)
    return TraceView(
        ask,
        pieces[0],
        views,
        len(generation.tokens),
        generation.accept_length,
        [accepted[depth] for depth in range(levels + 1)],
        settings,
    )


def tint(score: float) -> int:
    """The colour of a score, from 100 for a score of 0 towards 0 for the worst."""
    return round(100 / (1 - min(0.0, score) / HALF_TINT))


def _round(number: int, r: Round, before: str, pieces: list[Piece], text: TokenText) -> RoundView:
    tree = r.tree
    token, parent, score = (c[0].tolist() for c in (tree.token, tree.parent, tree.score))
    used = [node for node in range(tree.width) if node == 0 or parent[node] >= 0]
    # The target's own token is drawn as one more node, first after the last accepted one.
    own, last = len(used), r.path[-1]
    children: list[list[int]] = [[] for _ in range(own + 1)]
    for node in used[1:]:
        children[parent[node]].append(node)
    for siblings in children:
        siblings.sort(key=lambda node: (-score[node], node))
    children[last].insert(0, own)

    kinds = [ROOT] + [ACCEPTED if node in r.path else DRAFT for node in used[1:]] + [TARGET]
    words = [text.label(t) for t in [*token[:own], r.token[-1]]]
    labels = [shortened(visible(word), LABEL_COLUMNS) for word in words]
    drawing = draw(children, [max(1, columns(label)) for label in labels])
    details = [_detail(r, node, words[node]) for node in used]
    details.append(f"{_quoted(words[own])}, id {r.token[-1]}\nthe target's own token, committed")
    nodes = [
        Node(kind, label, detail, box, tint(score[node]) if node < own else 0, node == last)
        for node, (kind, label, detail, box) in enumerate(
            zip(kinds, labels, details, drawing.box, strict=True)
        )
    ]
    lines = []
    for node, below in enumerate(children):
        for child in below:
            step = score[child] - score[node] if child < own else 0.0
            path = line(drawing.box[node], drawing.box[child])
            lines.append(Line(kinds[child], path, _thickness(step)))
    # What was accepted lies on top of what was not.
    lines.sort(key=lambda each: each.kind != DRAFT)
    stopped = _stopped(r, [words[child] for child in children[last][1:]], words[own])
    size = drawing.left, drawing.width, drawing.height
    return RoundView(number, before, pieces, nodes, lines, *size, stopped)


def _detail(r: Round, node: int, word: str) -> str:
    """What the page says of a node when it is pointed at."""
    tree = r.tree
    token, parent, depth = (int(c[0, node]) for c in (tree.token, tree.parent, tree.depth))
    said = [f"{_quoted(word)}, id {token}"]
    if node == 0:
        return "\n".join([*said, "the root: the newest token before this round"])
    score = float(tree.score[0, node])
    step = score - float(tree.score[0, parent])
    said.append(f"depth {depth}, score {score:z.2f}, of which this step {step:z.2f}")
    ranks = _ranks(r, depth)
    if token in ranks:
        rank = ranks.index(token)
        share = math.exp(float(r.candidates.log_prob[0, depth - 1, rank]))
        said.append(
            f"the drafter's candidate {rank + 1} of {len(ranks)} here, probability {share:.2%}"
        )
    said.append("accepted" if node in r.path else "not accepted")
    return "\n".join(said)


def _stopped(r: Round, offered: list[str], own: str) -> str:
    """Why the round ended where it did."""
    depth = len(r.path) - 1
    says = f"the target's own next token is {_quoted(own)}"
    if depth >= r.candidates.levels:
        return f"All {depth} levels were right; {says}."
    if not offered:
        where = "Nothing was drafted after the last accepted token"
    else:
        what = ", ".join(_quoted(word) for word in offered[:4])
        more = f" and {len(offered) - 4} more" if len(offered) > 4 else ""
        where = f"After depth {depth} the tree offered {what}{more}"
    ranks = _ranks(r, depth + 1)
    if r.token[-1] not in ranks:
        rank = f"not among the drafter's {len(ranks)} candidates at this depth"
    else:
        place = ranks.index(r.token[-1]) + 1
        rank = f"the drafter's candidate {place} of {len(ranks)} at this depth, not kept here"
    return f"{where}; {says}, {rank}."


def _ranks(r: Round, depth: int) -> list[int]:
    """The drafter's candidates for a depth, best first."""
    token, log_prob = (c[0, depth - 1] for c in (r.candidates.token, r.candidates.log_prob))
    return token[log_prob > -math.inf].tolist()


def _quoted(word: str) -> str:
    return f"\u201c{shortened(visible(word), 60)}\u201d"


def _thickness(step: float) -> float:
    return round(THIN + (THICK - THIN) * math.exp(min(0.0, step)), 1)
