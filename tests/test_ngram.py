"""The tool `sglang-dart ngram`, command by command."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_dart import _core, ngram_model
from sglang_dart.cli import main
from sglang_dart.score.continuity import CountedNgrams
from tests.tiny_tokenizer import make_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "dart"
IDS = ["--token-ids", "--vocab-size", 301, "--eos-id", 300]
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
    arguments = [*IDS, "--memory", "2GB"]
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


def write_texts(folder: Path) -> list[str]:
    """Texts in a file of every format; the last one is of an evaluation set."""
    documents = [f"the cat {i} sat on the mat" for i in range(40)] + ["Name three colours."]
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in documents[:10]]
    (folder / "a.jsonl").write_text("\n".join(lines))
    with gzip.open(folder / "b.txt.gz", "wt") as file:
        file.write("\n".join(documents[10:20]))
    pq.write_table(pa.table({"text": documents[20:]}), folder / "c.parquet", row_group_size=4)
    return documents[:-1]


def test_texts_to_answers(tool: Any, tmp_path: Path) -> None:
    """Build with two processes, an evaluation set kept out; ask with text."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps({"turns": ["name THREE colours"]}))
    documents = write_texts(tmp_path / "texts")
    output = tmp_path / "model.ngram"
    name = ["--tokenizer", tmp_path / "tokenizer"]
    settings = ["--order", 4, "--workers", 2, "--memory", "2GB", "--exclude", held_out]
    code, answer, error = tool("build", tmp_path / "texts", "-o", output, *name, *settings)
    assert code == 0, error
    assert "removed for overlap with the evaluation sets (13-gram): 1\n" in error
    assert (answer["documents"], answer["order"]) == (len(documents), 4)
    assert answer["tokenizer"] == "tokenizer"
    rows = [[*row, tokenizer.eos_token_id] for row in tokenizer(documents)["input_ids"]]
    counts = CountedNgrams.of_documents(rows, 4).counts
    assert (answer["nodes"], answer["tokens"]) == (len(counts), sum(map(len, rows)))
    # Progress of both stages.
    assert "count" in error
    assert "add up" in error

    code, answer, error = tool("query", output, "--context", "the cat", "--top", 1, *name)
    assert (code, answer["matched_length"]) == (0, [2])
    assert tokenizer.decode(answer["candidates"]) in error
    other = make_tokenizer(tmp_path / "other", "a text about dogs that sleep all day long")
    assert other.get_vocab() != tokenizer.get_vocab()
    code, _, error = tool("query", output, "--context", "the", "--tokenizer", tmp_path / "other")
    assert (code, error.count("\n")) == (2, 1)
    assert "built for tokenizer (" in error
    assert "the target uses other (" in error


def test_a_killed_build_goes_on(tmp_path: Path) -> None:
    """The command dies without a word, and so do its workers; the same command ends the work."""
    random = np.random.default_rng(0)
    rows = [(random.zipf(1.4, 20) % 250).tolist() for _ in range(6000)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "ids.parquet", row_group_size=4)
    output, done = tmp_path / "model.ngram", tmp_path / "model.ngram.work" / "done"
    words = [tmp_path / "ids.parquet", "-o", output, "--token-ids", "--vocab-size", 300]
    words += ["--eos-id", 256, "--workers", 2, "--memory", "2GB"]
    command = [sys.executable, "-m", "sglang_dart.ngram", "build", *map(str, words)]
    build = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while build.poll() is None and (not done.is_dir() or len(list(done.iterdir())) < 20):
        time.sleep(0.01)
    workers = psutil.Process(build.pid).children(recursive=True)
    assert len(workers) >= 2
    build.kill()
    build.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    finished = {file.name: file.stat().st_mtime_ns for file in done.glob("*.json")}
    assert 20 <= len(finished) < 1500
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert not done.exists()
    model = _core.NgramModel.open(str(output))
    model.verify()
    counts = CountedNgrams.of_documents([[*row, 256] for row in rows], 3).counts
    assert model.node_count == len(counts)
    assert all(model.count(path) == count for path, count in counts.items())


def test_the_example(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    settings = {"TARGET": str(tmp_path / "tokenizer"), "OUT": str(tmp_path / "out")}
    script = Path(__file__).parents[1] / "examples" / "build_ngram.sh"
    done = subprocess.run(
        ["bash", script],
        env=os.environ | settings | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *_, asked, serve = done.stdout.splitlines()
    assert sum(json.loads(asked)["probability"]) > 0
    assert f'"ngram": "{tmp_path}/out/small.ngram"' in serve


def test_a_model_of_the_hub(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: TRIE)
    code, answer, _ = tool("inspect", "fvliang/dart-qwen3-ngram:small.trie")
    assert (code, answer["nodes"]) == (0, 5527)
    code, _, error = tool("inspect", "small.trie")
    assert (code, "not a hub name `repo/id:file`" in error) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            [*IDS, "--exclude", GOLDEN / "ngram_corpus.json"],
            "--exclude compares words: give texts instead of --token-ids",
        ),
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
