"""A wrong `shift_label` is reported by the server itself, from its first prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import dartree
from tests.engine.byte_tokenizer import write_tokenizer
from tests.engine.conftest import greedy, server

pytestmark = pytest.mark.server

WRONG = "in config.json is wrong"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The golden target with a tokenizer, without which there is no text to read."""
    folder = tmp_path_factory.mktemp("target")
    for file in (dartree.GOLDEN / "target").iterdir():
        (folder / file.name).symlink_to(file)
    write_tokenizer(folder)
    return str(folder)


def flipped(folder: Path) -> str:
    """The golden drafter whose slots are shifted, with a config that denies it."""
    shutil.copytree(dartree.GOLDEN / "domino_shift", folder)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["shift_label"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_server_says_so(target, tmp_path):
    drafter = flipped(tmp_path / "drafter")
    run = dartree.read("dflash_cases.json")
    prompts = [run["prompts"][1] + run["ar_tokens"][1][:70], run["prompts"][1]]
    flags = ("--speculative-algorithm", "DARTREE", "--speculative-draft-model-path", drafter)
    with server(target, *flags) as api:
        # Before any request, on a text that says nothing to a target of random weights.
        assert "self-test: slot " in api.log.read_text()
        assert WRONG not in api.log.read_text()
        free = api.used_slots()
        for ids in prompts:
            answer = api.generate({"input_ids": ids, "sampling_params": greedy(60)})
        (line,) = [line for line in api.log.read_text().splitlines() if WRONG in line]
        assert "shift_label false in config.json is wrong" in line
        assert "set it to true" in line
        # A wrong label costs speed alone.
        assert answer["output_ids"] == run["ar_tokens"][1][:60]
        assert api.used_slots() == free == 0
