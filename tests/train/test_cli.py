"""From the command line: a trained head, its files, the parity gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from sglang_dart.cli import run_tool
from sglang_dart.draft.checkpoint import read_config
from sglang_dart.draft.dart import load_head
from sglang_dart.options import load_dart_options
from sglang_dart.train.cli import app


def train(target: Path, texts: Path, out: Path, *more: str) -> int:
    words = ["dart", "--model", str(target), "--data", str(texts), "--out", str(out)]
    words += ["--device", "cpu", "--max-steps", "3", "--batch-tokens", "512"]
    words += ["--draft-vocab-size", "200", "--held-out", "0.1"]
    return run_tool(app, "train", [*words, *more])


def test_head_is_published_and_passes_the_gate(
    target_folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = train(
        target_folder,
        texts,
        tmp_path,
        *("--no-gate-server", "--gate-prompts", "2", "--gate-tokens", "12"),
        *("--final-norm-passes", "1", "--draft-length", "3", "--intermediate-size", "16"),
    )
    assert code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    gate = result["gate"]
    assert gate["logit_difference"] < 1e-3
    assert gate["reference"] >= 1
    assert gate["server"] is None
    assert gate["note"] == "the server was not asked"

    folder = tmp_path / "head"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    config = read_config(str(folder))
    assert (config.draft_length, config.draft_vocab_size, config.intermediate_size) == (3, 200, 16)
    assert load_dart_options(config.raw).final_norm_passes == 1
    assert AutoConfig.from_pretrained(folder).model_type == "llama"
    head = load_head(str(folder), config)
    assert head.target_id().diff().min() >= 1
    assert 258 in head.target_id()
    card = (folder / "README.md").read_text()
    assert '"draft_length": 3' in card
    assert f"{result['held_out']['accuracy'][0]:.1%}" in card
    assert f"| {gate['reference']:.3f} | - (the server was not asked) |" in card


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-vocab-size", "0"], "draft-vocab-size"),
        (["--device", "tpu"], "--device tpu"),
        (["--precision", "fp8"], "--precision fp8"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_options_are_one_line(
    target_folder: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    words: list[str],
    message: str,
) -> None:
    assert train(target_folder, texts, tmp_path, *words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.server
def test_the_server_accepts_as_much_as_the_reference(
    target_folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = train(
        target_folder,
        texts,
        tmp_path,
        *("--gate-prompts", "3", "--gate-tokens", "24", "--", "--max-total-tokens", "4000"),
    )
    gate = json.loads(capsys.readouterr().out.splitlines()[-1])["gate"]
    assert gate["note"] == ""
    assert gate["server"] == pytest.approx(gate["reference"], rel=0.03)
    assert code == 0
