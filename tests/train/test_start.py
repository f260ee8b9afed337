"""Runs that begin from a drafter in the published layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dart.cli import run_tool
from sglang_dart.train.cli import app
from sglang_dart.train.initial import given_config
from sglang_dart.train.record import read_log

# Other sizes than the defaults, so that they can only come from the drafter.
SIZES = {
    "dart": "--draft-vocab-size 200 --draft-length 3 --intermediate-size 16 --final-norm-passes 1",
    "dflash": "--layers 1 --taps 1,4,6 --block-size 4 --intermediate-size 16 --anchors 8",
    "domino": "--layers 2 --taps 1,4,6 --block-size 5 --no-shift-label --emb-dim 6 "
    "--gru-hidden-dim 10 --mask-token-id 263 --anchors 8",
}
# The number of anchors is no size, but held-out losses depend on it.
TRAINED_ON = {"dart": "", "dflash": "--anchors 8", "domino": "--anchors 8"}


@pytest.fixture(scope="module")
def began(target_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Began:
    return Began(target_folder, texts, tmp_path_factory.mktemp("began"))


class Began:
    """Trains drafters; `head(kind)` is one after 30 steps."""

    def __init__(self, target: Path, texts: Path, folder: Path) -> None:
        self.target, self.texts, self.folder = target, texts, folder

    def train(self, kind: str, out: Path, words: str) -> int:
        fixed = f"--model {self.target} --data {self.texts} --out {out} --device cpu --no-gate"
        fixed += " --batch-tokens 512 --held-out 0.1 --warmup-steps 1 --epochs 100"
        return run_tool(app, "train", [kind, *fixed.split(), *words.split()])

    def head(self, kind: str) -> Path:
        out = self.folder / kind
        if not out.exists():
            assert self.train(kind, out, f"--max-steps 30 --lr 3e-3 {SIZES[kind]}") == 0
        return out / "head"


def held_out(folder: Path) -> list[dict[str, str]]:
    return [row for row in read_log(folder / "log.csv") if row["split"] == "held-out"]


@pytest.mark.parametrize("kind", SIZES)
def test_without_a_step_it_is_the_given_drafter(kind: str, began: Began, tmp_path: Path) -> None:
    head = began.head(kind)
    words = f"--max-steps 1 --lr 0 {TRAINED_ON[kind]} --start {head}"
    assert began.train(kind, tmp_path, words) == 0
    given, found = (load_file(f / "model.safetensors") for f in (head, tmp_path / "head"))
    assert given.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    before, after = (json.loads((f / "config.json").read_text()) for f in (head, tmp_path / "head"))
    assert before == after
    expected, found = held_out(began.folder / kind)[-1], held_out(tmp_path)[-1]
    # The last weights were scored before they were rounded to bfloat16.
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-3)
    settings = json.loads((tmp_path / "run.json").read_text())
    assert settings["start"] == str(head)
    assert settings["borrow"] is False
    assert f"Began from the weights of `{head}`." in (tmp_path / "head/README.md").read_text()


@pytest.mark.parametrize("kind", SIZES)
def test_it_goes_on_learning(kind: str, began: Began, tmp_path: Path) -> None:
    head = began.head(kind)
    words = f"--max-steps 20 --lr 2e-3 {TRAINED_ON[kind]} --start {head}"
    assert began.train(kind, tmp_path, words) == 0
    before, after = held_out(began.folder / kind)[-1], held_out(tmp_path)[-1]
    assert float(after["loss"]) < float(before["loss"])


@pytest.mark.parametrize("kind", SIZES)
def test_a_resumed_run_ends_with_the_same_bits(kind: str, began: Began, tmp_path: Path) -> None:
    head = began.head(kind)
    words = f"--max-steps 8 --save-interval 4 --lr 1e-3 {TRAINED_ON[kind]} --start {head}"
    assert began.train(kind, tmp_path / "whole", words) == 0
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    shutil.rmtree(killed / "checkpoints/step-00000008")
    (killed / "head/model.safetensors").unlink()
    assert began.train(kind, killed, words) == 0
    whole, resumed = (load_file(f / "head/model.safetensors") for f in (tmp_path / "whole", killed))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_a_run_does_not_resume_from_another_drafter_in_the_same_place(
    began: Began, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    start = tmp_path / "start"
    shutil.copytree(began.head("dart"), start)
    words = f"--max-steps 2 --save-interval 1 --start {start}"
    assert began.train("dart", tmp_path / "run", f"{words} --lr 1e-3") == 0
    shutil.copy(tmp_path / "run/head/model.safetensors", start)
    assert began.train("dart", tmp_path / "run", f"{words} --lr 1e-3") == 2
    assert "its run has start_crc32 = " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("dart", "--draft-length 7", "--draft-length 7: the drafter {} has --draft-length 3"),
        ("dart", "--draft-vocab-size 100", "100: the drafter {} has --draft-vocab-size 200"),
        ("dart", "--final-norm-passes 2", "2: the drafter {} has --final-norm-passes 1"),
        ("dart", "--borrow", "--borrow: with --start all weights are {}'s; leave it out"),
        ("dart", "--no-borrow", "--no-borrow: with --start all weights are {}'s; leave it out"),
        ("dflash", "--layers 2", "--layers 2: the drafter {} has --layers 1"),
        ("dflash", "--taps 1,2,3", "--taps 1,2,3: the drafter {} has --taps 1,4,6"),
        ("domino", "--block-size 4", "--block-size 4: the drafter {} has --block-size 5"),
        ("domino", "--shift-label", "--shift-label: the drafter {} has --no-shift-label"),
        ("domino", "--emb-dim 5", "--emb-dim 5: the drafter {} has --emb-dim 6"),
        ("domino", "--mask-token-id 262", "262: the drafter {} has --mask-token-id 263"),
    ],
)
def test_settings_that_contradict_the_drafter(
    kind: str,
    words: str,
    message: str,
    began: Began,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    head = began.head(kind)
    capsys.readouterr()
    assert began.train(kind, tmp_path / "run", f"--start {head} {words}") == 2
    assert message.format(head) in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("dart", "domino", "is this the right drafter?"),
        ("dflash", "dart", "is this the right drafter?"),
        ("dflash", "domino", "a domino drafter; continue it with `train domino`"),
        ("domino", "dflash", "a dflash drafter; continue it with `train dflash`"),
    ],
)
def test_drafters_of_another_kind(
    kind: str,
    given: str,
    message: str,
    began: Began,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    head = began.head(given)
    capsys.readouterr()
    assert began.train(kind, tmp_path / "run", f"--start {head}") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["dart", "domino"])
def test_drafters_of_another_target(
    kind: str, began: Began, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    start = tmp_path / "start"
    shutil.copytree(began.head(kind), start)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    capsys.readouterr()
    assert began.train(kind, tmp_path / "run", f"--start {start}") == 2
    assert "belongs to another target" in capsys.readouterr().err.splitlines()[-1]


def test_a_drafter_without_a_mask_token_needs_one(
    began: Began, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    start = tmp_path / "start"
    shutil.copytree(began.head("dflash"), start)
    config = json.loads((start / "config.json").read_text())
    mask = config["dflash_config"].pop("mask_token_id")
    (start / "config.json").write_text(json.dumps(config))
    words = f"--start {start} --max-steps 1 --lr 0"
    assert began.train("dflash", tmp_path / "run", words) == 2
    assert "name one with --mask-token-id" in capsys.readouterr().err.splitlines()[-1]
    assert began.train("dflash", tmp_path / "run", f"{words} --mask-token-id {mask}") == 0
    written = json.loads((tmp_path / "run/head/config.json").read_text())
    assert written["dflash_config"]["mask_token_id"] == mask


def test_the_ngram_model_of_the_given_drafter_stays_with_it() -> None:
    raw = {"dart_config": {"final_norm_passes": 1, "ngram": "../3gram.ngram"}}
    assert given_config(raw)["dart_config"] == {"final_norm_passes": 1}
    assert raw["dart_config"]["ngram"] == "../3gram.ngram"
