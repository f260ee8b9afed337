"""Tree masks on the GPU's attention back-ends: graph replay, pages, overlap, odd batch sizes.

Half precision rounds a row of a tree and a row alone differently, so ids may part at a near-tie.
Each first difference is held against the gap between plain decoding's two best tokens there.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from sglang_dart.options import ENVIRONMENT
from sglang_dart.train.export import (
    write_untrained_dart_head,
    write_untrained_domino_drafter,
)
from sglang_dart.tree.budget import short_ladder
from tests.engine.conftest import engine, greedy, server
from tests.engine.cycling import Cycling
from tests.engine.gpu_target import VOCABULARY, write_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW_TOKENS = 64
# Log-probabilities in float16, summed over 256 channels: a few units of 2^-9.
NEAR_TIE = 0.02
FLAGS = {
    "dtype": "float16",
    "max_total_tokens": 32768,
    "cuda_graph_max_bs_decode": 8,
    # Saves half a minute a start.
    "disable_prefill_cuda_graph": True,
}

SETUPS = {
    "flashinfer": {"attention_backend": "flashinfer"},
    "flashinfer page 16": {"attention_backend": "flashinfer", "page_size": 16},
    "triton": {"attention_backend": "triton"},
    "triton page 64": {"attention_backend": "triton", "page_size": 64},
    "fa3": {"attention_backend": "fa3"},
    "fa3 page 64": {"attention_backend": "fa3", "page_size": 64},
    "default, no graphs": {"disable_cuda_graph": True},
    "default, no overlap": {"disable_overlap_schedule": True},
    # Grown on the GPU, where DART's trees are grown on the host.
    "dartree": {"speculative_algorithm": "DARTREE"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts():
    dice = random.Random(0)
    lengths = [1, 5, 17, 64, 200, 511, 512, 1000, 33, 3, 2, 129]
    return [[dice.randrange(2, VOCABULARY) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def plain(target, texts):
    """Plain answers, one prompt at a time, with the gap between the two best at each token."""
    with engine(target, **FLAGS, attention_backend="triton") as running:
        answers = [
            running.generate(
                input_ids=text,
                sampling_params=greedy(NEW_TOKENS),
                return_logprob=True,
                top_logprobs_num=2,
            )
            for text in texts
        ]
    ids = [answer["output_ids"] for answer in answers]
    gaps = [
        [best[0] - second[0] for best, second in answer["meta_info"]["output_top_logprobs"]]
        for answer in answers
    ]
    return ids, gaps


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, target, texts, plain):
    """Replays the plain answers, with wrong tokens and wrong elder siblings in between."""
    folder = tmp_path_factory.mktemp("script")
    config = json.loads((Path(target) / "config.json").read_text())
    config |= {
        "architectures": ["ScriptedDrafter"],
        "levels": 8,
        "wrong_token": 0.05,
        "wrong_sibling": 0.1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    script = [text + ids for text, ids in zip(texts, plain[0], strict=True)]
    (folder / "script.json").write_text(json.dumps(script))
    return str(folder)


def clear_differences(answers, plain, index):
    """First differences at a clear gap, and the number of near-ties."""
    clear, ties = [], 0
    for i, answer in zip(index, answers, strict=True):
        ids, expected = answer["output_ids"], plain[0][i]
        at = next(
            (n for n, pair in enumerate(zip(ids, expected, strict=True)) if len(set(pair)) > 1),
            None,
        )
        if at is None:
            continue
        gap = plain[1][i][at]
        if gap > NEAR_TIE:
            clear.append((i, at, gap))
        else:
            ties += 1
    return clear, ties


@pytest.fixture
def constant(monkeypatch):
    """Wide trees in every round, whatever they cost and bring."""
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"adaptive": False}))


@pytest.fixture
def cycle(tmp_path, monkeypatch):
    """Another one of the captured widths in every round."""
    return Cycling(tmp_path, monkeypatch)


def accept_lengths(flags, target, drafter, texts, plain, record_property):
    """Of all answers, whose ids are checked."""
    speculative = {"speculative_algorithm": "DART", "speculative_draft_model_path": drafter}
    with engine(target, **(FLAGS | speculative | flags)) as running:
        lengths = []
        ties = 0
        # Alone, then odd batches that no captured size fits, then all; the last from the cache.
        for index in ([3], [4, 5, 6], [0, 1, 2, 7, 8], range(7), range(12), range(12)):
            answers = running.generate(
                input_ids=[texts[i] for i in index], sampling_params=greedy(NEW_TOKENS)
            )
            clear, near = clear_differences(answers, plain, index)
            assert clear == []
            ties += near
            lengths += [answer["meta_info"]["spec_accept_length"] for answer in answers]
    record_property("near_ties", ties)
    mean = sum(lengths) / len(lengths)
    print(f"{flags}: accept length {mean:.2f}, near-ties {ties} of {len(lengths)}")
    return lengths


@pytest.mark.parametrize("flags", SETUPS.values(), ids=SETUPS.keys())
def test_ids_are_those_of_plain_decoding(
    flags, target, drafter, texts, plain, constant, record_property
):
    lengths = accept_lengths(flags, target, drafter, texts, plain, record_property)
    # Near-ties send a text off the script, where nothing is accepted; most stay on it.
    assert sum(lengths) / len(lengths) > 3


CAPTURED = {name: flags for name, flags in SETUPS.items() if "disable_cuda_graph" not in flags}


@pytest.mark.parametrize("flags", CAPTURED.values(), ids=CAPTURED.keys())
def test_every_captured_width_gives_the_ids_of_plain_decoding(
    flags, target, drafter, texts, plain, cycle, record_property
):
    """Rounds of all widths in turn; of a batch that no graph takes, plain ones alone."""
    lengths = accept_lengths(flags, target, drafter, texts, plain, record_property)
    # A sixth of the rounds is plain, another has room for 3 levels.
    assert max(lengths) > 2.5
    assert cycle.widths() == set(short_ladder(max(cycle.widths())))


def test_the_width_follows_what_rounds_take_and_bring(target, drafter, texts, plain):
    """As served by default: other ids nowhere, and figures that say why."""
    speculative = {"speculative-algorithm": "DART", "speculative-draft-model-path": drafter}
    graphs = {
        "cuda-graph-max-bs-decode": 8,
        "max-total-tokens": 32768,
        "dtype": "float16",
        "decode-log-interval": 1,
    }
    flags = [
        part for name, value in (speculative | graphs).items() for part in (f"--{name}", value)
    ]
    switches = ("--skip-tokenizer-init", "--enable-metrics", "--disable-prefill-cuda-graph")
    with server(target, *flags, *switches) as served:
        # All 12 are more than any graph takes.
        for index in ([3], [4, 5, 6], range(7), [3], range(7), range(12)):
            log = served.log.read_text()
            bodies = [{"input_ids": texts[i], "sampling_params": greedy(NEW_TOKENS)} for i in index]
            clear, _ = clear_differences(served.at_once(bodies), plain, index)
            assert clear == []
        _, text = served.get("/metrics")
    found = re.findall(r'sglang_dart:steps_total\{[^}]*width="(\d+)"[^}]*\} (\S+)', text)
    steps = {int(width): float(count) for width, count in found}
    print(f"rounds by width: {steps}")
    print(re.findall(r"sglang-dart: verify graphs.*", log))
    widths = short_ladder(61)
    assert set(steps) <= set(widths)
    assert len(steps) > 1
    assert f"verify graphs for {'/'.join(map(str, widths))} rows a request" in log
    assert set(re.findall(r"Decode batch.*cuda graph: (\w+)", log)) == {"True"}
    (seconds,) = re.findall(r"^sglang_dart:expected_seconds\{[^}]*\} (\S+)$", text, re.M)
    assert 0 < float(seconds) < 1


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_a_random_head_leaves_the_ids_alone(flags, target, texts, plain, tmp_path, cycle):
    """DART's own drafter, where the others here replay a script; every width in turn."""
    write_untrained_dart_head(Path(target), tmp_path / "drafter")
    speculative = {
        "speculative_algorithm": "DART",
        "speculative_draft_model_path": str(tmp_path / "drafter"),
    }
    with engine(target, **FLAGS, **speculative, **flags) as running:
        for index in ([3], [4, 5, 6], range(12)):
            answers = running.generate(
                input_ids=[texts[i] for i in index], sampling_params=greedy(NEW_TOKENS)
            )
            clear, _ = clear_differences(answers, plain, index)
            assert clear == []


@pytest.mark.parametrize("variant", ["pruned", "fixed", "chain"])
def test_a_causal_head_leaves_the_ids_alone(
    variant, target, texts, plain, tmp_path, monkeypatch, cycle
):
    """Random weights: hardly a draft is right, but every path goes through the head."""
    write_untrained_domino_drafter(Path(target), tmp_path / "drafter")
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"variant": variant}))
    speculative = {
        "speculative_algorithm": "DARTREE",
        "speculative_draft_model_path": str(tmp_path / "drafter"),
    }
    with engine(target, **FLAGS, **speculative) as running:
        for index in ([3], [4, 5, 6], range(12)):
            answers = running.generate(
                input_ids=[texts[i] for i in index], sampling_params=greedy(NEW_TOKENS)
            )
            clear, _ = clear_differences(answers, plain, index)
            assert clear == []
        assert all(a["meta_info"]["spec_verify_ct"] > 0 for a in answers)
