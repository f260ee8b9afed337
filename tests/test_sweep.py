"""`sglang-dart sweep`: order, records, resumption and figures against scripted servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_dart import sweep as tool
from sglang_dart.cli import run_tool
from sglang_dart.measure import sweeping
from sglang_dart.measure.arms import Arm
from sglang_dart.measure.cells import CELL, REQUEST, Place, finished
from sglang_dart.measure.report import RawLog
from sglang_dart.measure.server import ServerError
from tests.engine.byte_tokenizer import write_tokenizer
from tests.measure.openai_server import ScriptedOpenAI


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Two prompt sets as --data words: three prompts and one."""
    words = []
    for name, prompts in (("talk", ["a", "b", "c"]), ("code", ["d"])):
        file = tmp_path / f"{name}.jsonl"
        lines = [{"question_id": p, "turns": [p, "never asked"]} for p in prompts]
        file.write_text("\n".join(map(json.dumps, lines)))
        words += ["--data", str(file)]
    return words


@pytest.fixture
def servers() -> Iterator[dict[str, ScriptedOpenAI]]:
    """Plain decoding at 20 ms a token, and speculation at 2 ms: --url words in `words`."""
    plain = ScriptedOpenAI(pace_s=0.020)
    fast = ScriptedOpenAI(pace_s=0.002, histogram=(1, 0, 1))
    with ExitStack() as stack:
        urls = [(n, stack.enter_context(s.serving())) for n, s in (("plain", plain), ("F", fast))]
        yield {
            "plain": plain,
            "F": fast,
            "words": [w for n, u in urls for w in ("--url", f"{n}={u}")],
        }


def last_line(capsys) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_sweep_of_running_servers(servers, data, tmp_path: Path, capsys) -> None:
    raw = tmp_path / "raw.jsonl"
    words = [*servers["words"], *data, "--concurrency", "1,2", "--repeats", "2", "--out", str(raw)]
    assert (
        run_tool(tool.app, "sweep", [*words, "--max-new-tokens", "9", "--warmup-tokens", "3"]) == 0
    )
    result = last_line(capsys)

    # Warm-up as wide as the cell, then an empty cache, then the first turns, at most so many open.
    plain = servers["plain"]
    assert plain.log[:5] == ["a 3", "flush", "a 9", "b 9", "c 9"]
    assert sorted(plain.log[5:7]) == ["a 3", "b 3"]
    assert plain.log[7] == "flush"
    assert plain.most_open == 2
    assert plain.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert plain.bodies[0]["temperature"] == 0

    rows = {(row["set"], row["concurrency"], row["arm"]): row for row in result["rows"]}
    assert len(rows) == 2 * 2 * 2
    slow, fast = rows["talk", 1, "plain"], rows["talk", 1, "F"]
    assert (slow["requests"], slow["errors"], slow["repeats"]) == (6, 0, 2)
    assert slow["tau"] is None
    # Two rounds of one token and of three.
    assert fast["tau"] == 2
    # Three answers of five tokens, one token each 20 ms; the machine may be slow, never fast.
    assert 5 < slow["tokens_per_s"]["median"] < 50
    assert slow["ttft_ms_p50"] >= 20
    assert 10 < slow["tpot_ms_p50"] <= slow["tpot_ms_p99"]
    assert slow["speedup"] == {"median": 1, "low": 1, "high": 1}
    assert 1.2 < fast["speedup"]["low"] <= fast["speedup"]["median"] <= fast["speedup"]["high"]
    assert {(row["arm"], row["sets"]) for row in result["summary"]} == {("F", 2)}
    for file in [result["report"], *result["figures"]]:
        assert Path(file).stat().st_size > 0
    assert len(result["figures"]) == 2

    # Every table and figure again, from the raw file alone.
    report = Path(result["report"])
    text = report.read_text()
    for file in [report, *map(Path, result["figures"])]:
        file.unlink()
    assert run_tool(tool.app, "sweep", ["--report", str(raw)]) == 0
    assert last_line(capsys) == result
    assert report.read_text() == text
    assert all(Path(figure).exists() for figure in result["figures"])
    assert "| talk | F " in text


