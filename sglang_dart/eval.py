"""`sglang-dart eval`: accept length on prompt sets, or every token against plain decoding."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import aiohttp
import typer
from rich.console import Console

from sglang_dart.cli import emit, run_tool
from sglang_dart.draft.scripted import Script
from sglang_dart.measure.arms import Arm, parse_arms
from sglang_dart.measure.client import Request, each, send
from sglang_dart.measure.datasets import (
    encode_chat,
    load_questions,
    load_tokenizer,
    shuffled,
)
from sglang_dart.measure.exactness import (
    MODES,
    Prompt,
    Servers,
    ask_plain,
    compare,
    plain_cache_path,
)
from sglang_dart.measure.metrics import TIE_TOLERANCE
from sglang_dart.measure.named_sets import NAMED
from sglang_dart.measure.progress import Progress
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import (
    PLAIN,
    RawLog,
    acceptance_summary,
    acceptance_table,
    answer_record,
    exactness_summary,
    exactness_tables,
    vacuous_arms,
)
from sglang_dart.measure.server import Server, serve
from sglang_dart.measure.side_by_side import (
    SLOTS,
    lengths_table,
    slot_hits,
    slot_summary,
    slots_table,
)
from sglang_dart.options import ENVIRONMENT, Variant

ARM = "speculative"
# Instead of a drafter: plain answers, replayed with errors in between.
SCRIPTED = "scripted"
SCRIPT_ERRORS = {"wrong_token": 0.1, "wrong_sibling": 0.2}
SCRIPT_ROWS = 16
CACHE = Path.home() / ".cache" / "sglang-dart" / "eval"
EXACTNESS, ACCEPTANCE = "exactness", "acceptance"

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True})
def evaluate(
    context: typer.Context,
    exactness: Annotated[
        bool, typer.Option("--exactness", help="Compare token ids with plain decoding.")
    ] = False,
    model: Annotated[str, typer.Option(help="Target: a folder or a hub id.")] = "",
    algorithm: Annotated[str, typer.Option(help="DART, DARTREE, or one of SGLang's.")] = "DART",
    drafter: Annotated[str, typer.Option(help="Drafter: a folder or a hub id.")] = "",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of both: [NAME:]ALGORITHM[=DRAFTER] [VARIABLE=VALUE ...] "
            "[--speculative-... ...]; repeatable, accept lengths side by side."
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="Accept length of a server that runs.")] = "",
    variant: Annotated[
        str, typer.Option(help=f"Of DARTREE's trees: {', '.join(get_args(Variant))}.")
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: a file of JSON lines with `turns`, or a set by name, loaded from the "
            f"hub: {', '.join(NAMED)}; repeatable."
        ),
    ] = None,
    max_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Questions of each set; default: all, by name the protocol's."),
    ] = None,
    first_turns: Annotated[
        bool, typer.Option("--first-turns", help="Ask only the first turn of each.")
    ] = False,
    slots: Annotated[
        bool,
        typer.Option("--slots", help="Accuracy of each level of the drafters on these answers."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Chooses the questions and their order.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Of accept length runs.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    modes: Annotated[str, typer.Option(help="Serving modes to compare.")] = ",".join(MODES),
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Logit gap of a near-tie; default by dtype.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Raw results; if it exists, resumes.")] = None,
    report: Annotated[Path | None, typer.Option(help="Recompute from raw results.")] = None,
) -> None:
    """Measure accept length on prompt sets, or (--exactness) compare with plain decoding.

    Words after `--` go to the servers, `--speculative-...` ones only to the one that speculates.
    Exit code 1 if an answer differs from plain decoding at a clear logit gap. `--exactness
    --drafter scripted` replays plain answers with errors in between, so that runs are deep however
    good a drafter there is.
    """
    if report:
        _finish(RawLog.reopen(report))
        return
    if dtype not in TIE_TOLERANCE:
        raise ValueError(f"--dtype {dtype}: must be one of {', '.join(TIE_TOLERANCE)}")
    if bool(model) == bool(url) or (exactness and url):
        raise ValueError("give --model FOLDER_OR_ID, or (accept length only) --url of a server")
    if arm and (url or exactness or drafter):
        raise ValueError("--arm is for accept length, without --url and --drafter")
    if drafter == SCRIPTED and not (exactness and algorithm == "DART"):
        raise ValueError("--drafter scripted is for --exactness with --algorithm DART")
    if slots and (url or exactness):
        raise ValueError("--slots is for accept length, without --url: it reads the drafter")
    if variant and (url or arm or algorithm.upper() != "DARTREE"):
        raise ValueError(f"--variant {variant}: is for --algorithm DARTREE with --model")
    tree_settings = _tree_settings(variant)
    flags = ["--dtype", dtype, *context.args]
    both, speculating = split_flags(flags)
    env = {ENVIRONMENT: tree_settings} if tree_settings else {}
    alone = Arm(ARM, algorithm, drafter, env=env, url=url.rstrip("/"))
    described = parse_arms(arm, []) if arm else [alone]
    arms = [
        one if one.algorithm == PLAIN else dataclasses.replace(one, own=(*one.own, *speculating))
        for one in described
    ]
    questions = shuffled(load_questions(data or [], max_samples, seed), seed)
    if first_turns:
        questions = [dataclasses.replace(q, turns=q.turns[:1]) for q in questions]
    model = model or _model_of(url)
    tokenizer = load_tokenizer(model)
    settings: dict[str, Any] = {
        "kind": EXACTNESS if exactness else ACCEPTANCE,
        "model": model,
        "algorithm": algorithm,
        "drafter": drafter,
        "data": data or [],
        **{"limit": max_samples, "seed": seed},
        **{"new_tokens": max_new_tokens, "concurrency": concurrency},
        **({"first_turns": True} if first_turns else {}),
        **({"arms": [one.record() for one in arms]} if arm else {}),
        "flags": flags,
        # Recorded, since it changes the trees; the servers read it.
        "dart_config": tree_settings,
        "chat_template": _digest(tokenizer.chat_template),
        "thinking": False,
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch")},
    }
    if exactness:
        tolerance = TIE_TOLERANCE[dtype] if tolerance is None else tolerance
        log = RawLog(_out(out, EXACTNESS), settings | {"tolerance": tolerance})
        _compare(questions, tokenizer, _modes(modes), log)
    else:
        log = RawLog(_out(out, ACCEPTANCE), settings | {"url": url, "temperature": temperature})
        for one in arms:
            if not _left(questions, log, one.name):
                continue
            Progress().say(f"{one.name}: {one.command(model, both)}")
            with one.serving(model, both) as address:
                _accept(questions, tokenizer, address, one.name, log)
        if slots:
            _score(questions, tokenizer, arms, log)
    _finish(log)


def _tree_settings(variant: str) -> str:
    """What the servers read from the environment. Raises ValueError."""
    given = os.environ.get(ENVIRONMENT, "")
    if not variant:
        return given
    if variant not in get_args(Variant):
        raise ValueError(f"--variant {variant}: must be one of {', '.join(get_args(Variant))}")
    if given:
        raise ValueError(f"--variant {variant}: {ENVIRONMENT} is set; name the variant there")
    return json.dumps({"variant": variant})


def split_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Server flags for both servers, and those that only the speculating one gets."""
    both: list[str] = []
    speculating: list[str] = []
    into = both
    for word in words:
        if word.startswith("--"):
            into = speculating if word.startswith("--speculative-") else both
        into.append(word)
    return tuple(both), tuple(speculating)


