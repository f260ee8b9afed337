"""The tool `trace`: pages of golden pairs, draws, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_dart import cli
from sglang_dart.draft.scripted import Script
from sglang_dart.measure.datasets import encode_chat
from tests.trace_page.drawn import Page, byte_tokenizer

GOLDEN = Path(__file__).parent / "golden"
NGRAM = "dart/ngram_order3.trie"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


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
    result = run_trace(capsys, *words, "--max-new-tokens", "9", "--out", str(out))
    assert result["tokens"] == 9
    assert result["page"] == str(out)
    page = Page(out.read_text())
    assert len(page.nodes) == result["rounds"]
    assert max(map(len, page.nodes)) == 12 + 2
    # Draws depend on the seed alone.
    hot = (*words, "--max-new-tokens", "9", "--temperature", "1", "--out", str(out))
    answers = [run_trace(capsys, *hot, "--seed", seed)["answer"] for seed in "112"]
    assert answers[0] == answers[1] != answers[2]


def test_tool_replays_a_script(target: Path, tmp_path: Path, capsys, tokenizer) -> None:
    """A drafter that is right all the time: as few rounds as its levels allow."""
    words = ("--model", str(target), "--prompt", "Hi", "--max-new-tokens", "20")
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