def test_resumes_after_the_last_whole_cell(servers, data, tmp_path: Path, capsys) -> None:
    raw = tmp_path / "raw.jsonl"
    words = [*servers["words"], *data, "--concurrency", "1", "--repeats", "1", "--out", str(raw)]
    assert run_tool(tool.app, "sweep", words) == 0
    first = last_line(capsys)
    # Cut inside the last cell: two requests stand, its line does not.
    lines = raw.read_text().splitlines()
    assert json.loads(lines[-1])["record"] == CELL
    raw.write_text("\n".join(lines[:-1]) + "\n")
    cut = Place(**{name: json.loads(lines[-1])[name] for name in Place.__dataclass_fields__})
    assert cut not in finished(RawLog.reopen(raw))
    asked = {name: len(servers[name].log) for name in ("plain", "F")}

    assert run_tool(tool.app, "sweep", words) == 0
    second = last_line(capsys)
    assert len(servers["plain"].log) == asked["plain"]
    assert servers["F"].log[asked["F"] :] == ["d 32", "flush", "d 256"]
    counts = [[(r["arm"], r["set"], r["requests"]) for r in x["rows"]] for x in (first, second)]
    assert counts[0] == counts[1]

    # More may be asked for later; other settings may not.
    assert run_tool(tool.app, "sweep", [*words[:-4], "--repeats", "2", "--out", str(raw)]) == 0
    assert {row["repeats"] for row in last_line(capsys)["rows"]} == {2}
    assert run_tool(tool.app, "sweep", [*words, "--max-new-tokens", "3"]) == 2
    assert "a run with another new_tokens" in capsys.readouterr().err
    moved = [word.replace("F=", "plain2=") for word in words]
    assert run_tool(tool.app, "sweep", [*moved, "--url", f"F={words[1].partition('=')[2]}"]) == 2
    assert "F was served otherwise there" in capsys.readouterr().err


def test_failed_requests_are_counted_not_averaged(servers, data, tmp_path: Path, capsys) -> None:
    servers["F"].refuse = ("b",)
    words = [*servers["words"], *data, "--concurrency", "1", "--repeats", "1"]
    assert run_tool(tool.app, "sweep", [*words, "--out", str(tmp_path / "raw.jsonl")]) == 0
    rows = {(row["set"], row["arm"]): row for row in last_line(capsys)["rows"]}
    assert (rows["talk", "F"]["requests"], rows["talk", "F"]["errors"]) == (3, 1)
    assert rows["talk", "F"]["speedup"]["median"] > 1.5


def test_answers_of_one_token_have_no_pace(servers, data, tmp_path: Path, capsys) -> None:
    servers["F"].tokens = 1
    words = [*servers["words"], *data, "--concurrency", "1", "--repeats", "1"]
    assert run_tool(tool.app, "sweep", [*words, "--out", str(tmp_path / "raw.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "NaN" not in out
    rows = {(row["set"], row["arm"]): row for row in json.loads(out.splitlines()[-1])["rows"]}
    assert rows["talk", "F"]["tpot_ms_p50"] is None
    assert rows["talk", "F"]["ttft_ms_p50"] > 0


def test_an_arm_that_fails_does_not_end_the_others(servers, data, tmp_path: Path, capsys) -> None:
    servers["plain"].refuse = ("d",)
    raw = tmp_path / "raw.jsonl"
    words = [*servers["words"], *data, "--concurrency", "1", "--repeats", "1", "--out", str(raw)]
    assert run_tool(tool.app, "sweep", words) == 1
    result = last_line(capsys)
    assert "no request succeeded: BadRequestError" in result["failures"]["plain"]
    assert "\n" not in result["failures"]["plain"]
    rows = {(row["set"], row["arm"]): row for row in result["rows"]}
    assert ("code", "plain") not in rows
    assert rows["code", "F"]["speedup"] is None
    assert "plain failed: " in Path(result["report"]).read_text()
    # The same command mends it.
    servers["plain"].refuse = ()
    assert run_tool(tool.app, "sweep", words) == 0
    result = last_line(capsys)
    assert result["failures"] == {}
    assert {row["arm"] for row in result["rows"] if row["speedup"]} == {"plain", "F"}


def test_each_repeat_begins_with_another_arm() -> None:
    arms = [Arm("plain"), Arm("A"), Arm("B")]
    plan = list(sweeping.visits(arms, ["s", "t"], [1, 4], 3))
    assert [arm.name[0] for arm, _ in plan] == list("pABABpBpA")
    assert plan[4][1] == [Place("B", 1, s, c) for s in "st" for c in (1, 4)]


def test_a_server_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    log = RawLog(tmp_path / "raw.jsonl", {})

    @contextmanager
    def serve(_: Arm) -> Iterator[str]:
        raise ServerError("server exited with code 1\nno room")
        yield ""

    plan = sweeping.visits([Arm("A"), Arm("B")], ["s"], [1], 1)
    failures = sweeping.run(log, plan, serve, lambda *_: [], lambda _: None)
    assert [failure["arm"] for failure in failures] == ["A", "B"]
    assert sweeping.unmended(log) == dict.fromkeys("AB", "server exited with code 1 no room")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure"),
        (["--arm", "plain"], "--data"),
        (["--arm", "plain", "--data", "DATA"], "give --model"),
        (["--arm", "plain", "--data", "DATA", "--data", "DATA"], "two sets are called talk"),
        (["--arm", "plain", "--data", "DATA", "--model", "m", "--concurrency", "0"], "positive"),
        (["--arm", "plain", "--", "--speculative-num-steps", "3"], "belong to an arm"),
        (["--report", "/nowhere.jsonl"], "/nowhere.jsonl: no results file"),
        (["--url", "A=http://127.0.0.1:9", "--data", "DATA"], "no SGLang server answers there"),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], message: str, data, capsys) -> None:
    words = [data[1] if word == "DATA" else word for word in words]
    assert run_tool(tool.app, "sweep", words) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]


