"""A worker that lets the target write: keeps an engine full of conversations and reports them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dart.measure.datasets import encode_chat, load_tokenizer
from sglang_dart.train.engines import Engine, SglangEngine, TransformersEngine, Written
from sglang_dart.train.prompts import Job, Message, read_prompts, shard_jobs, user_header

# Reports that are about no shard.
ENDED, FAILED = -1, -2


@dataclass(frozen=True)
class DataSettings:
    """What to generate. A folder is only continued under the settings that it began with."""

    model: str
    prompts: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    opening_share: float = 0.5
    temperatures: tuple[float, ...] = (0.0, 0.7)
    question_temperature: float = 1.0
    max_question_tokens: int = 192
    max_new_tokens: int = 384
    max_length: int = 2048
    shard_samples: int = 1000
    min_tokens: int = 8
    min_distinct: float = 0.3
    seed: int = 0


@dataclass(frozen=True)
class Machine:
    """How to generate: engine "sglang" or "transformers", replicas, requests in flight in each."""

    engine: str
    replicas: int
    concurrent: int
    dtype: str


@dataclass(frozen=True)
class Shards:
    """The numbers of the shards to make, handed out to whichever process asks first."""

    counter: Any
    lock: Any
    count: int
    have: frozenset[int]

    def take(self) -> int | None:
        """The next number, or None after the last."""
        with self.lock:
            while self.counter.value in self.have:
                self.counter.value += 1
            taken = self.counter.value
            self.counter.value += 1
        return taken if taken < self.count else None


@dataclass(frozen=True)
class Conversation:
    """One answer with what led to it. question_tokens: of the prompt, written by the target."""

    prompt_ids: list[int]
    answer_ids: list[int]
    prompt: str
    answer: str
    question_tokens: int
    job: Job


def work(
    settings: DataSettings, machine: Machine, index: int, shards: Shards, results: Any, stop: Any
) -> None:
    """A worker: one engine, jobs of whatever shard is next."""
    try:
        engine = _open_engine(settings, machine, index)
        try:
            engine.run(_Writer(settings, engine, shards, results, stop).run())
        finally:
            engine.close()
    except BaseException as error:
        results.put((FAILED, f"{type(error).__name__}: {error}"))
        raise
    results.put((ENDED, None))


def _open_engine(settings: DataSettings, machine: Machine, index: int) -> Engine:
    seed = settings.seed * 1000 + index
    if machine.engine == "transformers":
        return TransformersEngine(
            settings.model, concurrent=machine.concurrent, seed=seed, dtype=machine.dtype
        )
    return SglangEngine(
        settings.model,
        concurrent=machine.concurrent,
        max_length=settings.max_length,
        seed=seed,
        dtype=machine.dtype,
    )


class _Writer:
    """Keeps an engine full: jobs start in groups, so that prefills interrupt decoding rarely."""

    def __init__(
        self, settings: DataSettings, engine: Engine, shards: Shards, results: Any, stop: Any
    ) -> None:
        self._settings, self._engine = settings, engine
        self._shards, self._results, self._stop = shards, results, stop
        self._tokenizer = load_tokenizer(settings.model)
        self._header, end = user_header(self._tokenizer)
        ends = _end_tokens(settings.model)
        self._end_id = min(ends) if end is None else end
        self._stop_ids = sorted(ends | {self._end_id})
        self._left: dict[int, int] = {}

    async def run(self) -> None:
        """Work until there is no shard left or the main process says stop."""
        jobs, running = self._jobs(), set[asyncio.Task]()
        most = self._engine.concurrent
        group, more, parent = max(1, most // 8), True, os.getppid()
        while not self._stop.is_set() and os.getppid() == parent:
            if more and len(running) <= most - group:
                while len(running) < most and (job := next(jobs, None)):
                    running.add(asyncio.create_task(self._one(*job)))
                more = len(running) == most
            if not running:
                return
            done, running = await asyncio.wait(
                running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                # Raises what the task raised.
                task.result()
        for task in running:
            task.cancel()

    def _jobs(self) -> Iterator[tuple[int, Job]]:
        settings = self._settings
        files = [Path(name) for name in settings.prompts]
        prompts = read_prompts(files) if files else None
        while (shard := self._shards.take()) is not None:
            jobs = shard_jobs(
                shard,
                settings.shard_samples,
                prompts=prompts,
                openings=settings.openings,
                opening_share=settings.opening_share,
                temperatures=settings.temperatures,
                seed=settings.seed,
            )
            self._left[shard] = len(jobs)
            yield from ((shard, job) for job in jobs)

    async def _one(self, shard: int, job: Job) -> None:
        if job.messages is None:
            await self._ask_itself(shard, job)
        else:
            await self._answer_all(shard, job)
        self._left[shard] -= 1
        if not self._left[shard]:
            self._results.put((shard, None))

    async def _ask_itself(self, shard: int, job: Job) -> None:
        settings = self._settings
        opening = self._tokenizer(job.opening, add_special_tokens=False)["input_ids"]
        asked = self._header + opening
        question = await self._engine.write(
            asked,
            settings.question_temperature,
            min(settings.max_question_tokens, max(1, settings.max_length - len(asked) - 1)),
            self._stop_ids,
        )
        if not question.ended:
            self._results.put((shard, "unfinished question"))
            return
        text = self._text(opening + question.ids).strip()
        message = {"role": "user", "content": text}
        await self._answer(shard, job, [message], len(question.ids))

    async def _answer_all(self, shard: int, job: Job) -> None:
        """One sample for each user turn; the history holds the target's own answers."""
        history: list[Message] = []
        for message in job.messages or ():
            history.append(message)
            if message["role"] == "user":
                answer = await self._answer(shard, job, history, 0)
                if answer is None:
                    return
                history.append({"role": "assistant", "content": answer})

    async def _answer(
        self, shard: int, job: Job, history: list[Message], question_tokens: int
    ) -> str | None:
        """Report the answer to `history`, and give its text; None if there is no room for one."""
        settings = self._settings
        # As the server would tokenise it, whatever tokens the question was written in.
        prompt = encode_chat(self._tokenizer, history)
        room = settings.max_length - len(prompt) - 1
        if room < settings.min_tokens:
            self._results.put((shard, "too long"))
            return None
        written: Written = await self._engine.write(
            prompt, job.temperature, min(settings.max_new_tokens, room), self._stop_ids
        )
        ids = written.ids + ([self._end_id] if written.ended else [])
        text = self._text(written.ids)
        last = history[-1]["content"]
        talk = Conversation(prompt, ids, last, text, question_tokens, job)
        self._results.put((shard, talk))
        return text

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _end_tokens(model: str) -> set[int]:
    """The model's own end tokens, as its generation config names them."""
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ends = AutoConfig.from_pretrained(model).eos_token_id
    if ends is None:
        raise ValueError(f"{model}: neither its config nor generation config names an end token")
    return {ends} if isinstance(ends, int) else set(ends)
