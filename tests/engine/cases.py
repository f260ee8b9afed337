"""Requests that speculation must answer as plain decoding does, each a body of /generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.engine.byte_tokenizer import END
from tests.engine.conftest import CONTEXT_LENGTH, TREE_ROWS, VOCABULARY, greedy, prompts

TEXT = prompts(16)[9]
# Letters only, so that text can be matched.
LETTERS = {str(byte): 40.0 for byte in b"abcdefgh"}

NAME_AND_NUMBER = """{
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "n": {"enum": [1, 22, 333]}},
    "required": ["name", "n"],
    "additionalProperties": false
}"""
ONE_NUMBER = """{
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": false
}"""
STRUCTURE = """{
    "type": "structural_tag",
    "structures": [
        {"begin": "<f>", "schema": {"type": "object", "properties": {"a": {"const": 1}},
         "required": ["a"], "additionalProperties": false}, "end": "</f>"}
    ],
    "triggers": ["<f>"]
}"""
GRAMMARS: dict[str, dict[str, str]] = {
    "schema": {"json_schema": NAME_AND_NUMBER},
    "smallest schema": {"json_schema": ONE_NUMBER},
    "regex": {"regex": "[ab]{3}-[0-9]{4}(x|yz)"},
    "ebnf": {"ebnf": 'root ::= "yes" | "no" | "maybe " [a-z] [a-z] [a-z]'},
}


def body(input_ids: Any, sampling_params: Any, **fields: Any) -> dict[str, Any]:
    return {"input_ids": input_ids, "sampling_params": sampling_params, **fields}


def case(new_tokens: int, **sampling: Any) -> dict[str, Any]:
    return body(TEXT, greedy(new_tokens, **sampling))


def first_questions() -> list[dict[str, Any]]:
    """What must be known before the cases can be written: `cases(*answers)`."""
    return [case(40), case(40, logit_bias=LETTERS)]


def cases(answer: dict[str, Any], letters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All cases by name. The names do not depend on the answers."""
    ids, text = answer["output_ids"], letters["text"]
    return (
        _lengths()
        | _ends(ids)
        | _stop_strings(text)
        | _limits()
        | _smallest()
        | _grammars()
        | _log_probabilities()
        | _others(ids)
    )


def _lengths() -> dict[str, dict[str, Any]]:
    # Trees are 8 levels deep, a full run commits 9 tokens.
    return {f"{n} new tokens": case(n) for n in (0, 1, 2, 8, 9, 10, 17)}


def _ends(ids: Sequence[int]) -> dict[str, dict[str, Any]]:
    unseen = next(token for token in range(VOCABULARY) if token not in ids)
    forced = {str(END): 100.0}
    return {
        "several stop tokens": case(40, stop_token_ids=[unseen, ids[9], ids[6]]),
        "end tokens count": case(40, ignore_eos=False),
        "end tokens do not count": case(40, ignore_eos=True, stop_token_ids=[ids[3]]),
        "at least 12 tokens": case(40, stop_token_ids=[ids[3]], min_new_tokens=12),
        "the end is wanted at once": case(20, ignore_eos=False, logit_bias=forced),
        "the end is wanted at once, at least 5 tokens": case(
            20, ignore_eos=False, logit_bias=forced, min_new_tokens=5
        ),
        "the end is wanted and ignored": case(20, ignore_eos=True, logit_bias=forced),
        "the first choice is forbidden": case(20, logit_bias={str(ids[0]): -100.0}),
    }


def _stop_strings(text: str) -> dict[str, dict[str, Any]]:
    def stops(**fields: Any) -> dict[str, Any]:
        return case(40, logit_bias=LETTERS, ignore_eos=False, **fields)

    return {
        "stop string": stops(stop=[text[11:14]]),
        "stop string, kept": stops(stop=[text[7:9]], no_stop_trim=True),
        "stop strings": stops(stop=["zzz", text[16:19], text[12:15]]),
        "stop expression": stops(stop_regex=f"{text[9]}{text[10]}."),
        "stop string behind the limit": case(
            12, logit_bias=LETTERS, ignore_eos=False, stop=[text[11:14]]
        ),
    }


