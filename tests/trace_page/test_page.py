"""The page of golden generations: every node, the accepted path, totals, and no way out."""

from __future__ import annotations

import re

import pytest
import torch

from sglang_dart.reference import Generation
from sglang_dart.trace_page.view import view
from tests.trace_page.drawn import BUDGET, HOSTILE, RUNS, Page, Words, deep_generation, page_of


@pytest.mark.parametrize("run", RUNS)
def test_every_node_stands_on_the_page(generations, run: str) -> None:
    prompt, generation = generations[run]
    page = Page(page_of(prompt, generation))
    assert len(page.nodes) == len(generation.rounds) > 3
    for shown, r in zip(page.nodes, generation.rounds, strict=True):
        token, parent = r.tree.token[0].tolist(), r.tree.parent[0].tolist()
        used = [node for node in range(r.tree.width) if node == 0 or parent[node] >= 0]
        *drawn, (own_kind, own) = shown
        assert [label for _, label in drawn] == [f"t{token[node]}" for node in used]
        accepted = [node for node, (kind, _) in enumerate(drawn) if "accepted" in kind]
        assert [0, *accepted] == r.path
        assert [n for n, (kind, _) in enumerate(drawn) if "stops" in kind] == [r.path[-1]]
        assert (own_kind, own) == ("node target", f"t{r.token[-1]}")
    # Trees of 64 nodes are what this is about.
    if "chain" not in run:
        assert max(map(len, page.nodes)) == BUDGET + 2


@pytest.mark.parametrize("run", RUNS)
def test_siblings_are_ordered_by_score(generations, run: str) -> None:
    prompt, generation = generations[run]
    made = view(generation, prompt, Words(), {})
    for shown, r in zip(made.rounds, generation.rounds, strict=True):
        siblings: dict[int, list[tuple[float, int]]] = {}
        for node in range(1, r.tree.width):
            parent, score = int(r.tree.parent[0, node]), float(r.tree.score[0, node])
            if parent >= 0:
                siblings.setdefault(parent, []).append((score, shown.nodes[node].box.y))
        for group in siblings.values():
            heights = [y for _, y in sorted(group, key=lambda each: each[1])]
            scores = [score for score, _ in sorted(group, key=lambda each: each[1])]
            assert scores == sorted(scores, reverse=True)
            assert len(set(heights)) == len(heights)


def test_totals(generations) -> None:
    prompt, generation = generations["DARTREE pruned"]
    made = view(generation, prompt, Words(), {})
    assert made.tokens == 40
    assert sum(made.histogram) == len(generation.rounds)
    committed = sum((depth + 1) * count for depth, count in enumerate(made.histogram))
    assert made.accept_length == pytest.approx(committed / len(generation.rounds))
    shown = made.first + "".join(
        piece.text for r in made.rounds for piece in r.committed if piece.kind != "cut"
    )
    assert shown == "".join(f"t{token} " for token in generation.tokens)


def test_why_rounds_stopped(generations) -> None:
    prompt, generation = generations["DARTREE pruned"]
    reasons = set()
    for shown, r in zip(
        view(generation, prompt, Words(), {}).rounds, generation.rounds, strict=True
    ):
        assert f"“t{r.token[-1]}”" in shown.stopped
        reasons.add(re.sub(r"\d+|“.*?”", "_", shown.stopped).split(",")[0].split(";")[0])
        offered = (r.tree.parent[0] == r.path[-1]).any()
        assert ("the tree offered" in shown.stopped) == bool(offered)
    assert len(reasons) >= 2, reasons


def test_an_answer_of_one_token_has_no_round(generations) -> None:
    prompt, generation = generations["DART"]
    assert "0 rounds" in page_of(prompt, Generation(generation.tokens[:1], []))


@pytest.mark.parametrize("run", ["DART", "DARTREE pruned"])
def test_hostile_tokens_are_text(generations, run: str) -> None:
    prompt, generation = generations[run]
    hostile = generation.rounds[0].token[0]
    text = page_of(prompt, generation, Words(hostile))
    assert HOSTILE not in text
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in text
    scripts = [tag for tag, _ in Page(text).tags if tag == "script"]
    assert scripts == ["script"]


def test_page_asks_the_network_for_nothing(generations) -> None:
    for run in RUNS:
        text = page_of(*generations[run])
        page = Page(text)
        assert "://" not in text
        assert not re.search(r"url\(|@import|\bfetch\(|\bimport\(", text)
        for tag, attribute in page.tags:
            assert "src" not in attribute, tag
            assert tag not in ("link", "iframe", "object", "embed", "img")
            assert not any(name.startswith("on") for name in attribute), attribute
            assert (attribute.get("href") or "#").startswith("#")
        policy = dict(page.tags)["meta"]
        assert (policy.get("content") or "").startswith("default-src 'none'")


def test_ranks_that_a_drafter_left_empty_are_no_candidates() -> None:
    """They hold token 0, which is also the target's token after each round of this generation."""
    generation = deep_generation()
    r = generation.rounds[0]
    assert "candidate 1 of 4 at this depth" in view(generation, [1], Words(), {}).rounds[0].stopped
    r.candidates.token[:, :, 0], r.candidates.token[:, :, 3] = 3, 0
    r.candidates.log_prob[:, :, 3] = -torch.inf
    assert "not among the drafter's 3" in view(generation, [1], Words(), {}).rounds[0].stopped
