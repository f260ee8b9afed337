"""`sglang-dart eval`: arguments, exit codes, and conversations against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from sglang_dart import eval as tool
from sglang_dart.cli import run_tool
from sglang_dart.measure.arms import Arm
from sglang_dart.measure.client import Reply
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import RawLog, answer_record
from sglang_dart.options import ENVIRONMENT
from tests.measure.scripted import listening


@pytest.mark.parametrize(
    ("words", "both", "speculating"),
    [
        ([], (), ()),
        (["--page-size", "16"], ("--page-size", "16"), ()),
        (
            ["--speculative-num-steps", "3", "--trust-remote-code", "--page-size=16"],
            ("--trust-remote-code", "--page-size=16"),
            ("--speculative-num-steps", "3"),
        ),
        (
            ["--stop", "a", "b", "--speculative-eagle-topk=1", "--x"],
            ("--stop", "a", "b", "--x"),
            ("--speculative-eagle-topk=1",),
        ),
    ],
)
def test_flags_of_speculation_go_to_one_server(words, both, speculating) -> None:
    assert tool.split_flags(words) == (both, speculating)


def record(arm: str, ids: list[int]) -> dict:
    meta = {"spec_correct_drafts_histogram": [1, 1]}
    reply = Reply(tuple(ids), "", "length", 1.0, None, meta)
    return answer_record(arm, Question("set", "7", "", ("q",)), 0, [1, 2], reply)


@pytest.mark.parametrize(("gap", "code"), [(0.0004, 0), (0.5, 1), (None, 1)])
def test_exit_code_tells_a_clear_mismatch(tmp_path: Path, capsys, gap, code: int) -> None:
    path = tmp_path / "raw.jsonl"
    log = RawLog(path, {"kind": "exactness", "tolerance": 1e-3})
    log.append(record("plain", [5, 6]))
    log.append(record("cold", [5, 9]))
    if gap is not None:
        place = {"arm": "cold", "set": "set", "question": "7", "turn": 0}
        log.append({"record": "gap", "position": 1, "top_gap": gap, "got_gap": gap} | place)
    assert run_tool(tool.app, "eval", ["--report", str(path)]) == code
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]["together"]
    assert (counts["near_ties"], counts["clear"]) == (1 - code, code)


@pytest.fixture
def conversation(tmp_path: Path) -> Path:
    file = tmp_path / "talk.jsonl"
    turns = [
        {"question_id": 1, "turns": ["first", "second"]},
        {"question_id": 2, "turns": ["alone"]},
    ]
    file.write_text("\n".join(map(json.dumps, turns)))
    return file


class Characters:
    """A tokenizer whose ids are character codes and whose template is a line a message."""

    chat_template = "lines"

    def apply_chat_template(self, messages, **_) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['role']}:{m['content']}\n"]


@pytest.fixture
def heard(monkeypatch) -> Iterator[SimpleNamespace]:
    """A scripted server that answers "<n>", n the length of the prompt; remembers the prompts."""
    monkeypatch.setattr(tool, "load_tokenizer", lambda _: Characters())
    monkeypatch.setattr(tool, "_model_of", lambda _: "scripted")
    state = SimpleNamespace(prompts=[], flushed=0, url="")

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        state.prompts.append("".join(map(chr, body["input_ids"])))
        meta = {
            "finish_reason": {"type": "stop"},
            "completion_tokens": 3,
            "spec_correct_drafts_histogram": [0, 1],
        }
        text = f"<{len(body['input_ids'])}>"
        event = json.dumps({"text": text, "output_ids": [1, 2, 3], "meta_info": meta})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())
        return response

    async def flush(_: web.Request) -> web.Response:
        state.flushed += 1
        return web.Response()

    with listening({"/generate": answer, "/flush_cache": flush}) as state.url:
        yield state


def test_each_turn_follows_the_models_own_answers(
    heard: SimpleNamespace, conversation: Path, tmp_path: Path, capsys
) -> None:
    words = ["--url", heard.url, "--data", str(conversation), "--out", str(tmp_path / "raw.jsonl")]
    assert run_tool(tool.app, "eval", words) == 0
    first = "user:first\n"
    assert sorted(heard.prompts) == sorted(
        [first, "user:alone\n", f"{first}assistant:<{len(first)}>\nuser:second\n"]
    )
    assert heard.flushed == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["accept_length"]["talk"]
    assert result["answers"] == 3
    assert result["accept_length_micro"] == 2
    settings = json.loads((tmp_path / "raw.jsonl").read_text().splitlines()[0])
    assert settings["thinking"] is False
    # Again: everything is there.
    assert run_tool(tool.app, "eval", words) == 0
    assert len(heard.prompts) == 3


def test_arms_are_served_with_all_flags(
    heard: SimpleNamespace, conversation: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    started = []

    @contextmanager
    def serving(arm: Arm, model: str, shared: Sequence[str]) -> Iterator[str]:
        started.append((arm.name, model, *shared, *arm.flags))
        yield heard.url

    monkeypatch.setattr(Arm, "serving", serving)
    words = ["--model", "m", "--data", str(conversation), "--dtype", "bfloat16"]
    words += ["--arm", "one:DART=a", "--arm", "plain", "--out", str(tmp_path / "raw.jsonl")]
    assert (
        run_tool(tool.app, "eval", [*words, "--", "--page-size", "16", "--speculative-x", "3"]) == 0
    )
    shared = ("m", "--dtype", "bfloat16", "--page-size", "16")
    dart = ("--speculative-algorithm", "DART", "--speculative-draft-model-path", "a")
    assert started == [("one", *shared, *dart, "--speculative-x", "3"), ("plain", *shared)]
    assert len(heard.prompts) == 6
    lengths = json.loads(capsys.readouterr().out.splitlines()[-1])["accept_length"]
    assert set(lengths) == {"one", "plain"}


def test_a_variant_reaches_the_server_and_the_record(
    heard: SimpleNamespace, conversation: Path, tmp_path: Path, monkeypatch
) -> None:
    started = []

    @contextmanager
    def serving(arm: Arm, model: str, shared: Sequence[str]) -> Iterator[str]:
        started.append((arm.algorithm, arm.drafter, dict(arm.env)))
        yield heard.url

    monkeypatch.setattr(Arm, "serving", serving)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    raw = tmp_path / "raw.jsonl"
    words = ["--model", "m", "--algorithm", "DARTREE", "--drafter", "d", "--variant", "fixed"]
    assert run_tool(tool.app, "eval", [*words, "--data", str(conversation), "--out", str(raw)]) == 0
    assert started == [("DARTREE", "d", {ENVIRONMENT: '{"variant": "fixed"}'})]
    settings = json.loads(raw.read_text().splitlines()[0])
    assert settings["dart_config"] == '{"variant": "fixed"}'


def test_a_variant_does_not_overrule_the_environment(monkeypatch, capsys) -> None:
    monkeypatch.setenv(ENVIRONMENT, '{"budget": 16}')
    words = ["--model", "m", "--algorithm", "DARTREE", "--variant", "fixed"]
    assert run_tool(tool.app, "eval", words) == 2
    assert f"{ENVIRONMENT} is set" in capsys.readouterr().err


def test_first_turns_alone(heard: SimpleNamespace, conversation: Path, tmp_path: Path) -> None:
    words = ["--url", heard.url, "--data", str(conversation), "--out", str(tmp_path / "raw.jsonl")]
    assert run_tool(tool.app, "eval", [*words, "--first-turns"]) == 0
    assert sorted(heard.prompts) == ["user:alone\n", "user:first\n"]


def test_arms_are_reported_side_by_side(tmp_path: Path, capsys) -> None:
    path = tmp_path / "raw.jsonl"
    arms = [Arm("alone", "DART", "head").record(), Arm("with", "DART", "head").record()]
    log = RawLog(path, {"kind": "acceptance", "arms": arms})
    for arm, histogram in (("alone", [1, 1]), ("with", [0, 1])):
        meta = {"spec_correct_drafts_histogram": histogram}
        for name in ("a", "b"):
            reply = Reply((5, 6), "", "length", 1.0, None, meta)
            log.append(answer_record(arm, Question(name, "7", "", ("q",)), 0, [1], reply))
    log.append({"record": "slots", "arm": "with", "set": "a", "right": [3, 0], "asked": [4, 2]})
    log.append({"record": "slots", "arm": "with", "set": "b", "right": [1, 1], "asked": [4, 2]})
    assert run_tool(tool.app, "eval", ["--report", str(path)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    lengths = result["accept_length"]
    assert lengths["alone"]["together"]["accept_length_macro"] == 1.5
    assert lengths["with"]["a"]["accept_length_macro"] == 2
    assert result["slots"]["with"] == {"a": [0.75, 0], "b": [0.25, 0.5], "together": [0.5, 0.25]}
    assert "1.500 (1.500)" in shown
    assert "75/0" in shown
    assert "75/45/29/19/14/11" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "m", "--arm", "DART=d", "--drafter", "d"], "--arm is for accept length"),
        (["--model", "m", "--arm", "FAST=d", "--data", "x"], "--arm FAST=d: expected"),
        (["--url", "http://x", "--slots"], "--slots is for accept length"),
        (["--model", "m", "--dtype", "int8"], "--dtype int8: must be one of float32"),
        ([], "give --model FOLDER_OR_ID, or"),
        (["--url", "http://x", "--exactness"], "give --model FOLDER_OR_ID, or"),
        (["--model", "m"], "--data"),
        (["--report", "/nowhere.jsonl"], "/nowhere.jsonl: no results file"),
        (
            ["--model", "m", "--data", "gsm9k"],
            "--data gsm9k: no such file, and no set",
        ),
        (["--model", "m", "--variant", "fixed"], "--variant fixed: is for --algorithm DARTREE"),
        (
            ["--model", "m", "--algorithm", "DARTREE", "--variant", "wide"],
            "--variant wide: must be one of pruned, fixed, chain, marginal",
        ),
        (["--model", "m", "--max-samples", "0"], "Invalid value for '--max-samples'"),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], message: str, capsys) -> None:
    assert run_tool(tool.app, "eval", words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("modes", ["", "warm", "cold,warm"])
def test_unknown_modes_are_refused(modes: str) -> None:
    with pytest.raises(ValueError, match="choose from cold, cached, chunked, paged"):
        tool._modes(modes)
