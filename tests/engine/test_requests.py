"""Every field of a request, over HTTP: the answer of plain decoding, in deep runs."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine import cases
from tests.engine.api import Api
from tests.engine.byte_tokenizer import encode
from tests.engine.cases import GRAMMARS, TEXT, body, case
from tests.engine.conftest import CONTEXT_LENGTH, TREE_ROWS, greedy, prompts, server

pytestmark = pytest.mark.server

FLAGS = (
    *("--context-length", CONTEXT_LENGTH),
    # Has no format of its own for required calls: they come as a JSON array.
    *("--tool-call-parser", "pythonic"),
    *("--decode-log-interval", 1),
    # Each has its own test; whether whitespace may stand between tokens is not their subject.
    "--constrained-json-disable-any-whitespace",
    "--enable-custom-logit-processor",
    "--enable-metrics",
)
NAMES = cases.cases({"output_ids": list(range(40))}, {"text": "a" * 40}).keys()

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"get_{what}",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for what in ("weather", "time")
]
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Weather and time in Rome?"}],
    "temperature": 0,
    "max_tokens": 200,
    # The target would fill its calls with blanks; behind one it begins the next.
    "logit_bias": {str(ord(blank)): -100 for blank in "\t\n\r "} | {str(ord(",")): 100},
    "tools": TOOLS,
    "tool_choice": "required",
}
TOOL_TURN = "user: Weather and time in Rome?\nassistant:"


@pytest.fixture(scope="module")
def ended_target(target: str, record: list[list[int]], tmp_path_factory) -> str:
    """The target with a second end token, which its own answer to TEXT contains."""
    answer = record[9][len(TEXT) :]
    end = next(t for n, t in enumerate(answer) if n > 4 and t > 127 and t not in answer[:n])
    folder = tmp_path_factory.mktemp("ended")
    for file in Path(target).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, end]}))
    return str(folder)


@pytest.fixture(scope="module")
def updated_weights(target: str, tmp_path_factory) -> str:
    """Another target of the same shapes: its output rows stand in another order."""
    folder = tmp_path_factory.mktemp("updated")
    shutil.copytree(target, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0).contiguous()
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def plain(ended_target: str, updated_weights: str) -> dict[str, Any]:
    """Requests and plain decoding's answers, (status, body) each."""
    with server(ended_target, *FLAGS, "--disable-overlap-schedule") as api:
        questions = cases.cases(*[api.generate(body) for body in cases.first_questions()])
        answers = {name: api.post("/generate", body) for name, body in questions.items()}
        chat = api.post("/v1/chat/completions", CHAT)
        streamed = streamed_calls(api)
        embedding = api.post("/v1/embeddings", {"model": "default", "input": "a"})
        updated = update(api, updated_weights)
    return {
        "questions": questions,
        "answers": answers,
        "chat": chat,
        "streamed": streamed,
        "embedding": embedding,
        "updated": updated,
    }


def update(api: Api, weights: str) -> list[list[int]]:
    """Ids with other weights, after a flush."""
    status, said = api.post("/update_weights_from_disk", {"model_path": weights})
    assert status == 200, said
    assert api.post("/flush_cache", {})[0] == 200
    answers = api.generate(body(prompts(16)[4:8], [greedy(24)] * 4))
    return [answer["output_ids"] for answer in answers]


def transcripts(plain: dict[str, Any]) -> Iterator[list[int]]:
    """Prompts with their plain answers: what the scripted drafter replays."""
    for name, question in plain["questions"].items():
        status, answer = plain["answers"][name]
        if status != 200 or "input_ids" not in question:
            continue
        texts, answers = question["input_ids"], answer
        if not isinstance(answer, list):
            texts, answers = [texts], [answer]
        elif not isinstance(texts[0], list):
            texts = [texts] * len(answer)
        for text, one in zip(texts, answers, strict=True):
            yield [*text, *one["output_ids"]]
    written = ", ".join(
        json.dumps({"name": name, "parameters": json.loads(arguments)})
        for name, arguments in plain["streamed"][:-1]
    )
    yield [*encode(TOOL_TURN), *encode(f"[{written}]")]


