"""Does speculation give the tokens of plain decoding? Every answer, in several serving modes."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sglang_dart.measure.client import Reply, Request, RequestError, each, send
from sglang_dart.measure.metrics import Mismatch
from sglang_dart.measure.question import Question
from sglang_dart.measure.report import (
    PLAIN,
    RawLog,
    answer_record,
    mismatches,
    prompt_hash,
)
from sglang_dart.measure.server import Server

COLD, CACHED = "cold", "cached"
# What the server gets besides the user's flags. Cached answers come from the cold arm's server:
# each prompt is sent again as soon as its first answer has ended.
MODES: Mapping[str, tuple[str, ...]] = {
    COLD: (),
    CACHED: (),
    "chunked": ("--chunked-prefill-size", "64"),
    "paged": ("--page-size", "16"),
}

Start = Callable[[str, Sequence[str]], AbstractContextManager[Server]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prompt:
    """A question's first turn as token ids."""

    question: Question
    input_ids: tuple[int, ...]

    @property
    def place(self) -> tuple:
        return self.question.set, self.question.id, 0


@dataclass(frozen=True)
class Servers:
    """How to start a server of each kind: `start(label, flags)`, flags beside the mode's own."""

    start: Start
    plain_flags: tuple[str, ...]
    speculative_flags: tuple[str, ...]


def compare(
    prompts: Sequence[Prompt],
    modes: Sequence[str],
    servers: Servers,
    log: RawLog,
    plain_cache: Path,
    *,
    new_tokens: int,
    concurrency: int,
    progress: Progress,
) -> None:
    """Fill `log` with the answers of every mode, plain answers, and gaps at first differences.

    Whatever `log` and the plain cache hold is not asked again. Greedy, at most `new_tokens` each.
    Raises RuntimeError if a server that should speculate has not.
    """
    asker = _Asker(log, new_tokens, concurrency, progress)
    first = [mode for mode in modes if mode in (COLD, CACHED)]
    groups = ([first] if first else []) + [[mode] for mode in modes if mode not in first]
    for arms in groups:
        missing = [p for p in prompts if any(p.place not in log.answers(arm) for arm in arms)]
        if not missing:
            continue
        flags = (*servers.speculative_flags, *MODES[arms[0]])
        with servers.start(" + ".join(arms), flags) as server:
            # A cached answer needs the cold one before it, on the same server.
            repeats = [COLD, CACHED] if CACHED in arms else arms
            asker.ask(server.url, missing, repeats)
        if not any(r["histogram"] for arm in arms for r in log.answers(arm).values()):
            raise RuntimeError("the server answered without speculation; see its log")
    _plain(prompts, modes, servers, asker, plain_cache)


def ask_plain(
    prompts: Sequence[Prompt],
    servers: Servers,
    log: RawLog,
    plain_cache: Path,
    *,
    new_tokens: int,
    concurrency: int,
    progress: Progress,
) -> list[list[int]]:
    """Log plain answers alone; give each prompt with its answer, as token ids."""
    _plain(prompts, [], servers, _Asker(log, new_tokens, concurrency, progress), plain_cache)
    answers = log.answers(PLAIN)
    return [[*prompt.input_ids, *answers[prompt.place]["ids"]] for prompt in prompts]


def _plain(
    prompts: Sequence[Prompt],
    modes: Sequence[str],
    servers: Servers,
    asker: _Asker,
    plain_cache: Path,
) -> None:
    """Plain answers, from the cache as far as they go, then the gaps."""
    log = asker.log
    known = _PlainCache(plain_cache)
    for prompt in prompts:
        record = known.records.get(prompt_hash(prompt.input_ids))
        if record and prompt.place not in log.answers(PLAIN):
            place = dict(zip(("set", "question", "turn"), prompt.place, strict=True))
            log.append({**record, **place})
    missing = [prompt for prompt in prompts if prompt.place not in log.answers(PLAIN)]
    if not missing and not _unexplained(prompts, modes, log):
        return
    with servers.start(PLAIN, servers.plain_flags) as server:
        asker.ask(server.url, missing, [PLAIN])
        known.add(log.answers(PLAIN).values())
        asker.explain(server.url, _unexplained(prompts, modes, log))


