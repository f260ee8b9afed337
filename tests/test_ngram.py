"""The tool `sglang-dart ngram`, command by command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_dart import _core, ngram_model
from sglang_dart.cli import main

GOLDEN = Path(__file__).parent / "golden" / "dart"
TRIE = str(GOLDEN / "ngram_order3.trie")


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `sglang-dart ngram ARGUMENTS`: (exit code, the JSON of the last line, stderr)."""

    def call(*arguments: Any) -> tuple[int, dict[str, Any], str]:
        code = main(["ngram", *map(str, arguments)])
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        return code, json.loads(lines[-1]) if lines else {}, captured.err

    return call


def test_convert_both_ways_and_inspect(tool: Any, tmp_path: Path) -> None:
    code, answer, _ = tool("convert", TRIE, tmp_path / "model.ngram")
    assert code == 0
    assert answer["ngrams"] == [246, 2089, 3191]
    assert answer["format"] == "compact"
    assert answer["tokens"] == 4163
    code, answer, _ = tool("convert", tmp_path / "model.ngram", tmp_path / "model.trie")
    assert code == 0
    # Lists of children in another order, but the same size.
    assert answer["bytes"] == Path(TRIE).stat().st_size
    code, answer, error = tool("inspect", tmp_path / "model.trie", "--verify")
    assert (code, answer["verified"], answer["format"]) == (0, True, "trie")
    assert "bytes_per_node" in error
    code, _, error = tool("convert", tmp_path / "model.ngram", tmp_path / "again.ngram")
    assert (code, "compact format already" in error) == (2, True)


def test_a_fault_is_exit_code_1(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.ngram"
    _core.convert_trie(TRIE, str(path))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    code, answer, _ = tool("inspect", path, "--verify")
    assert code == 1
    assert "does not match" in answer["fault"]


def test_a_damaged_file_is_one_line(tool: Any) -> None:
    path = GOLDEN / "ngram_corrupt" / "duplicate_child_token.trie"
    code, answer, error = tool("inspect", path)
    assert (code, answer) == (2, {})
    assert error == f"error: {path}: node 0 has two children with token 2\n"


def test_prune(tool: Any, tmp_path: Path) -> None:
    _core.convert_trie(TRIE, str(tmp_path / "model.ngram"))
    target = tmp_path / "small.ngram"
    code, answer, _ = tool("prune", tmp_path / "model.ngram", target, "--max-size", "20kB")
    assert code == 0
    assert answer["bytes"] <= 20_000 < answer["bytes_before"]
    code, answer, _ = tool("prune", target, tmp_path / "smaller.ngram", "--min-count", "2")
    assert code == 0
    assert [step["min_count"] for step in answer["metadata"]["pruned"]] == [1, 2]
    code, _, error = tool("prune", target, tmp_path / "same.ngram")
    assert (code, "give --min-count" in error) == (2, True)
    code, _, error = tool("prune", target, tmp_path / "x.ngram", "--max-size", "big")
    assert (code, "expected a number and a unit" in error) == (2, True)


def test_query(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_model, "CACHE", tmp_path)
    case = json.loads((GOLDEN / "ngram_queries.json").read_text())[0]
    context, candidates = (",".join(map(str, case[key])) for key in ("context", "candidates"))
    code, answer, _ = tool("query", TRIE, "--context", context, "--candidates", candidates)
    assert code == 0
    assert answer["probability"] == case["prob"]
    assert answer["matched_length"] == case["matched_len"]
    code, answer, _ = tool("query", TRIE, "--context", context, "--top", 3)
    assert len(answer["candidates"]) == 3
    assert answer["probability"] == sorted(answer["probability"], reverse=True)
    code, _, error = tool("query", TRIE, "--context", "one two")
    assert (code, "expected token ids" in error) == (2, True)


def test_build_from_token_ids(tool: Any, tmp_path: Path) -> None:
    documents = json.loads((GOLDEN / "ngram_corpus.json").read_text())["documents"]
    # 300 ends each document here, and is counted like any token.
    stream = [token for row in documents if row for token in [*row, 300]]
    np.save(tmp_path / "stream.npy", np.array(stream, np.int32))
    arguments = ["--token-ids", "--vocab-size", 301, "--eos-id", 300, "--memory", "2GB"]
    output = tmp_path / "model.ngram"
    code, answer, error = tool("build", tmp_path / "stream.npy", "-o", output, *arguments)
    assert code == 0, error
    assert answer["tokens"] == len(stream)
    assert answer["documents"] == sum(map(bool, documents))
    assert answer["left_out"] == {}
    golden = _core.NgramModel.open(TRIE)
    model = _core.NgramModel.open(str(output))
    for row in documents[:20]:
        for i in range(len(row) - 2):
            assert model.count(row[i : i + 3]) == golden.count(row[i : i + 3])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--token-ids"], "give --tokenizer, or --token-ids with --vocab-size and --eos-id"),
        (["--tokenizer", "x", "--vocab-size", 5], "give one of --tokenizer and --vocab-size"),
        (["--tokenizer", GOLDEN / "ngram_corrupt"], "ngram_corrupt: "),
    ],
)
def test_build_refuses(tool: Any, tmp_path: Path, arguments: list[Any], reason: str) -> None:
    shutil.copy(GOLDEN / "ngram_corpus.json", tmp_path / "a.jsonl")
    np.save(tmp_path / "a.npy", np.array([1, 2]))
    code, _, error = tool("build", tmp_path, "-o", tmp_path / "m.ngram", *arguments)
    assert code == 2
    assert reason in error
    assert error.count("\n") == 1
    code, _, error = tool("build", tmp_path, "-o", tmp_path / "m.trie", *arguments)
    assert (code, "writes the compact format" in error) == (2, True)
