"""The doctor finds what is wrong, and finds nothing where nothing is."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dart import doctor
from sglang_dart.measure.pairing import pairing


@pytest.fixture
def pair(golden: Path) -> tuple[str, str]:
    return str(golden / "dart/target"), str(golden / "dart/head")


@pytest.fixture
def head(tmp_path: Path, golden: Path) -> Path:
    """A copy of the golden head, to break."""
    return Path(shutil.copytree(golden / "dart/head", tmp_path / "head"))


def edit(head: Path, **fields) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | fields))


def texts(lines, level: str) -> str:
    return "\n".join(text for found, text in lines if found == level)


def test_fitting_pair(pair: tuple[str, str]) -> None:
    lines = list(pairing(*pair))
    assert texts(lines, "wrong") == ""
    good = texts(lines, "good")
    assert "hidden size 64, vocabulary 257" in good
    assert "taps: outputs of layers 1, 3, 4 of 8" in good
    assert "8 levels" in good
    # The golden head drafts without an n-gram model, and nothing else is odd.
    assert texts(lines, "note").startswith("no n-gram model is set")
    assert len(texts(lines, "note").splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_hidden_size": 128}, "target_hidden_size is 128, the target's hidden size is 64"),
        ({"vocab_size": 300}, "vocab_size 300 exceeds the target's 257"),
        ({"draft_length": None}, "draft_length"),
        ({"intermediate_size": 97}, "tensors do not match"),
        ({"dart_config": {"budgte": 3}}, "budgte"),
    ],
)
def test_wrong_pairs(pair: tuple[str, str], head: Path, fields: dict, message: str) -> None:
    edit(head, **fields)
    assert message in texts(pairing(pair[0], str(head)), "wrong")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 10000.0}, "rope_theta 10000, the target's is 1e+06"),
        ({"eos_token_id": 3}, "eos_token_id 3, the target's is 256"),
        ({"trained": False}, "this head is untrained"),
    ],
)
def test_likely_reasons_of_few_accepted_drafts(
    pair: tuple[str, str], head: Path, fields: dict, message: str
) -> None:
    edit(head, **fields)
    lines = list(pairing(pair[0], str(head)))
    assert message in texts(lines, "note")
    assert texts(lines, "wrong") == ""


def test_broken_weights(pair: tuple[str, str], head: Path) -> None:
    file = head / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    assert "not finite: fc.weight" in texts(pairing(pair[0], str(head)), "wrong")


def test_norms_of_one_mean_untrained(pair: tuple[str, str], head: Path) -> None:
    file = head / "model.safetensors"
    tensors = load_file(file)
    ones = {n: torch.ones_like(t) if "norm" in n else t for n, t in tensors.items()}
    save_file(ones, file)
    assert "untrained" in texts(pairing(pair[0], str(head)), "note")


def levels(findings) -> dict[str, str]:
    return {finding.text: finding.level for finding in findings}


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """Versions that importlib.metadata reports; absent ones are not installed."""
    table = {name: f"{tested}.0" for name, tested in doctor.TESTED.items()}

    def version(name: str) -> str:
        if name not in table:
            raise importlib.metadata.PackageNotFoundError(name)
        return table[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return table


def test_tested_versions_are_good(installed: dict[str, str]) -> None:
    installed["torch"] = f"{doctor.TESTED['torch']}+cpu"
    assert set(levels(doctor.versions()).values()) == {"good"}


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("sglang", "0.5.24", "note"),
        ("sglang", "0.5.230", "note"),
        ("sglang", "0.6.0", "wrong"),
        ("sglang", None, "wrong"),
        ("flashinfer-python", None, "note"),
        ("transformers", "5.2.0", "note"),
    ],
)
def test_other_versions(installed: dict[str, str], name: str, version, level: str) -> None:
    if version is None:
        del installed[name]
    else:
        installed[name] = version
    (found,) = [f for f in doctor.versions() if f.text.startswith(f"{name} ")]
    assert found.level == level
    assert doctor.TESTED[name] in found.text


def visible(monkeypatch, present: bool = True) -> None:
    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        name, value = doctor.ENTRY_POINTS[group]
        return [importlib.metadata.EntryPoint(name, value, group)] if present else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(doctor, "_import_problem", lambda module: None)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)


def test_visible_plugins_are_good(monkeypatch) -> None:
    visible(monkeypatch)
    assert {finding.level for finding in doctor.plugins()} == {"good"}


def test_white_list_that_hides_us_is_named(monkeypatch) -> None:
    visible(monkeypatch)
    monkeypatch.setenv("SGLANG_PLUGINS", "other, sglang_dart")
    wrong = [finding.text for finding in doctor.plugins() if finding.level == "wrong"]
    assert wrong == [
        "SGLANG_PLUGINS=other, sglang_dart hides sglang_dart_cpu; add it or unset the variable"
    ]


def test_missing_entry_points_are_named(monkeypatch) -> None:
    visible(monkeypatch, present=False)
    wrong = [finding.text for finding in doctor.plugins() if finding.level == "wrong"]
    assert [text.split(";")[0] for text in wrong] == [
        "no entry point sglang_dart in sglang.srt.plugins",
        "no entry point sglang_dart_cpu in sglang.srt.platforms",
    ]


def test_import_error_is_shown_with_its_cause() -> None:
    assert doctor._import_problem("json") is None
    problem = doctor._import_problem("sglang_dart.no_such_module")
    assert problem == "ModuleNotFoundError: No module named 'sglang_dart.no_such_module'"


def test_moved_symbols_are_wrong(monkeypatch) -> None:
    from sglang_dart.engine import upstream

    monkeypatch.setattr(upstream, "check", lambda: ["sglang 9: x.y is gone"])
    assert levels(doctor.contract()) == {"sglang 9: x.y is gone": "wrong"}


def test_exit_code_and_last_line(monkeypatch, capsys, pair: tuple[str, str]) -> None:
    from sglang_dart.cli import run_tool

    for name in ("versions", "hardware", "plugins", "contract"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    words = ["--model-path", pair[0], "--drafter"]
    assert run_tool(doctor.app, "doctor", [*words, pair[1]]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is True
    assert run_tool(doctor.app, "doctor", [*words, pair[0]]) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] is False
    assert [f["level"] for f in result["findings"]] == ["wrong"]
    assert run_tool(doctor.app, "doctor", ["--drafter", pair[1]]) == 2
