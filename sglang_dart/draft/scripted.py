"""A drafter that replays recorded texts with chosen errors, to exercise the rest of a round.

A weak drafter hides most faults of a verifier: deep runs, moves of KV between slots and ends
inside a run hardly occur. This one accepts as deep as asked, with wrong tokens and wrong elder
siblings in between. It finds its place in the script by reading back, slot by slot, the tokens
that it was given, so a wrong slot table or a lost row shows as a low accept length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.types import Candidates

ARCHITECTURE = "ScriptedDrafter"
SCRIPT = "script.json"

Share = Annotated[float, Field(ge=0, le=1)]


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class ScriptedConfig:
    """config.json of a script folder; `architectures` names this drafter."""

    vocab_size: Annotated[int, Field(ge=2)]
    levels: Annotated[int, Field(ge=1)] = 8
    wrong_token: Share = 0.0
    """Share of levels at which the true token is not among the candidates."""
    wrong_sibling: Share = 0.0
    """Share of levels at which the true token stands behind wrong ones."""
    seed: int = 0


@dataclass(frozen=True)
class Script:
    """Recorded texts, each the ids of a prompt and its answer."""

    texts: list[list[int]]

    @classmethod
    def read(cls, folder: str) -> Script:
        """Read script.json: a list of lists of token ids."""
        path = Path(folder) / SCRIPT
        return cls(TypeAdapter(list[list[int]]).validate_json(path.read_bytes()))

    def write(self, folder: Path, config: dict[str, Any]) -> None:
        """Write a folder that serves as a drafter; config: fields of ScriptedConfig, options."""
        # The engine reads a drafter's configuration too, and knows only types of real models.
        named = {"architectures": [ARCHITECTURE], "model_type": "llama"} | config
        (folder / "config.json").write_text(json.dumps(named))
        (folder / SCRIPT).write_text(json.dumps(self.texts))

    def after(self, text: list[int]) -> list[int]:
        """What follows `text`, whose first token is unknown; empty if no record begins so."""
        for record in self.texts:
            if record[1 : len(text)] == text[1:]:
                return record[len(text) :]
        return []


class ScriptedDrafter:
    """Implements the protocol Drafter; its KV of a slot is the token that follows there."""

    taps: tuple[int, ...]
    reads_next_token = True
    carry_size = 0

    def __init__(self, config: ScriptedConfig, script: Script, target_layers: int) -> None:
        self.levels = config.levels
        self.taps = (1, target_layers // 2 - 1, target_layers - 4)
        self._config = config
        self._script = script
        self._random = random.Random(config.seed)
        self._next_token = torch.zeros(0, dtype=torch.int64)

    def kv_bytes_per_slot(self) -> int:
        """Bytes of one token id."""
        return 8

    def allocate(self, slots: int) -> None:
        """One token id a slot, on the host."""
        self._next_token = torch.full((slots,), -1, dtype=torch.int64)

    def append(self, rows: Rows) -> None:
        """Remember which token followed at each slot."""
        self._next_token[rows.slot.cpu()] = rows.next_token.cpu()

    def draft(self, roots: Roots, width: int) -> Candidates:
        """Replay the script after each root. Waits for the host, being made for tests."""
        device = roots.token.device
        slots, lengths = roots.slot_table.cpu(), roots.length.tolist()
        token = torch.zeros(len(lengths), self.levels, width, dtype=torch.int64)
        log_prob = torch.full(token.shape, -torch.inf)
        for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            # Slot j holds the token at j + 1, so length slots give the text up to the root.
            text = [-1, *self._next_token[slot[:length].long()].tolist()]
            for level, true in zip(range(self.levels), self._future(text), strict=False):
                ranked = self._rank(true, width)
                token[i, level, : len(ranked)] = torch.tensor(ranked)
                log_prob[i, level, : len(ranked)] = -torch.arange(1.0, len(ranked) + 1)
        return Candidates(token.to(device), log_prob.to(device))

    def _future(self, text: list[int]) -> Iterator[int | None]:
        """What follows `text`, then None without end."""
        yield from self._script.after(text)
        while True:
            yield None

    def _rank(self, true: int | None, width: int) -> list[int]:
        """Candidates of one level: wrong tokens, and the true one where the dice put it."""
        config = self._config
        count = min(width + 1, config.vocab_size)
        wrong = [t for t in self._random.sample(range(config.vocab_size), count) if t != true]
        if true is None or self._random.random() < config.wrong_token:
            return wrong[:width]
        place = 0
        if self._random.random() < config.wrong_sibling:
            place = self._random.randint(1, 2)
        return [*wrong[:place], true, *wrong[place:]][:width]