def _limits() -> dict[str, dict[str, Any]]:
    def long(length: int) -> list[int]:
        return [(7 * i) % 251 for i in range(length)]

    to_the_limit = body(
        [long(60), prompts(16)[3]],
        [greedy(CONTEXT_LENGTH - 60), greedy(96)],
        rid=["to-limit", "beside"],
    )
    return {
        "prompt of the context length less 1": body(long(CONTEXT_LENGTH - 1), greedy(1)),
        # SGLang keeps room for 6 tokens and refuses the first of these.
        "prompt of the context length less 6": body(long(CONTEXT_LENGTH - 6), greedy(6)),
        "longest prompt": body(long(CONTEXT_LENGTH - 7), greedy(7)),
        "longest prompt, one token": body(long(CONTEXT_LENGTH - 7), greedy(1)),
        "prompt of the context length less a tree": body(
            long(CONTEXT_LENGTH - TREE_ROWS), greedy(20)
        ),
        "prompt of the context length": body(long(CONTEXT_LENGTH), greedy(20)),
        "more tokens than the context holds": body(long(60), greedy(CONTEXT_LENGTH)),
        "an answer to the context length, and a neighbour": to_the_limit,
    }


def _smallest() -> dict[str, dict[str, Any]]:
    small = [[1], [0], [5, 6], [END]]
    alone = {f"prompt {ids}": body(ids, greedy(20)) for ids in small}
    batch = [*small, *prompts(16)[10:14]]
    return alone | {
        "prompt [1], one token": body([1], greedy(1)),
        "smallest beside long ones": body(batch, [greedy(20)] * len(batch)),
    }


def _grammars() -> dict[str, dict[str, Any]]:
    # Room for every answer, and no end but the grammar's.
    alone = {name: case(60, ignore_eos=False, **field) for name, field in GRAMMARS.items()}
    tag = case(30, ignore_eos=False, logit_bias=LETTERS, structural_tag=STRUCTURE)
    mixed = [greedy(60, ignore_eos=False, **field) for field in GRAMMARS.values()] + [greedy(20)]
    count = 15
    return alone | {
        "structural tag": tag,
        "grammars and none in one batch": body([TEXT] * len(mixed), mixed),
        "many grammars": body(
            [prompts(16)[i] for i in range(count)],
            [greedy(60, ignore_eos=False, **GRAMMARS["schema"])] * count,
        ),
    }


def _log_probabilities() -> dict[str, dict[str, Any]]:
    fields = {"return_logprob": True, "top_logprobs_num": 5}
    return {
        "log-probabilities": case(30) | fields,
        "log-probabilities of the prompt": case(12) | fields | {"logprob_start_len": 0},
        "log-probabilities from a start": case(12) | fields | {"logprob_start_len": len(TEXT) - 3},
        "log-probabilities of chosen tokens": case(12) | fields | {"token_ids_logprob": [1, 200]},
        "log-probabilities with penalties": case(30, frequency_penalty=0.7) | fields,
        "log-probabilities for half of a batch": body(
            [TEXT, prompts(16)[12]] * 2,
            [greedy(20)] * 4,
            return_logprob=[True, False] * 2,
            top_logprobs_num=[2, 0] * 2,
        ),
    }


def _others(ids: Sequence[int]) -> dict[str, dict[str, Any]]:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return {
        "two copies": case(24, n=2),
        "custom processor": case(20, custom_params={"token_ids": [ids[0], ids[4]]})
        | {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()},
        "hidden states": case(5) | {"return_hidden_states": True},
        "input embeddings": {"input_embeds": [[0.1] * 64] * 3, "sampling_params": greedy(5)},
        "a picture": {
            "text": "a",
            "image_data": "data:image/png;base64,AAAA",
            "sampling_params": greedy(5),
        },
    }
