"""Target and draft KV of live requests are those of a fresh prefill, whatever happened before.

A small pool and short chunks, prompts that share parts with what is cached, sampled and greedy
answers, clients that hang up: requests are retracted, resumed and cut, and slots change hands. A
probe inside the server looks at a request every few rounds; Hugging Face reads its text anew.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dart.draft.drafter import Rows
from tests import dartree
from tests.conftest import GOLDEN
from tests.engine import kv_probe
from tests.engine.api import Api
from tests.engine.conftest import greedy, server, steady
from tests.engine.kv_probe import Snapshot

pytestmark = pytest.mark.server

# Rounding of float32: rows that a tree verified, and rows of one forward.
TOLERANCE = 2e-4
# Holds two or three of the longest requests, and cached parts of some more.
POOL = 512
FLAGS = (
    *("--max-total-tokens", POOL, "--page-size", 16, "--chunked-prefill-size", 48),
    *("--speculative-num-draft-tokens", 24),
    # Admits more requests than will fit.
    *("--schedule-conservativeness", 0.1),
    "--skip-tokenizer-init",
)
REQUESTS, WAVES = 14, 3
# Prompt and answer together.
LONGEST = 250


@dataclass(frozen=True)
class Setup:
    """A drafter of an algorithm, and the target that it was fitted to."""

    drafter: Path
    make_drafter: Callable[[int], Any]

    @property
    def target(self) -> Path:
        return self.drafter.parent / "target"


@dataclass(frozen=True)
class Asked:
    """A request that was answered to its end."""

    text: list[int]
    prompt: int
    sampled: bool


@dataclass(frozen=True)
class Run:
    """What was asked, by request id, what the probe saw, and what the server said."""

    asked: dict[str, Asked]
    seen: list[Snapshot]
    log: str


class Fresh:
    """Hugging Face reads a text at once, and a drafter of its own takes the features over."""

    def __init__(self, setup: Setup) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(
            setup.target, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.drafter = setup.make_drafter(LONGEST + 1)

    @torch.no_grad()
    def read(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Target KV, draft KV (as a Snapshot has them) and the best token after each position.

        All of the positions that have a token behind them.
        """
        out = self.target(torch.tensor([text[:-1]]), use_cache=True, output_hidden_states=True)
        layers = out.past_key_values.layers
        kv = [layer.keys[0] for layer in layers] + [layer.values[0] for layer in layers]
        # hidden_states[0] is the embedding, so layer t's output is at t + 1.
        taps = [out.hidden_states[tap + 1][0] for tap in self.drafter.taps]
        position = torch.arange(len(text) - 1)
        # Slot 0 is a dummy.
        rows = Rows(torch.cat(taps, -1), torch.tensor(text[1:]), position, position + 1)
        self.drafter.append(rows)
        draft = torch.cat([self.drafter.kv.key, self.drafter.kv.value])[:, 1 : len(text)]
        return torch.stack(kv).transpose(1, 2), draft, out.logits[0].argmax(-1)


@pytest.fixture(scope="module", params=["DART", "DARTREE"])
def setup(request: Any, golden_drafter: Callable[..., Any]) -> Setup:
    if request.param == "DART":
        return Setup(GOLDEN / "dart/head", golden_drafter)
    return Setup(
        dartree.GOLDEN / "domino_shift", lambda slots: dartree.drafter("domino_shift", slots)
    )


