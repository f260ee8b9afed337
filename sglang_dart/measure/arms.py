"""The arms of a sweep: what is served under which name, by a server of ours or a running one."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang_dart.measure.report import PLAIN
from sglang_dart.measure.server import serve

RECORD = "arm"
ALGORITHMS = (PLAIN, "DART", "DARTREE", "NGRAM", "EAGLE3", "DFLASH")
_OF_SPECULATION = "--speculative-"
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Arm:
    """One way to serve the target.

    own: flags that this arm adds to those that all share. env: what it adds to the environment.
    url: a running server, which is used instead of a new one.
    """

    name: str
    algorithm: str = ""
    drafter: str = ""
    own: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read `[NAME:]ALGORITHM[=DRAFTER] [VARIABLE=VALUE ...] [--speculative-... ...]`.

        Quoted as in a shell. Raises ValueError for another algorithm, or for a flag that is not
        about speculation, since all arms share the others.
        """
        words = shlex.split(text)
        if not words:
            raise ValueError("--arm: is empty")
        head, _, drafter = words[0].partition("=")
        name, colon, algorithm = head.rpartition(":")
        algorithm = algorithm if algorithm == PLAIN else algorithm.upper()
        if algorithm not in ALGORITHMS or (colon and not name):
            raise ValueError(
                f"--arm {text}: expected [NAME:]ALGORITHM[=DRAFTER] with one of "
                f"{', '.join(ALGORITHMS)}"
            )
        env = {}
        rest = words[1:]
        while rest and _VARIABLE.match(rest[0]):
            variable, _, value = rest.pop(0).partition("=")
            env[variable] = value
        _refuse_shared(text, rest)
        if algorithm == PLAIN and (drafter or rest):
            raise ValueError(f"--arm {text}: plain decoding has no drafter and no such flags")
        return cls(name or algorithm, algorithm, drafter, tuple(rest), env)

    @classmethod
    def running(cls, text: str) -> Arm:
        """Read `NAME=http://host:port`. Raises ValueError."""
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {text}: expected NAME=http://host:port")
        return cls(name, url=url.rstrip("/"))

    @property
    def flags(self) -> tuple[str, ...]:
        """What its server gets beside the flags that all share."""
        algorithm = (
            () if self.algorithm in ("", PLAIN) else ("--speculative-algorithm", self.algorithm)
        )
        drafter = ("--speculative-draft-model-path", self.drafter) if self.drafter else ()
        return (*algorithm, *drafter, *self.own)

    def record(self) -> dict[str, Any]:
        """How it is served, for the results file."""
        fields = dataclasses.asdict(self) | {"own": list(self.own)}
        return {"record": RECORD, "arm": fields.pop("name"), **fields}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Arm:
        """From its record."""
        fields = {name: value for name, value in record.items() if name not in ("record", "arm")}
        return cls(record["arm"], **fields | {"own": tuple(fields["own"])})

    def command(self, model: str, shared: Sequence[str]) -> str:
        """What a person would type to serve it."""
        if self.url:
            return f"(running at {self.url})"
        words = ["python", "-m", "sglang.launch_server", "--model-path", model]
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, shlex.join([*words, *shared, *self.flags])])

    @contextmanager
    def serving(self, model: str, shared: Sequence[str], **options: Any) -> Iterator[str]:
        """The URL of its server for the length of the block. `options` go to `serve`.

        Raises ServerError if it does not start.
        """
        if self.url:
            yield self.url
            return
        with serve(model, (*shared, *self.flags), env=self.env, **options) as server:
            yield server.url


def parse_arms(described: Sequence[str], running: Sequence[str]) -> list[Arm]:
    """The arms of a sweep, in order. Raises ValueError if a name occurs twice, or there is none."""
    arms = [*map(Arm.parse, described), *map(Arm.running, running)]
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two arms are called {', '.join(twice)}: give NAME:ALGORITHM")
    if not arms:
        raise ValueError("nothing to measure: give --arm plain, --arm DART=DRAFTER, or --url")
    return arms


def _refuse_shared(text: str, words: Sequence[str]) -> None:
    wrong = [
        word for word in words if word.startswith("--") and not word.startswith(_OF_SPECULATION)
    ]
    if wrong or (words and not words[0].startswith("--")):
        raise ValueError(
            f"--arm {text}: {(wrong or words)[0]}: an arm has --speculative-... flags only; "
            "all arms share the others, after --"
        )
