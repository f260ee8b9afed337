"""The trace: its labels, its layout, the page of golden generations, and what a browser shows."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sglang_dart import cli
from sglang_dart.draft.scripted import Script
from sglang_dart.measure.datasets import encode_chat
from sglang_dart.options import DartOptions, DartreeOptions
from sglang_dart.reference import Generation, Round, generate
from sglang_dart.trace_page.labels import TokenizerText, columns, shortened, visible
from sglang_dart.trace_page.layout import GUTTER, Drawing, draw, line, rows
from sglang_dart.trace_page.page import render
from sglang_dart.trace_page.view import view
from sglang_dart.types import Candidates, Tree
from tests import dartree
from tests.browser import PROGRAMS, Browser, find_browser

GOLDEN = Path(__file__).parent / "golden"
BUDGET = 64
NGRAM = "dart/ngram_order3.trie"
HOSTILE = "</script><script>alert(1)</script>"


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\t\r", "↵⇥␍"),
        ("a\u202eb", "a\\u{202e}b"),
        ("\u200b\x00\ufeff", "\\u{200b}\\u{0}\\u{feff}"),
        ("\ud800", "\\u{d800}"),
        ("\u00a0", "\\u{a0}"),
        ("東京é", "東京é"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "width"), [("", 0), ("abc", 3), ("東京都", 6), ("e\u0301", 1), ("🎌", 2)]
)
def test_columns(text: str, width: int) -> None:
    assert columns(text) == width


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("東京都", 6, "東京都"),
        ("東京都", 5, "東京…"),
        ("東京", 2, "…"),
    ],
)
def test_cuts(text: str, limit: int, cut: str) -> None:
    assert shortened(text, limit) == cut


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, every byte a token, with an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
    return made


def test_pieces_of_a_text_join_to_it(tokenizer: PreTrainedTokenizerFast) -> None:
    text, shown = TokenizerText(tokenizer), " né 🎌.\n"
    ids = tokenizer.encode(shown)
    assert len(ids) == len(shown.encode())
    pieces = text.pieces(ids)
    assert "".join(pieces) == shown
    assert pieces[:4] == [" ", "n", "", "é"]
    # A cut character is shown as far as it goes, not lost.
    assert "".join(text.pieces(ids[:-4])) != ""
    assert text.label(ids[0]) == " "
    assert "\ufffd" not in text.label(ids[2])
    assert text.label(256) == "<end>"
    assert text.label(9999) == "[9999]"


# ---------------------------------------------------------------- layout


@st.composite
def trees(draw_from: st.DrawFn, nodes: int = 65) -> list[list[int]]:
    """Children of every node; parents have smaller numbers."""
    count = draw_from(st.integers(1, nodes))
    children: list[list[int]] = [[] for _ in range(count)]
    for node in range(1, count):
        children[draw_from(st.integers(0, node - 1))].append(node)
    return children


def check(children: list[list[int]], drawing: Drawing) -> None:
    boxes = drawing.box
    for box in boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= drawing.width
        assert box.y + box.height <= drawing.height
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            apart = a.right <= b.x or b.right <= a.x
            assert apart or a.y + a.height <= b.y or b.y + b.height <= a.y, (a, b)
    # The upright parts of lines, one column of them after another.
    upright: dict[int, list[tuple[int, int]]] = {}
    for node, below in enumerate(children):
        if not below:
            continue
        heights = [boxes[child].middle for child in below]
        assert heights == sorted(heights)
        assert heights[0] == boxes[node].middle
        assert all(boxes[child].x >= boxes[node].right + GUTTER for child in below)
        turn = boxes[below[0]].x - GUTTER // 2
        assert all(boxes[child].x - GUTTER // 2 == turn for child in below)
        upright.setdefault(turn, []).append((heights[0], heights[-1]))
    for spans in upright.values():
        spans.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), spans


@given(trees(), st.data())
@settings(deadline=None)
def test_nothing_overlaps_or_crosses(children: list[list[int]], data: st.DataObject) -> None:
    size = len(children)
    widths = data.draw(st.lists(st.integers(1, 16), min_size=size, max_size=size))
    check(children, draw(children, widths))


@pytest.mark.parametrize(
    "children",
    [
        [[]],
        [[node + 1] for node in range(64)] + [[]],
        [list(range(1, 65)), *([] for _ in range(64))],
    ],
    ids=["root", "chain", "star"],
)
def test_extreme_trees(children: list[list[int]]) -> None:
    check(children, draw(children, [1 + node % 16 for node in range(len(children))]))


def test_subtrees_fill_the_room_beside_others() -> None:
    r"""0 ─ 1 ─ 4 ─ 6 ─ 7
    ├ 2         └ 8
    └ 3 ─ 5
    """
    assert rows([[1, 2, 3], [4], [], [5], [6], [], [7, 8], [], []]) == [0, 0, 1, 2, 0, 2, 0, 0, 1]


def test_lines_begin_and_end_at_their_boxes() -> None:
    drawing = draw([[1, 2], [], []], [1, 2, 3])
    root, child, other = drawing.box
    assert line(root, child) == f"M{root.right},{root.middle}H{child.x}"
    path = line(root, other)
    assert path.startswith(f"M{root.right},{root.middle}H")
    assert path.endswith(f"{other.middle}H{other.x}")


# ---------------------------------------------------------------- the page


class Words:
    """Token t is "t5"; one has a hostile text."""

    def __init__(self, hostile: int = -1) -> None:
        self._hostile = hostile

    def label(self, token: int) -> str:
        return HOSTILE if token == self._hostile else f"t{token}"

    def pieces(self, tokens: Any) -> list[str]:
        return [f"{self.label(token)} " for token in tokens]


class Page(HTMLParser):
    """Elements of a page with their attributes, and the nodes of its drawings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.nodes: list[list[tuple[str, str]]] = []
        self._path: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "section" and given.get("class") == "round":
            self.nodes.append([])
        if tag == "g":
            self.nodes[-1].append((given["class"] or "", ""))
        self._path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._path[-2:] == ["g", "text"]:
            kind, label = self.nodes[-1][-1]
            self.nodes[-1][-1] = (kind, label + data)