def test_arms_with_different_targets_are_refused(servers, data, capsys) -> None:
    servers["F"].model = "another"
    assert run_tool(tool.app, "sweep", [*servers["words"], *data]) == 2
    assert "different targets: another, scripted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "Qwen9", "--arm", "plain"], "neither one of Qwen3-1.7B"),
        (["--shapes", "Qwen3-8B", "--url", "A=http://h"], "--shapes starts its own servers"),
        (["--shapes", "Qwen3-8B", "--arm", "plain", "--accept-length", "0.5"], "accept-length"),
    ],
)
def test_bad_shapes_are_one_line(words: list[str], message: str, capsys) -> None:
    assert run_tool(tool.app, "sweep", words) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def target(golden: Path, tmp_path: Path) -> str:
    """The golden target with a tokenizer of bytes."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in (golden / "dart/target").iterdir():
        (folder / file.name).symlink_to(file)
    write_tokenizer(folder)
    return str(folder)


# Trees of one width, which a CPU would narrow by how fast its rounds are.
WIDE = """SGLANG_DART_CONFIG='{"cpu_rows": 64}'"""


@pytest.mark.server
def test_a_sweep_of_a_real_server(target, golden, data, tmp_path: Path, capsys) -> None:
    words = ["--arm", f"DART={golden / 'dart/head'} {WIDE}", "--model", target, *data]
    words += ["--concurrency", "1", "--repeats", "1", "--max-new-tokens", "24"]
    words += ["--out", str(tmp_path / "raw.jsonl")]
    assert run_tool(tool.app, "sweep", [*words, "--", "--max-total-tokens", "2048"]) == 0
    result = last_line(capsys)
    assert result["failures"] == {}
    rows = {row["set"]: row for row in result["rows"]}
    assert rows["talk"]["errors"] == 0
    # The golden head is right now and then, and a histogram came with the stream.
    assert rows["talk"]["tau"] > 1
    assert rows["talk"]["ttft_ms_p50"] > 0 < rows["talk"]["tpot_ms_p50"]
    requests = [r for r in RawLog.reopen(tmp_path / "raw.jsonl").records if r["record"] == REQUEST]
    assert [r["tokens"] for r in requests] == [24] * 4


@pytest.mark.server
def test_rounds_of_a_tiny_shape(golden: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tool, "cache_dir", lambda: tmp_path)
    words = ["--shapes", str(golden / "dart/target/config.json"), "--arm", "plain"]
    words += ["--arm", f"DART {WIDE} --speculative-num-draft-tokens 12", "--accept-length", "3.5"]
    words += ["--concurrency", "1", "--repeats", "1", "--prompt-tokens", "20", "--rounds", "24"]
    words += ["--out", str(tmp_path / "raw.jsonl")]
    assert run_tool(tool.app, "sweep", [*words, "--", "--dtype", "float32"]) == 0
    plain, dart = last_line(capsys)["rows"]
    assert (plain["tau"], plain["ratio"]["median"]) == (1.0, 1.0)
    # SGLang draws the lengths 3 and 4 by chance: some 200 rounds.
    assert 3.2 < dart["tau"] < 3.8
    assert dart["ratio"]["median"] > 0.3
    assert dart["published"] is None
