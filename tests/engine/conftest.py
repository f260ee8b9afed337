"""Real engines on a tiny target: one at a time, since an idle scheduler keeps its core busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_dart.draft.scripted import Script
from sglang_dart.measure.server import serve
from tests.engine.api import Api
from tests.engine.byte_tokenizer import write_tokenizer

# The golden target: 8 Qwen3 layers, random weights, 257 tokens, end token 256.
VOCABULARY = 257
# Of the servers that answer over HTTP.
CONTEXT_LENGTH = 256
TREE_ROWS = 65


@pytest.fixture(scope="session")
def target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The golden target with a tokenizer, whose ids are bytes."""
    folder = tmp_path_factory.mktemp("target")
    for file in (golden / "dart/target").iterdir():
        (folder / file.name).symlink_to(file)
    write_tokenizer(folder)
    return str(folder)


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


@contextmanager
def server(target: str | Path, *flags: Any, env: Mapping[str, str] | None = None) -> Iterator[Api]:
    """A real server, float32, on a free port; `env` is added to the environment."""
    usual = ("--dtype", "float32", "--max-total-tokens", 4096, "--random-seed", 0)
    with serve(target, [str(flag) for flag in (*usual, *flags)], env=env) as running:
        yield Api(running.url, running.log)


def steady(drafter: Path, folder: Path, algorithm: str, **options: Any) -> Path:
    """A drafter in `folder` with trees of constant width: rounds do not depend on the clock.

    `options` go into its dart_config or dartree_config.
    """
    (folder / "model.safetensors").symlink_to(drafter / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text())
    config[f"{algorithm.lower()}_config"] = options | {"cpu_rows": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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


def ask(
    engine: Any, index: Sequence[int], new_tokens: int | list[int], **fields: Any
) -> list[dict[str, Any]]:
    """Generate for the prompts(16) at these places."""
    texts = [prompts(16)[i] for i in index]
    lengths = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(index)
    return engine.generate(input_ids=texts, sampling_params=[greedy(n, **fields) for n in lengths])


def expected(record: list[list[int]], i: int, new_tokens: int) -> list[int]:
    """How plain decoding answers prompt i."""
    start = len(prompts(16)[i])
    return record[i][start : start + new_tokens]


@pytest.fixture(scope="session")
def record(start: Callable[..., Any]) -> list[list[int]]:
    """Plain answers to prompts(16), 96 tokens each, prompt included: the script of the tests."""
    texts = prompts(16)
    with start(disable_overlap_schedule=True) as plain:
        answers = plain.generate(input_ids=texts, sampling_params=greedy(96))
    return [text + a["output_ids"] for text, a in zip(texts, answers, strict=True)]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory, record: list[list[int]]) -> Callable[..., str]:
    """`script(texts, wrong_token=…, …)`: the folder of a scripted drafter.

    It replays `record` and the further texts, each the ids of a prompt and its answer.
    """

    def make(texts: Sequence[list[int]] = (), **settings: Any) -> str:
        folder = tmp_path_factory.mktemp("script")
        # Wide trees for every request, where a CPU would narrow them to save time.
        rows = {"cpu_rows": 1024}
        config = {"vocab_size": VOCABULARY, "dart_config": rows, "dartree_config": rows} | settings
        Script([*texts, *record]).write(folder, config)
        return str(folder)

    return make