@pytest.fixture(scope="module")
def generations(golden_drafter) -> dict[str, tuple[list[int], Generation]]:
    """Prompt and generation of each algorithm's golden models, 64 nodes a tree."""
    prompt = dartree.read("domino_e2e_greedy.json")[0]["prompt"]
    targets = {
        name: AutoModelForCausalLM.from_pretrained(
            GOLDEN / name / "target", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name in ("dart", "dartree")
    }
    start = json.loads((GOLDEN / "dart/e2e_greedy.json").read_text())["runs"][0]["prompt"]
    found = {"DART": (start, golden_drafter(), DartOptions(budget=BUDGET), "dart")}
    for variant in ("pruned", "fixed", "chain", "marginal"):
        options = DartreeOptions(variant=variant, budget=BUDGET)
        found[f"DARTREE {variant}"] = (
            *(prompt, dartree.drafter("domino_shift")),
            *(options, "dartree"),
        )
    return {
        name: (ids, generate(targets[target], drafter, ids, 40, options=options))
        for name, (ids, drafter, options, target) in found.items()
    }


RUNS = ("DART", *(f"DARTREE {variant}" for variant in ("pruned", "fixed", "chain", "marginal")))


def page_of(prompt: list[int], generation: Generation, words: Words | None = None) -> str:
    settings = {"algorithm": "DART", "target": "target" if words is None else HOSTILE}
    return render(view(generation, prompt, words or Words(), settings))


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


# ---------------------------------------------------------------- the tool


@pytest.fixture
def target(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The golden DART target with a tokenizer."""
    folder = tmp_path / "target"
    shutil.copytree(GOLDEN / "dart/target", folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_trace(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["trace", *words]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_tool(target: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv(
        "SGLANG_DART_CONFIG", json.dumps({"budget": 12, "ngram": str(GOLDEN / NGRAM)})
    )
    out = tmp_path / "page.html"
    words = ("--model", str(target), "--drafter", str(GOLDEN / "dart/head"), "--prompt", "Hi")
    result = run_trace(capsys, *words, "--new-tokens", "9", "--out", str(out))
    assert result["tokens"] == 9
    assert result["page"] == str(out)
    page = Page(out.read_text())
    assert len(page.nodes) == result["rounds"]
    assert max(map(len, page.nodes)) == 12 + 2
    # Draws depend on the seed alone.
    hot = (*words, "--new-tokens", "9", "--temperature", "1", "--out", str(out))
    answers = [run_trace(capsys, *hot, "--seed", seed)["answer"] for seed in "112"]
    assert answers[0] == answers[1] != answers[2]


def test_tool_replays_a_script(target: Path, tmp_path: Path, capsys, tokenizer) -> None:
    """A drafter that is right all the time: as few rounds as its levels allow."""
    words = ("--model", str(target), "--prompt", "Hi", "--new-tokens", "20")
    plain = run_trace(
        capsys, *words, "--drafter", str(GOLDEN / "dart/head"), "--out", str(tmp_path / "a.html")
    )
    folder = tmp_path / "script"
    folder.mkdir()
    prompt = encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    answer = plain["ids"]
    Script([[*prompt, *answer, *[0] * 20]]).write(folder, {"vocab_size": 257, "levels": 4})
    result = run_trace(capsys, *words, "--drafter", str(folder), "--out", str(tmp_path / "b.html"))
    assert result["answer"] == plain["answer"]
    assert result["rounds"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "EAGLE"], "--algorithm EAGLE: must be one of DART, DARTREE"),
        (["--out", "nowhere/at/all.html"], "there is no folder nowhere/at"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", *words]) == 2
    assert message in capsys.readouterr().err


def test_refuses_a_head_of_another_target(target: Path, tmp_path: Path, capsys) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    words = ["--model", str(target), "--drafter", str(GOLDEN / "dart/head")]
    assert cli.main(["trace", *words, "--out", str(tmp_path / "x.html")]) == 2
    assert not (tmp_path / "x.html").exists()


# ---------------------------------------------------------------- a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(f"THE PAGE IS NOT LOOKED AT: none of {', '.join(PROGRAMS)} is installed")
    with Browser(program) as running:
        yield running


class LongWords(Words):
    """Labels as wide as they get, wide characters among them."""

    def label(self, token: int) -> str:
        return ("Donaudampfschifffahrt", "東京特許許可局局長", "iiiiiiiiiiiiiiii", " ")[token % 4]


def deep_generation() -> Generation:
    """Three rounds of 64 nodes, 16 levels deep, of which 0, 9 and 16 are accepted."""
    levels, rounds = 16, []
    for accepted in (0, 9, 16):
        # A spine of 16 nodes, and three more children at each of its places.
        parent = [-1, *range(levels), *(node for node in range(levels) for _ in range(3))]
        depth = [0]
        for above in parent[1:]:
            depth.append(depth[above] + 1)
        tree = Tree(
            torch.arange(len(parent))[None],
            torch.tensor([parent], dtype=torch.int32),
            torch.tensor([depth], dtype=torch.int32),
            -torch.arange(len(parent)).float()[None] / 4,
        )
        token = torch.arange(4).expand(1, levels, 4)
        candidates = Candidates(token, -torch.ones(1, levels, 4))
        path = list(range(accepted + 1))
        rounds.append(Round(candidates, tree, path, [*path[1:], 0]))
    return Generation([0, *(token for r in rounds for token in r.token)], rounds)


@pytest.fixture(params=["DART", "DARTREE pruned", "deep"])
def page(request: pytest.FixtureRequest, generations, tmp_path: Path) -> tuple[Path, Generation]:
    path = tmp_path / "page.html"
    if request.param == "deep":
        prompt, generation, words = [1], deep_generation(), LongWords()
    else:
        (prompt, generation), words = generations[request.param], Words()
    path.write_text(page_of(prompt, generation, words), encoding="utf-8")
    return path, generation


# Every label lies inside its box, every box inside the drawing; what the window shows of both.
MEASURE = """(() => {
  const shown = [...document.querySelectorAll(".round")].filter((r) => r.checkVisibility());
  const nodes = [...shown[0].querySelectorAll(".node")];
  const svg = shown[0].querySelector("svg").getBoundingClientRect();
  const tree = shown[0].querySelector(".tree").getBoundingClientRect();
  const own = shown[0].querySelector(".node.target rect").getBoundingClientRect();
  const spill = (a, b) => Math.max(b.left - a.left, a.right - b.right, b.top - a.top,
    a.bottom - b.bottom);
  return {
    rounds: shown.length,
    first: shown[0].querySelector("h2").firstChild.textContent.trim(),
    place: document.getElementById("place").textContent,
    nodes: nodes.length,
    label_spill: Math.max(...nodes.map((n) => spill(
      n.querySelector("text").getBoundingClientRect(),
      n.querySelector("rect").getBoundingClientRect()))),
    box_spill: Math.max(...nodes.map((n) => spill(
      n.querySelector("rect").getBoundingClientRect(), svg))),
    own_in_sight: own.left >= tree.left && own.right <= tree.right,
    font: Math.min(...nodes.map((n) => parseFloat(getComputedStyle(
      n.querySelector("text")).fontSize))),
    sideways: document.documentElement.scrollWidth - innerWidth,
    detail: shown[0].querySelector(".detail").textContent,
  };
})()"""


@pytest.mark.browser
@pytest.mark.parametrize("size", [(1600, 1200), (390, 844)], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_shows_every_label(browser, page, size, scheme) -> None:
    path, generation = page
    lengths = [len(r.path) for r in generation.rounds]
    # The round of the longest run, whose end is the farthest to the right.
    number = lengths.index(max(lengths)) + 1
    browser.open(path, *size, scheme=scheme, fragment=f"round-{number}")
    found = browser.evaluate(MEASURE)
    drafted = int((generation.rounds[number - 1].tree.parent[0] >= 0).sum())
    assert found["nodes"] == drafted + 2
    assert (found["rounds"], found["first"]) == (1, f"Round {number}")
    assert found["label_spill"] <= 0
    assert found["box_spill"] <= 0
    assert found["font"] >= 12
    assert found["sideways"] <= 0
    assert found["own_in_sight"]
    # Nothing but the page was asked for, and its policy let its own script and style through.
    assert browser.requested == [path.as_uri()]
    assert browser.complaints == []

    image = browser.screenshot()
    assert image.shape[:2] == size[::-1]
    share = {name: near(image, colour) for name, colour in COLOURS[scheme].items()}
    assert share["paper"] > 0.1, share
    assert share["target"] > 3e-4, share
    # The histogram and the legend have it even where nothing was accepted.
    assert share["accepted"] > 1e-3, share


COLOURS = {
    "light": {"paper": "#fbfbf9", "accepted": "#1a7f4b", "target": "#ffe9c9"},
    "dark": {"paper": "#14171a", "accepted": "#2f9e63", "target": "#45310f"},
}


def near(image: np.ndarray, colour: str) -> float:
    """Share of pixels that have nearly this colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return float((np.abs(image[..., :3] - wanted).max(-1) < 0.02).mean())


@pytest.mark.browser
def test_browser_steps_through_rounds(browser, page) -> None:
    path, generation = page
    count = len(generation.rounds)
    browser.open(path, 1280, 900)

    def place() -> tuple[str, str]:
        found = browser.evaluate(MEASURE)
        assert found["rounds"] == 1
        return found["first"], found["place"]

    for key, number in (
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("End", count),
        ("ArrowRight", count),
        ("Home", 1),
        ("ArrowLeft", 1),
    ):
        browser.press(key)
        assert place() == (f"Round {number}", f"round {number} of {count}"), key
    browser.evaluate("document.querySelectorAll('.answer a')[2].click()")
    assert place()[0] == "Round 3"
    browser.open(path, 1280, 900, fragment="round-2")
    assert place()[0] == "Round 2"
    assert browser.evaluate("scrollY") == 0
    for shown in (count, 1):
        browser.evaluate("document.getElementById('all').click()")
        assert browser.evaluate(MEASURE)["rounds"] == shown
        assert browser.evaluate("document.getElementById('all').checkVisibility()")


@pytest.mark.browser
def test_browser_tells_a_node_that_is_pointed_at(browser, page) -> None:
    path, _ = page
    browser.open(path, 1600, 1200)
    where = browser.evaluate(
        "(() => { const b = document.querySelector('.round.current .node.draft rect')"
        ".getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    browser.point(*where)
    detail = browser.evaluate(MEASURE)["detail"]
    assert re.search(r"depth \d+, score -\d", detail)
    assert "the drafter's candidate" in detail


@pytest.mark.browser
def test_browser_prints_every_round(browser, page) -> None:
    path, generation = page
    browser.open(path, 794, 1123)
    browser.print_media()
    found = browser.evaluate(MEASURE)
    assert found["rounds"] == len(generation.rounds)
    assert found["sideways"] <= 0