def _unexplained(
    prompts: Sequence[Prompt], modes: Sequence[str], log: RawLog
) -> list[tuple[str, Prompt, Mismatch]]:
    """Differences between two tokens whose gap is not known yet."""
    by_place = {prompt.place: prompt for prompt in prompts}
    answered = log.answers(PLAIN).keys()
    return [
        (arm, by_place[place], found)
        for arm in modes
        if log.answers(arm).keys() <= answered
        for place, found in mismatches(log, arm).items()
        if found.top_gap is None and found.expected is not None and found.got is not None
    ]


class _Asker:
    def __init__(self, log: RawLog, new_tokens: int, concurrency: int, progress: Progress) -> None:
        self.log = log
        self.sampling = {"temperature": 0, "max_new_tokens": new_tokens}
        self.concurrency = concurrency
        self.progress = progress

    def ask(self, url: str, prompts: Sequence[Prompt], arms: Sequence[str]) -> None:
        """Log each prompt's answer once per arm, one arm right after the other."""
        done = 0

        async def one(session: aiohttp.ClientSession, prompt: Prompt) -> None:
            nonlocal done
            for arm in arms:
                reply = await send(session, url, Request(prompt.input_ids, self.sampling))
                self.log.append(answer_record(arm, prompt.question, 0, prompt.input_ids, reply))
            done += 1
            self.progress(" + ".join(arms), done, len(prompts))

        self._run(one, prompts)

    def explain(self, url: str, cases: Sequence[tuple[str, Prompt, Mismatch]]) -> None:
        """Log the target's logit gaps where an answer left plain decoding."""
        plain = self.log.answers(PLAIN)

        async def one(session: aiohttp.ClientSession, case: tuple[str, Prompt, Mismatch]) -> None:
            arm, prompt, found = case
            common = plain[prompt.place]["ids"][: found.position]
            request = Request(
                [*prompt.input_ids, *common],
                {"temperature": 0, "max_new_tokens": 1},
                {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [found.got]},
            )
            top_gap, got_gap = gaps(await send(session, url, request))
            self.log.append(
                {
                    "record": "gap",
                    "arm": arm,
                    "set": prompt.question.set,
                    "question": prompt.question.id,
                    "turn": 0,
                    "position": found.position,
                    "top_gap": top_gap,
                    "got_gap": got_gap,
                }
            )

        self._run(one, cases)

    def _run(self, one: Callable[[aiohttp.ClientSession, Any], Any], items: Iterable[Any]) -> None:
        async def run() -> None:
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await each(items, lambda _, item: one(session, item), self.concurrency)

        asyncio.run(run())


def gaps(reply: Reply) -> tuple[float, float]:
    """(best - second best, best - asked token) from log-probabilities, which differ as logits do.

    Raises RequestError if the reply lacks them.
    """
    try:
        (best, *_), (second, *_) = reply.meta["output_top_logprobs"][0][:2]
        (asked, *_), *_ = reply.meta["output_token_ids_logprobs"][0]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RequestError("the reply lacks the log-probabilities that were asked for") from error
    return best - second, best - asked


class _PlainCache:
    """Plain answers on disk, by the hash of their prompt."""

    def __init__(self, path: Path) -> None:
        self.log = RawLog(path, {"cache": "plain answers"})
        self.records = {r["prompt"]: r for r in self.log.records if r["record"] == "answer"}

    def add(self, answers: Iterable[dict[str, Any]]) -> None:
        for record in answers:
            if record["prompt"] not in self.records:
                self.log.append(record)
                self.records[record["prompt"]] = record


def plain_cache_path(folder: Path, model: str, flags: Sequence[str], new_tokens: int) -> Path:
    """Where plain answers of this model, these flags and this engine are kept."""
    weights = Path(model)
    state = [
        [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(weights.glob("*"))
        if file.is_file()
    ]
    engine = {name: importlib.metadata.version(name) for name in ("sglang", "torch")}
    identity = json.dumps([str(model), state, list(flags), new_tokens, engine])
    return folder / f"plain-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.jsonl"
