"""How arms are named, served and recorded."""

from __future__ import annotations

import json

import pytest

from sglang_dart.measure.arms import Arm, parse_arms

LINE = """wide:dart=my/head X='{"a": 1}' Y=2 --speculative-num-draft-tokens 61"""


def test_an_arm_in_one_word() -> None:
    arm = Arm.parse(LINE)
    assert (arm.name, arm.algorithm, arm.drafter) == ("wide", "DART", "my/head")
    assert arm.env == {"X": '{"a": 1}', "Y": "2"}
    assert arm.flags == (
        *("--speculative-algorithm", "DART", "--speculative-draft-model-path", "my/head"),
        *("--speculative-num-draft-tokens", "61"),
    )
    assert Arm.parse("NGRAM").flags == ("--speculative-algorithm", "NGRAM")
    assert Arm.parse("plain") == Arm("plain", "plain")
    assert Arm.parse("plain").flags == ()


def test_the_command_is_what_one_would_type() -> None:
    command = Arm.parse(LINE).command("my model", ["--dtype", "float32"])
    assert command == (
        """X='{"a": 1}' Y=2 python -m sglang.launch_server --model-path 'my model' """
        "--dtype float32 --speculative-algorithm DART --speculative-draft-model-path my/head "
        "--speculative-num-draft-tokens 61"
    )


@pytest.mark.parametrize(
    "arm", [Arm.parse(LINE), Arm.running("far=http://h:1/"), Arm.parse("plain")]
)
def test_a_record_gives_the_arm_back(arm: Arm) -> None:
    assert Arm.of(json.loads(json.dumps(arm.record()))) == arm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("MEDUSA", "with one of plain, DART, DARTREE, NGRAM, EAGLE3, DFLASH"),
        (":DART", "expected"),
        ("DART=x --page-size 16", "--page-size: an arm has --speculative-... flags only"),
        ("DART=x 16", "16: an arm has"),
        ("plain=x", "plain decoding has no drafter"),
        ("plain --speculative-num-steps 3", "plain decoding has no drafter and no such flags"),
    ],
)
def test_bad_arms_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        Arm.parse(text)


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two arms are called DART"):
        parse_arms(["DART=a", "DART=b"], [])
    names = [arm.name for arm in parse_arms(["DART=a", "B:DART=b"], ["C=http://c"])]
    assert names == ["DART", "B", "C"]
    with pytest.raises(ValueError, match="nothing to measure"):
        parse_arms([], [])
    with pytest.raises(ValueError, match="expected NAME=http"):
        parse_arms([], ["http://c"])
