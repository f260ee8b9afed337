"""The page in a real browser: what is seen, wide and narrow, light and dark, by key and mouse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_dart.reference import Generation
from tests.browser import PROGRAMS, Browser, find_browser
from tests.trace_page.drawn import LongWords, Words, deep_generation, page_of

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(f"THE PAGE IS NOT LOOKED AT: none of {', '.join(PROGRAMS)} is installed")
    with Browser(program) as running:
        yield running


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


def test_browser_prints_every_round(browser, page) -> None:
    path, generation = page
    browser.open(path, 794, 1123)
    browser.print_media()
    found = browser.evaluate(MEASURE)
    assert found["rounds"] == len(generation.rounds)
    assert found["sideways"] <= 0
