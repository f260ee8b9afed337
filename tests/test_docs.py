"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_tests_of_situations_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/situations.md").read_text())
    assert named
    assert sorted({name for name in named if not (ROOT / "tests" / name).exists()}) == []
