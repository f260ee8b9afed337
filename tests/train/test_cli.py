"""From the command line: a trained head, its files, the parity gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from transformers import AutoConfig, AutoTokenizer

from sglang_dart.cli import run_tool
from sglang_dart.draft.checkpoint import read_config
from sglang_dart.draft.dart import load_head
from sglang_dart.draft.dflash import load_dflash
from sglang_dart.draft.dflash_config import read_dflash_config
from sglang_dart.draft.domino import load_domino
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


def train_block(kind: str, target: Path, texts: Path, out: Path, *more: str) -> int:
    words = [kind, "--model", str(target), "--data", str(texts), "--out", str(out)]
    words += ["--device", "cpu", "--max-steps", "3", "--batch-tokens", "512", "--held-out", "0.1"]
    words += ["--layers", "2", "--taps", "1,4,6", "--block-size", "5", "--anchors", "6"]
    if kind == "domino":
        words += ["--emb-dim", "6", "--gru-hidden-dim", "10"]
    return run_tool(app, "train", [*words, *more])


@pytest.mark.parametrize(
    ("kind", "flags", "levels"),
    [("dflash", [], 4), ("domino", [], 5), ("domino", ["--no-shift-label"], 4)],
)
def test_block_drafter_is_published_and_passes_the_gate(
    kind: str,
    flags: list[str],
    levels: int,
    target_folder: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    more = ("--no-gate-server", "--gate-prompts", "2", "--gate-tokens", "12", *flags)
    assert train_block(kind, target_folder, texts, tmp_path, *more) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["gate"]["logit_difference"] < 1e-3
    assert result["gate"]["reference"] >= 1
    assert len(result["held_out"]["accuracy"]) == levels
    assert (result["held_out"]["base_chain"] is None) == (kind == "dflash")

    folder = tmp_path / "head"
    config = read_dflash_config(str(folder))
    assert (config.levels, config.block_size, config.taps(8)) == (levels, 5, (1, 4, 6))
    # The first row of the embedding that the tokenizer has no token for.
    assert config.mask_token_id == len(AutoTokenizer.from_pretrained(target_folder)) < 264
    load = load_domino if kind == "domino" else load_dflash
    load(str(folder), config)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    card = (folder / "README.md").read_text()
    assert "--speculative-algorithm DARTREE" in card
    assert ("without the correction head" in card) == (kind == "domino")

    # What SGLang's own DFLASH reads.
    theirs = parse_dflash_draft_config(draft_hf_config=AutoConfig.from_pretrained(folder))
    assert (theirs.block_size, theirs.target_layer_ids) == (5, [1, 4, 6])
    assert (theirs.mask_token_id, theirs.num_target_layers) == (config.mask_token_id, 8)
    assert theirs.is_domino == (kind == "domino")
    if kind == "domino":
        assert theirs.shift_label == (levels == 5)
        assert (theirs.emb_dim, theirs.gru_hidden_dim) == (6, 10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--taps", "1,x"], "--taps 1,x"),
        (["--taps", "4,1"], "--taps 4,1: must be ascending layers of the target, 0 .. 6"),
        (["--taps", "1,7"], "--taps 1,7: must be ascending layers of the target, 0 .. 6"),
        (["--labels", "soft"], "--labels soft: must be text or target"),
        (["--mask-token-id", "264"], "--mask-token-id 264"),
    ],
)
def test_bad_block_options_are_one_line(
    target_folder: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    words: list[str],
    message: str,
) -> None:
    assert train_block("domino", target_folder, texts, tmp_path, *words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


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
@pytest.mark.parametrize("kind", ["dart", "domino"])
def test_the_server_accepts_as_much_as_the_reference(
    kind: str, target_folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    more = ("--gate-prompts", "3", "--gate-tokens", "24", "--", "--max-total-tokens", "4000")
    if kind == "dart":
        code = train(target_folder, texts, tmp_path, *more)
    else:
        code = train_block(kind, target_folder, texts, tmp_path, *more)
    gate = json.loads(capsys.readouterr().out.splitlines()[-1])["gate"]
    assert gate["note"] == ""
    assert gate["server"] == pytest.approx(gate["reference"], rel=0.03)
    assert code == 0
