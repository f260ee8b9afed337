"""Real engines on a tiny target: one at a time, since an idle scheduler keeps its core busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The golden target: 8 Qwen3 layers, random weights, 257 tokens, end token 256.
VOCABULARY = 257


@pytest.fixture(scope="session")
def target(golden: Path) -> str:
    return str(golden / "dart/target")


@pytest.fixture(scope="session")
def head(golden: Path) -> str:
    """The golden DART head, which accepts about two tokens a round."""
    return str(golden / "dart/head")


@contextmanager
def engine(target: str, **flags: Any) -> Iterator[Any]:
    """A real `sgl.Engine`, float32, token ids in and out."""
    import sglang

    settings = {
        "model_path": target,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "log_level": "warning",
        "random_seed": 0,
    }
    running = sglang.Engine(**(settings | flags))
    try:
        yield running
    finally:
        running.shutdown()


@pytest.fixture(scope="session")
def start(target: str) -> Callable[..., Any]:
    """`with start(**flags) as engine`: an engine on the tiny target."""
    return lambda **flags: engine(target, **flags)


def prompts(count: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    """Random prompts of mixed lengths, the shortest of one token."""
    import random

    dice = random.Random(seed)
    lengths = [1, 2, 3] + [dice.randint(4, longest) for _ in range(count - 3)]
    return [[dice.randrange(VOCABULARY - 1) for _ in range(n)] for n in lengths[:count]]


def greedy(new_tokens: int, **fields: Any) -> dict[str, Any]:
    # Stop tokens count only where end tokens do; the tiny target hardly ever ends by itself.
    ends = "stop_token_ids" in fields
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": not ends, **fields}


@pytest.fixture(scope="session")
def record(start: Callable[..., Any]) -> list[list[int]]:
    """Plain answers to prompts(16), 96 tokens each, prompt included: the script of the tests."""
    texts = prompts(16)
    with start(disable_overlap_schedule=True) as plain:
        answers = plain.generate(input_ids=texts, sampling_params=greedy(96))
    return [text + a["output_ids"] for text, a in zip(texts, answers, strict=True)]


@pytest.fixture(scope="session")
def script(
    tmp_path_factory: pytest.TempPathFactory, target: str, record: list[list[int]]
) -> Callable[..., str]:
    """`script(wrong_token=…, …)`: the folder of a scripted drafter that replays `record`."""

    def make(**settings: Any) -> str:
        folder = tmp_path_factory.mktemp("script")
        config = json.loads((Path(target) / "config.json").read_text())
        config |= {"architectures": ["ScriptedDrafter"], "levels": 8} | settings
        # Wide trees for every request, where a CPU would narrow them to save time.
        config["dart_config"] = {"cpu_rows": 1024}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "script.json").write_text(json.dumps(record))
        return str(folder)

    return make