@pytest.fixture(scope="module")
def run(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    algorithm = "DART" if setup.drafter.name == "head" else "DARTREE"
    seen = tmp_path_factory.mktemp("seen")
    drafter = steady(setup.drafter, tmp_path_factory.mktemp("drafter"), algorithm)
    flags = (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", drafter),
        *FLAGS,
    )
    # Beside those that the pool retracts, SGLang retracts some every few steps.
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    with server(setup.target, *flags, env=retract | kv_probe.environment(seen)) as api:
        asked = ask_a_mix(api)
        whole(api)
        yield Run(asked, list(kv_probe.snapshots(seen)), api.log.read_text())


def ask_a_mix(api: Api) -> dict[str, Asked]:
    """Waves of requests at once; from the second on most prompts begin as something known does."""
    dice = random.Random(0)
    asked: dict[str, Asked] = {}
    for wave in range(WAVES):
        bodies = []
        for number in range(REQUESTS):
            prompt = new_prompt(dice, [known.text for known in asked.values()])
            sampling = greedy(min(dice.randint(30, 96), LONGEST - len(prompt)))
            if dice.random() < 0.4:
                sampling["temperature"] = 1.0
            rid = f"{wave}-{number}"
            bodies.append({"input_ids": prompt, "sampling_params": sampling, "rid": rid})
        leaving = [
            threading.Thread(target=hang_up, args=(api, body, dice.randint(1, 6)))
            for body in bodies[::4]
        ]
        for thread in leaving:
            thread.start()
        staying = [body for body in bodies if body not in bodies[::4]]
        answers = api.at_once(staying)
        for thread in leaving:
            thread.join()
        for body, answer in zip(staying, answers, strict=True):
            text = [*body["input_ids"], *answer["output_ids"]]
            sampled = body["sampling_params"]["temperature"] > 0
            asked[body["rid"]] = Asked(text, len(body["input_ids"]), sampled)
    return asked


def new_prompt(dice: random.Random, known: list[list[int]]) -> list[int]:
    """Random tokens, or a golden prompt, behind any part of a text that was asked before."""
    golden = dartree.read("dflash_cases.json")["prompts"]
    tail = [dice.randrange(255) for _ in range(dice.randint(1, 60))]
    if not known or dice.random() < 0.3:
        return dice.choice([*golden, tail + tail[::-1]])
    text = dice.choice(known)[: LONGEST - 100]
    # At the end of a page half of the time: then a row is shared whose next token is not.
    shared = dice.choice([dice.randint(2, len(text)), max(2, len(text) // 16 * 16)])
    return text[:shared] + tail[: dice.choice([0, 1, 2, 60])]


def hang_up(api: Api, body: dict[str, Any], events: int) -> None:
    """Leave somewhere inside an answer, or at its end."""
    with api.stream("/generate", body) as stream:
        for _ in zip(range(events), stream, strict=False):
            pass


def whole(api: Api, seconds: float = 60) -> None:
    """Wait until no request holds a slot; SGLang flushes only then."""
    until = time.monotonic() + seconds
    while api.used_slots() or api.post("/flush_cache", {})[0] != 200:
        assert time.monotonic() < until, "slots are not given back"
        time.sleep(0.1)


def test_kv_of_live_requests_is_that_of_a_fresh_prefill(setup: Setup, run: Run) -> None:
    texts: dict[str, list[int]] = {}
    for snapshot in run.seen:
        texts[snapshot.rid] = max(snapshot.text, texts.get(snapshot.rid, []), key=len)
    texts |= {rid: asked.text for rid, asked in run.asked.items()}
    fresh = Fresh(setup)
    read = {rid: fresh.read(text) for rid, text in texts.items()}
    for snapshot in run.seen:
        target, draft, _ = read[snapshot.rid]
        # What nobody told: the newest tokens of an answer that was cut.
        known = min(snapshot.length, len(texts[snapshot.rid]) - 1)
        for name, held, expected in (
            ("target", snapshot.target, target),
            ("draft", snapshot.draft, draft),
        ):
            apart = (held[:, :known] - expected[:, :known]).abs().amax((0, 2, 3))
            wrong = (apart > TOLERANCE).nonzero().flatten().tolist()
            assert not wrong, f"{snapshot.rid}, {name} KV at {wrong} of {known}: {apart.max()}"


def test_greedy_answers_are_those_of_the_target(setup: Setup, run: Run) -> None:
    fresh = Fresh(setup)
    for rid, asked in run.asked.items():
        if not asked.sampled:
            best = fresh.read(asked.text)[2]
            assert asked.text[asked.prompt :] == best[asked.prompt - 1 :].tolist(), rid


def test_the_mix_is_what_it_is_called(run: Run) -> None:
    """The comparison has seen retracted, cached, cut and sampled requests, and deep answers."""
    seen = {snapshot.rid: snapshot for snapshot in run.seen}
    assert len(run.seen) > 100
    assert sum(snapshot.retractions > 0 for snapshot in run.seen) > 10
    assert sum(snapshot.cached > 0 for snapshot in run.seen) > 10
    assert seen.keys() - run.asked.keys(), "clients that hung up"
    assert {run.asked[rid].sampled for rid in seen.keys() & run.asked.keys()} == {True, False}
    assert max(snapshot.length for snapshot in run.seen) > 150


def test_the_log_tells_the_memory_of_draft_kv(setup: Setup, run: Run) -> None:
    # A page beside the pool holds the dummy slot.
    slots, size = POOL + 16, setup.make_drafter(1).kv_bytes_per_slot()
    assert f"({slots} slots of {size} bytes)" in run.log
