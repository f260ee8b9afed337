"""The comparison with plain decoding, against scripted servers that err on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from sglang_dart.measure.exactness import Prompt, Servers, compare
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import (
    PLAIN,
    RawLog,
    exactness_summary,
    exactness_tables,
    mismatches,
    vacuous_arms,
)
from sglang_dart.measure.server import Server
from tests.measure.scripted import listening

LENGTH = 5
PROMPTS = [Prompt(Question("set", str(n), "", ("ask",)), (n, n + 1)) for n in range(10, 16)]
TOLERANCE = 1e-3


class Scripted:
    """Servers whose plain answer to (n, n + 1) is n, n, n, ...; speculation errs as told.

    errors: {mode flag or "": {n: token at place 2}}. Token 1 ties with the best, others do not.
    """

    def __init__(self, errors: dict[str, dict[int, int]], speculates: bool = True) -> None:
        self.errors = errors
        self.speculates = speculates
        self.started: list[str] = []
        self.asked: list[tuple[str, int]] = []
        self.histogram = [2, 1]

    @contextmanager
    def start(self, label: str, flags: Sequence[str]) -> Iterator[Server]:
        self.started.append(label)
        speculative = "--spec" in flags
        errors = self.errors.get(flags[-1], self.errors.get("", {})) if speculative else {}

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            n = body["input_ids"][0]
            self.asked.append((label, n))
            if body.get("return_logprob"):
                return web.json_response(self.log_probs(body))
            ids = [n] * LENGTH
            if n in errors:
                ids[2:] = [errors[n]] * (LENGTH - 2)
            meta = {"finish_reason": {"type": "length"}, "cached_tokens": 1}
            if speculative and self.speculates:
                meta["spec_correct_drafts_histogram"] = self.histogram
            return web.json_response({"output_ids": ids, "text": "", "meta_info": meta})

        with listening({"/generate": answer}) as url:
            yield Server(url, 0, Path())

    def log_probs(self, body: dict) -> dict:
        n = body["input_ids"][0]
        # Asked where the common prefix ends: the prompt and two equal tokens.
        assert body["input_ids"] == [n, n + 1, n, n]
        (token,) = body["token_ids_logprob"]
        gap = 0.0005 if token == 1 else 2.0
        top = [[-1.0, n, None], [-1.0 - gap, token, None]]
        meta = {
            "finish_reason": {"type": "length"},
            "output_top_logprobs": [top],
            "output_token_ids_logprobs": [[[-1.0 - gap, token, None]]],
        }
        return {"output_ids": [n], "text": "", "meta_info": meta}


def run(scripted: Scripted, folder: Path, modes: Sequence[str]) -> RawLog:
    log = RawLog(folder / "raw.jsonl", {"kind": "exactness"})
    servers = Servers(scripted.start, ("--plain",), ("--spec",))
    compare(
        PROMPTS,
        modes,
        servers,
        log,
        folder / "plain.jsonl",
        new_tokens=LENGTH,
        concurrency=3,
        progress=lambda *_: None,
    )
    return log


def test_counts_both_kinds_per_mode(tmp_path: Path) -> None:
    scripted = Scripted({"": {11: 1}, "16": {12: 2, 13: 1}})
    modes = ["cold", "cached", "paged"]
    log = run(scripted, tmp_path, modes)
    assert scripted.started == ["cold + cached", "paged", PLAIN]
    summary = exactness_summary(log, modes, TOLERANCE)
    kinds = {arm: (row["equal"], row["near_ties"], row["clear"]) for arm, row in summary.items()}
    assert kinds == {
        "cold": (5, 1, 0),
        "cached": (5, 1, 0),
        "paged": (4, 1, 1),
        "together": (14, 3, 1),
    }
    assert summary["cold"]["tokens"] == 6 * LENGTH
    assert summary["cold"]["accept_length"] == pytest.approx(4 / 3)
    wrong = mismatches(log, "paged")["set", "12", 0]
    assert (wrong.position, wrong.expected, wrong.got) == (2, 12, 2)
    assert (wrong.top_gap, wrong.got_gap) == (2.0, 2.0)
    assert len(exactness_tables(log, modes, TOLERANCE, summary)) == 2


def test_all_equal_asks_for_no_gap(tmp_path: Path) -> None:
    log = run(Scripted({}), tmp_path, ["cold"])
    summary = exactness_summary(log, ["cold"], TOLERANCE)
    assert summary["together"]["equal"] == len(PROMPTS)
    assert not log.gaps()
    assert len(exactness_tables(log, ["cold"], TOLERANCE, summary)) == 1


def test_cached_prompts_are_sent_twice_in_a_row(tmp_path: Path) -> None:
    scripted = Scripted({})
    run(scripted, tmp_path, ["cached"])
    asked = [n for label, n in scripted.asked if label == "cached"]
    assert sorted(asked) == sorted([prompt.input_ids[0] for prompt in PROMPTS] * 2)


def test_finished_run_asks_nobody_again(tmp_path: Path) -> None:
    run(Scripted({"": {11: 2}}), tmp_path, ["cold"])
    again = Scripted({"": {11: 2}})
    log = run(again, tmp_path, ["cold"])
    assert again.started == []
    assert exactness_summary(log, ["cold"], TOLERANCE)["together"]["clear"] == 1


def test_interrupted_run_asks_for_the_rest(tmp_path: Path) -> None:
    run(Scripted({}), tmp_path, ["cold"])
    raw = tmp_path / "raw.jsonl"
    lines = raw.read_text().splitlines()
    # Settings, three answers, and a fourth cut short by a crash.
    raw.write_text("\n".join(lines[:4]) + "\n" + lines[4][:25])
    again = Scripted({})
    log = run(again, tmp_path, ["cold"])
    assert len(again.asked) == len(PROMPTS) - 3
    assert exactness_summary(log, ["cold"], TOLERANCE)["together"]["equal"] == len(PROMPTS)
    # Plain answers came from the cache.
    assert again.started == ["cold"]


def test_arms_that_accepted_no_draft_are_named(tmp_path: Path) -> None:
    scripted = Scripted({})
    log = run(scripted, tmp_path, ["cold"])
    scripted.histogram = [5]
    run(scripted, tmp_path, ["paged"])
    log = RawLog.reopen(log.path)
    assert vacuous_arms(exactness_summary(log, ["cold", "paged"], TOLERANCE)) == ["paged"]


def test_server_that_does_not_speculate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="without speculation"):
        run(Scripted({}, speculates=False), tmp_path, ["cold"])