@pytest.fixture(scope="module", params=["DART", "DARTREE"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(algorithm: str, plain: dict[str, Any], script: Any, ended_target: str) -> Iterator[Api]:
    folder = script(list(transcripts(plain)), wrong_token=0.05, wrong_sibling=0.1)
    flags = (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder),
        *("--speculative-num-draft-tokens", TREE_ROWS, "--skip-server-warmup"),
    )
    with server(ended_target, *FLAGS, *flags) as api:
        yield api


def assert_same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["text"] == expected["text"]
    meta, plain_meta = answer["meta_info"], expected["meta_info"]
    for field in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert meta[field] == plain_meta[field], field
    assert meta["completion_tokens"] == len(answer["output_ids"])
    for field in (name for name in plain_meta if "logprobs" in name):
        assert_close(meta[field], plain_meta[field])
    if "spec_verify_ct" in meta:
        assert 1 <= meta["spec_accept_length"] <= 9
        assert 0 <= meta["spec_accept_rate"] <= 1


def assert_close(given: Any, expected: Any) -> None:
    """Equal, up to rounding in the floats of nested lists."""
    if isinstance(expected, float):
        assert given == pytest.approx(expected, abs=2e-4)
    elif isinstance(expected, list):
        assert len(given) == len(expected)
        for pair in zip(given, expected, strict=True):
            assert_close(*pair)
    else:
        assert given == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_that_of_plain_decoding(
    served: Api, plain: dict[str, Any], name: str
) -> None:
    expected_status, expected = plain["answers"][name]
    status, answer = served.post("/generate", plain["questions"][name])
    assert status == expected_status, answer
    if status != 200:
        assert answer["error"]["message"] == expected["error"]["message"]
    elif isinstance(expected, list):
        assert len(answer) == len(expected)
        for pair in zip(answer, expected, strict=True):
            assert_same(*pair)
    else:
        assert_same(answer, expected)


def test_the_cases_are_what_they_are_called(plain: dict[str, Any]) -> None:
    """Plain decoding ends where a case wants it to, so the comparison has something to see."""

    def finish(name: str) -> dict[str, Any]:
        return plain["answers"][name][1]["meta_info"]["finish_reason"]

    for name in (
        "several stop tokens",
        "end tokens count",
        "at least 12 tokens",
        "the end is wanted at once",
        "the end is wanted at once, at least 5 tokens",
        "stop string",
        "stop string, kept",
        "stop strings",
        "stop expression",
        *GRAMMARS,
    ):
        assert finish(name)["type"] == "stop", name
    for name in ("end tokens do not count", "the end is wanted and ignored"):
        assert finish(name)["type"] == "length", name
    assert plain["answers"]["hidden states"][0] == 400
    assert plain["answers"]["prompt of the context length"][0] == 400


def test_grammars_are_kept_and_runs_stay_deep(served: Api, plain: dict[str, Any]) -> None:
    answer = served.generate(plain["questions"]["schema"])
    value = json.loads(answer["text"])
    assert value["name"] in ("alpha", "beta")
    assert value["n"] in (1, 22, 333)
    assert answer["meta_info"]["spec_accept_length"] > 2
    assert json.loads(served.generate(plain["questions"]["smallest schema"])["text"]) == {"a": 1}


def test_sampled_answers_keep_their_grammar(served: Api) -> None:
    bodies = [
        case(60, ignore_eos=False, temperature=0.8, **field)
        for field in GRAMMARS.values()
        for _ in range(6)
    ]
    checks = {
        "schema": lambda text: set(json.loads(text)) == {"name", "n"},
        "smallest schema": lambda text: json.loads(text) == {"a": 1},
        "regex": lambda text: re.fullmatch(GRAMMARS["regex"]["regex"], text),
        "ebnf": lambda text: re.fullmatch("yes|no|maybe [a-z]{3}", text),
    }
    for number, answer in enumerate(served.at_once(bodies)):
        name = list(GRAMMARS)[number // 6]
        assert checks[name](answer["text"]), answer["text"]


def test_sampled_log_probabilities_are_those_of_their_tokens(served: Api) -> None:
    """What a sampled token reports is what the target says when it reads the answer again."""
    sampled = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    answer = served.generate(body(TEXT, sampled, return_logprob=True))
    ids = answer["output_ids"]
    again = served.generate(
        body(
            TEXT + ids,
            greedy(1),
            return_logprob=True,
            logprob_start_len=len(TEXT) - 1,
        )
    )
    read = again["meta_info"]["input_token_logprobs"][1:]
    assert_close(answer["meta_info"]["output_token_logprobs"], read)


def test_sampled_copies_differ(served: Api) -> None:
    answers = served.generate(body(TEXT, greedy(24, n=4) | {"temperature": 1.0}))
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4


@pytest.mark.parametrize("name", ["17 new tokens", "several stop tokens", "stop string", "schema"])
def test_streamed_pieces_make_the_whole(served: Api, plain: dict[str, Any], name: str) -> None:
    whole = plain["answers"][name][1]
    question = plain["questions"][name] | {"return_logprob": True}
    with served.stream("/generate", question) as events:
        seen = list(events)
    texts = [event["text"] for event in seen]
    # Each event repeats what was sent before.
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == whole["text"]
    assert seen[-1]["output_ids"] == whole["output_ids"]
    assert seen[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    logged = [token for _, token, _ in seen[-1]["meta_info"]["output_token_logprobs"]]
    assert logged == whole["output_ids"]
    if name == "17 new tokens":
        assert len(seen) < 17, "a run is one event"


def streamed_calls(api: Api) -> list[list[str]]:
    """Names and arguments of the calls that CHAT streams, joined; the last may be cut."""
    calls: dict[int, list[str]] = {}
    with api.stream("/v1/chat/completions", CHAT) as events:
        for event in events:
            for piece in event["choices"][0]["delta"].get("tool_calls") or []:
                call = calls.setdefault(piece["index"], ["", ""])
                call[0] += piece["function"].get("name") or ""
                call[1] += piece["function"].get("arguments") or ""
    return [calls[index] for index in sorted(calls)]


def test_tool_calls_are_those_of_plain_decoding(served: Api, plain: dict[str, Any]) -> None:
    """The array is cut at the limit, so only a stream tells its calls."""
    status, answer = served.post("/v1/chat/completions", CHAT)
    assert status == 200
    assert answer["choices"] == plain["chat"][1]["choices"]
    streamed = streamed_calls(served)
    assert streamed == plain["streamed"]
    whole = streamed[:-1]
    assert len(whole) > 1, "one chunk may end a call and begin the next"
    for name, arguments in whole:
        assert name in ("get_weather", "get_time")
        assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_beam_search_is_refused_by_name(served: Api) -> None:
    status, answer = served.post("/generate", case(5, beam_width=2))
    assert status == 400
    assert "Beam search is not supported with speculative decoding" in answer["error"]["message"]


def test_embeddings_are_answered_as_plain_serving_does(served: Api, plain: dict[str, Any]) -> None:
    status, answer = served.post("/v1/embeddings", {"model": "default", "input": "a"})
    assert status == plain["embedding"][0] == 400
    assert answer == plain["embedding"][1]


def counters(api: Api) -> dict[str, float]:
    """Our counters and SGLang's accept length, by their labels."""
    status, text = api.get("/metrics")
    assert status == 200
    found = re.findall(r'^(sglang_dart:\w+)\{(?:.*?depth="(\d+)")?.*\} (\S+)$', text, re.M)
    return {name + depth: float(value) for name, depth, value in found}


def test_figures_agree(served: Api, algorithm: str, plain: dict[str, Any]) -> None:
    """Request, Prometheus and server say the same of the same rounds."""
    before = counters(served)
    answers = served.generate(body(prompts(16), [greedy(96)] * 16))
    after = counters(served)
    metas = [answer["meta_info"] for answer in answers]
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    assert after["sglang_dart:rounds_total"] - before["sglang_dart:rounds_total"] == rounds
    histograms = [meta["spec_correct_drafts_histogram"] for meta in metas]
    for depth in range(1, 9):
        reached = sum(sum(histogram[depth:]) for histogram in histograms)
        name = f"sglang_dart:accepted_total{depth}"
        assert after[name] - before[name] == reached
    for meta, histogram in zip(metas, histograms, strict=True):
        assert sum(histogram) == meta["spec_verify_ct"]
        accepted = sum(depth * count for depth, count in enumerate(histogram))
        # One token of the prefill; of the last run a part may be cut.
        assert 0 <= accepted + meta["spec_verify_ct"] + 1 - 96 <= 8
        length = 1 + (95 - meta["spec_verify_ct"]) / meta["spec_verify_ct"]
        assert meta["spec_accept_length"] == pytest.approx(length)
    status, info = served.get("/server_info")
    assert status == 200
    assert 1 <= info["internal_states"][0]["avg_spec_accept_length"] <= 9
    assert info["speculative_algorithm"] == algorithm
    logged = [float(n) for n in re.findall(r"accept len: ([\d.]+)", served.log.read_text())]
    assert logged
    assert 1 <= min(logged) <= max(logged) <= 9


def test_aborted_and_abandoned_requests_leave_nothing(served: Api, plain: dict[str, Any]) -> None:
    long = body(TEXT, greedy(150))
    with served.stream("/generate", long | {"rid": "abandoned"}) as events:
        next(events)
    with served.stream("/generate", long | {"rid": "aborted"}) as events:
        next(events)
        assert served.post("/flush_cache", {})[0] == 400, "busy"
        assert served.post("/abort_request", {"rid": "aborted"})[0] == 200
        last = list(events)[-1]
    assert last["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    idle(served)
    name = "17 new tokens"
    assert_same(served.generate(plain["questions"][name]), plain["answers"][name][1])


def idle(api: Api) -> None:
    """Wait until no request holds a slot."""
    until = time.monotonic() + 60
    while api.used_slots():
        assert time.monotonic() < until, "slots are not given back"
        time.sleep(0.1)


def test_health_and_idle(served: Api, plain: dict[str, Any]) -> None:
    assert served.get("/health")[0] == 200
    assert served.get("/health_generate")[0] == 200
    time.sleep(3)
    # One of two ends in its first token: the other's round runs on.
    both = body([TEXT, prompts(16)[5]], [greedy(1), greedy(17)])
    first, second = served.generate(both)
    whole = plain["answers"]["17 new tokens"][1]["output_ids"]
    assert first["output_ids"] == whole[:1]
    assert second["meta_info"]["finish_reason"]["type"] == "length"
    idle(served)
    assert served.get("/health_generate")[0] == 200


def test_new_weights_answer_as_plain_decoding_with_them(
    served: Api, plain: dict[str, Any], updated_weights: str
) -> None:
    """Last: the server keeps the other weights."""
    assert update(served, updated_weights) == plain["updated"]
