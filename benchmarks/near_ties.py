"""How far a logit gap moves with the number of rows in a product: what makes a near-tie.

    python -m benchmarks.near_ties MODEL --data mt_bench.jsonl --dtype bfloat16

The target writes greedy answers row by row, then reads them again in one prefill of many rows; the
gap between the two best log-probabilities of a position differs by rounding alone. The largest
difference is what `sglang-dart eval --exactness` may call a near-tie in that dtype.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any

import numpy as np
import typer

from sglang_dart.measure.client import Request, generate
from sglang_dart.measure.datasets import encode_chat, load_questions, load_tokenizer
from sglang_dart.measure.server import serve

TOP_2 = {"return_logprob": True, "top_logprobs_num": 2}


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub id.")],
    data: Annotated[list[str], typer.Option(help="Prompts: JSON lines with `turns`, or a name.")],
    dtype: Annotated[str, typer.Option(help="Of the target.")] = "bfloat16",
    max_samples: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
) -> None:
    """Print percentiles of the difference as one JSON line."""
    tokenizer = load_tokenizer(model)
    prompts = [
        encode_chat(tokenizer, [{"role": "user", "content": question.turns[0]}])
        for question in load_questions(data, max_samples)
    ]
    # A cached prefix would be read with the gaps of the rows that made it.
    flags = ("--dtype", dtype, "--max-total-tokens", "20000", "--disable-radix-cache")
    with serve(model, flags) as server:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        written = generate(
            server.url, [Request(ids, sampling, TOP_2) for ids in prompts], concurrency
        )
        again = generate(
            server.url,
            [
                Request(
                    [*ids, *reply.ids],
                    {"temperature": 0, "max_new_tokens": 1},
                    TOP_2 | {"logprob_start_len": len(ids) - 1},
                )
                for ids, reply in zip(prompts, written, strict=True)
            ],
            concurrency,
        )
    moved = list(itertools.chain.from_iterable(map(_moved, written, again)))
    names = {"median": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "largest": 100}
    figures = dict(zip(names, np.percentile(moved, list(names.values())).tolist(), strict=True))
    print(json.dumps({"dtype": dtype, "positions": len(moved), "gap_moved": figures}))


def _moved(written: Any, again: Any) -> list[float]:
    """How far the gap between the two best moved at each position of one answer."""
    by_row = written.meta["output_top_logprobs"]
    # The first entry stands before the prompt's last token and has none.
    at_once = again.meta["input_top_logprobs"][1:]
    return [abs(_gap(one) - _gap(many)) for one, many in zip(by_row, at_once, strict=True)]


def _gap(top: Any) -> float:
    (best, *_), (second, *_) = top
    return best - second


if __name__ == "__main__":
    typer.run(main)