def _servers(settings: Mapping[str, Any], drafter: str) -> Servers:
    both, speculating = split_flags(settings["flags"])

    @contextmanager
    def start(label: str, flags: Sequence[str]) -> Iterator[Server]:
        progress = Progress()
        progress.say(f"{label}: starting a server with {' '.join(flags)}")
        # Plain decoding has no use for it.
        env = {ENVIRONMENT: settings["dart_config"]}
        with serve(settings["model"], flags, env=env) as server:
            yield server

    return Servers(
        start=start,
        plain_flags=both,
        speculative_flags=(
            *("--speculative-algorithm", settings["algorithm"]),
            *(("--speculative-draft-model-path", drafter) if drafter else ()),
            *both,
            *speculating,
        ),
    )


def _compare(
    questions: Sequence[Question],
    tokenizer: Any,
    modes: Sequence[str],
    log: RawLog,
) -> None:
    prompts = [
        Prompt(question, tuple(encode_chat(tokenizer, [_user(question.turns[0])])))
        for question in questions
    ]
    settings = log.records[0]
    model, flags = settings["model"], split_flags(settings["flags"])[0]
    cache = plain_cache_path(CACHE, model, flags, settings["new_tokens"])
    how = {name: settings[name] for name in ("new_tokens", "concurrency")}
    with tempfile.TemporaryDirectory() as folder:
        drafter = settings["drafter"]
        if drafter == SCRIPTED:
            plain = _servers(settings, "")
            texts = ask_plain(prompts, plain, log, cache, **how, progress=Progress())
            # Whatever trees cost; as many rows for each of the requests that run at once.
            wide = {"adaptive": False, "cpu_rows": SCRIPT_ROWS * settings["concurrency"]}
            config = {"vocab_size": len(tokenizer), **SCRIPT_ERRORS, "dart_config": wide}
            Script(texts).write(Path(folder), config)
            drafter = folder
        servers = _servers(settings, drafter)
        compare(prompts, modes, servers, log, cache, **how, progress=Progress())


def _left(questions: Sequence[Question], log: RawLog, arm: str) -> list[Question]:
    """What an arm has not been asked yet; a talk that a crash cut short is held from its start."""
    asked = {place[:2] for place in log.answers(arm)}
    return [q for q in questions if (q.set, q.id) not in asked]


def _accept(questions: Sequence[Question], tokenizer: Any, url: str, arm: str, log: RawLog) -> None:
    """Hold every conversation turn by turn, each turn after the model's own answers."""
    settings, progress = log.records[0], Progress()
    sampling = {"temperature": settings["temperature"], "max_new_tokens": settings["new_tokens"]}
    left = _left(questions, log, arm)
    done = 0

    async def hold(session: aiohttp.ClientSession, question: Question) -> None:
        nonlocal done
        messages: list[dict[str, str]] = []
        records = []
        for turn, text in enumerate(question.turns):
            messages.append(_user(text))
            input_ids = encode_chat(tokenizer, messages)
            reply = await send(session, url, Request(input_ids, sampling), stream=True)
            messages.append({"role": "assistant", "content": reply.text})
            records.append(answer_record(arm, question, turn, input_ids, reply))
        for record in records:
            log.append(record)
        done += 1
        progress(arm, done, len(left))

    async def run() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            # So that no answer profits from what an earlier run left in the prefix cache.
            async with session.post(f"{url}/flush_cache") as response:
                response.raise_for_status()
            await each(left, lambda _, question: hold(session, question), settings["concurrency"])

    asyncio.run(run())


def _score(questions: Sequence[Question], tokenizer: Any, arms: Sequence[Arm], log: RawLog) -> None:
    """Record how often each level of a drafter is right along its first arm's first answers."""
    from sglang_dart.train.score import level_hits

    settings, known = log.records[0], slot_hits(log)
    drafters = {one.drafter: one for one in reversed(arms)}
    for one in arms:
        # With and without n-grams, a drafter's levels are the same.
        if one.algorithm not in ("DART", "DARTREE") or one != drafters[one.drafter]:
            continue
        if one.name in known:
            continue
        Progress().say(f"{one.name}: scoring the drafter's levels")
        texts: dict[str, list[tuple[list[int], list[int]]]] = {}
        for question in questions:
            answer = log.answers(one.name)[question.set, question.id, 0]
            prompt = encode_chat(tokenizer, [_user(question.turns[0])])
            texts.setdefault(question.set, []).append((prompt, answer["ids"]))
        dtype = settings["flags"][1]
        hits = level_hits(one.algorithm, one.drafter, settings["model"], texts, dtype)
        for name, (right, asked) in hits.items():
            fields = {"arm": one.name, "set": name, "right": right, "asked": asked}
            log.append({"record": SLOTS, **fields})


def _finish(log: RawLog) -> None:
    """Print tables and the JSON line. Raises typer.Exit(1) on a clear mismatch."""
    settings, console = log.records[0], Console()
    result: dict[str, Any] = {"tool": "eval", "kind": settings["kind"], "raw": str(log.path)}
    if settings["kind"] == ACCEPTANCE:
        names = [record["arm"] for record in settings.get("arms", [])]
        summaries = {
            name: acceptance_summary(log.answers(name).values()) for name in names or [ARM]
        }
        for name, summary in summaries.items():
            console.print(acceptance_table(summary, name if names else ""))
        slots = slot_summary(slot_hits(log))
        if slots:
            console.print(slots_table(slots))
        if names:
            console.print(lengths_table(summaries))
        figures = {"accept_length": summaries if names else summaries[ARM]}
        emit(result | figures | ({"slots": slots} if slots else {}))
        return
    arms, tolerance = [mode for mode in MODES if log.answers(mode)], settings["tolerance"]
    counts = exactness_summary(log, arms, tolerance)
    for table in exactness_tables(log, arms, tolerance, counts):
        console.print(table)
    vacuous = vacuous_arms(counts)
    if vacuous:
        # Several requests share the rows of a step where rows cost: maybe none was left to draft.
        console.print(
            f"[yellow]no draft was accepted in {', '.join(vacuous)}:[/yellow] this tells nothing "
            "about verification. Have wide trees whatever they cost, for example "
            """SGLANG_DART_CONFIG='{"adaptive": false, "cpu_rows": 128}', or lower --concurrency."""
        )
    emit(result | {"tolerance": tolerance, "arms": counts, "without_accepted_drafts": vacuous})
    if counts["together"]["clear"]:
        raise typer.Exit(1)


def _modes(text: str) -> list[str]:
    chosen = [mode.strip() for mode in text.split(",") if mode.strip()]
    unknown = sorted(set(chosen) - set(MODES))
    if unknown or not chosen:
        raise ValueError(f"--modes {text}: choose from {', '.join(MODES)}")
    return [mode for mode in MODES if mode in chosen]


def _model_of(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/model_info", timeout=10) as response:
            return json.load(response)["model_path"]
    except (OSError, ValueError, KeyError) as error:
        raise RuntimeError(f"{url}: no SGLang server answers there ({error})") from error


def _out(out: Path | None, kind: str) -> Path:
    return out or Path(f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.eval"))
