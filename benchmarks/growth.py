"""Time the growth of draft trees: candidates in, packed trees out, as the engine calls it.

    python -m benchmarks.growth [--realtime] [--output docs/benchmarks/growth.json]

DART's settings unless a row says otherwise: 8 levels of 25 candidates, a beam of 20, 60 nodes
beside the root, an n-gram model of order 3. Every call meets other requests than the last, so that
no cache or branch predictor has seen them. On a busy machine, --realtime (as root) lets nothing
else onto the cores while a row is timed, a second or so each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import sglang_dart._core as _core
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cache import cached
from benchmarks.ngram_generate import EOS, token_stream, write_trie
from benchmarks.result import write_result
from sglang_dart.score.marginal import Marginal
from sglang_dart.tree.core import CoreGrower
from sglang_dart.tree.grow import grow
from sglang_dart.tree.pack import pack
from sglang_dart.tree.prune import prune
from sglang_dart.tree.recipe import TreeRecipe, beam, best_first, chain, fixed, pruned
from sglang_dart.types import Candidates

LEVELS, WIDTH, DECAY, WEIGHT = 8, 25, 0.9, 0.5
REQUESTS = 512


@dataclass(frozen=True)
class Requests:
    """Candidates [bs, D, K], tail [bs, 2] and the rest of what a plan needs."""

    candidates: Candidates
    tail: torch.Tensor
    root: torch.Tensor
    length: torch.Tensor
    end: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One measurement, in microseconds.

    call_us: median wall time of a call that plans `batch` requests. cpu_us: mean processor time of
    all threads for one request, which other programs on the machine disturb less.
    """

    case: str
    batch: int
    threads: int
    call_us: float
    cpu_us: float


def make_requests(text: np.ndarray, batch: int, seed: int = 1) -> list[Requests]:
    """REQUESTS places in a text of token ids that the model has counted, in batches.

    The text's own next token is a candidate of falling rank; the other candidates are tokens of
    the text at large, so frequent ones are common.
    """
    random = np.random.default_rng(seed)
    text = text.astype(np.int64)
    token = np.empty((REQUESTS, LEVELS, WIDTH), np.int64)
    place = random.integers(2, len(text) - LEVELS, REQUESTS)
    for request, at in enumerate(place):
        for level in range(LEVELS):
            others = np.unique(text[random.integers(0, len(text), 4 * WIDTH)])
            others = random.permutation(others[others != text[at + level]])[: WIDTH - 1]
            rank = min(random.geometric(0.45 * 0.9**level) - 1, WIDTH - 1)
            token[request, level] = np.insert(others, rank, text[at + level])
    logit = np.sort(random.normal(0, 2.5, token.shape))[..., ::-1].copy()
    log_prob = torch.log_softmax(torch.from_numpy(logit).float(), dim=-1)
    tail = np.stack([text[at - 2 : at] for at in place])
    columns = (torch.from_numpy(token), log_prob, torch.from_numpy(tail))
    return [
        Requests(
            Candidates(token, log_prob),
            tail,
            root=tail[:, -1].contiguous(),
            length=torch.full((batch,), 1000),
            end=torch.full((batch, 1), EOS),
        )
        for token, log_prob, tail in zip(*(c.split(batch) for c in columns), strict=True)
    ]


def measure_plan(
    plan: Callable[[Requests], object], batches: list[Requests], repeat: int
) -> tuple[float, float]:
    """Row.call_us and Row.cpu_us."""
    plan(batches[0])
    times = []
    cpu = time.process_time()
    for _ in range(repeat):
        for requests in batches:
            start = time.perf_counter()
            plan(requests)
            times.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    return 1e6 * float(np.median(times)), 1e6 * cpu / (REQUESTS * repeat)


def core_plan(
    recipe: TreeRecipe, model: _core.NgramModel | None, threads: int
) -> Callable[[Requests], object]:
    grower = CoreGrower(
        LEVELS, logit_decay=DECAY, ngram=model, ngram_weight=WEIGHT, threads=threads
    )
    return lambda r: grower.plan(
        recipe, r.candidates, r.root, r.length, end=r.end, tail=r.tail if model else None
    )


def torch_plan(recipe: TreeRecipe) -> Callable[[Requests], object]:
    def plan(r: Requests) -> object:
        ledger = grow(Marginal(r.candidates, DECAY), recipe, r.root, r.end)
        return pack(prune(ledger, recipe.budget, recipe.depth_bonus), r.length, impl="torch")

    return plan


@contextlib.contextmanager
def scheduled(realtime: bool) -> Iterator[None]:
    """Run all threads of this process at real-time priority, if asked to."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()] if realtime else []
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def measure(nodes: int, repeat: int, realtime: bool) -> tuple[list[Row], int]:
    trie = cached(f"{nodes}.trie", lambda path: write_trie(nodes, path))
    model = _core.NgramModel.open(str(trie))
    text = token_stream(nodes)
    cases = [
        ("beam, n-gram", lambda t: core_plan(beam(), model, t), (1, 32), (1, 2)),
        ("beam", lambda t: core_plan(beam(), None, t), (1, 32), (1, 2)),
        ("beam, plain torch", lambda t: torch_plan(beam()), (1,), (1,)),
        ("best_first 60", lambda t: core_plan(best_first(60), None, t), (1,), (1,)),
        ("pruned 64, width 12", lambda t: core_plan(pruned(), None, t), (1,), (1,)),
        ("fixed 64", lambda t: core_plan(fixed(64), None, t), (1,), (1,)),
        ("chain", lambda t: core_plan(chain(LEVELS), None, t), (1,), (1,)),
    ]
    rows = []
    for case, make_plan, batches, threads in cases:
        for batch in batches:
            requests = make_requests(text, batch)
            for count in threads if batch > 1 else (1,):
                plan = make_plan(count)
                with scheduled(realtime):
                    call_us, cpu_us = measure_plan(plan, requests, repeat)
                rows.append(Row(case, batch, count, round(call_us, 1), round(cpu_us, 1)))
    return rows, model.node_count


def show(rows: list[Row], nodes: int) -> None:
    table = Table(title=f"Growth of draft trees, n-gram model of {nodes:,} nodes")
    for column in ("case", "batch", "threads", "wall µs a call", "CPU µs a request"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        values = (row.batch, row.threads, row.call_us, row.cpu_us)
        table.add_row(row.case, *map(str, values))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=float, default=5e5, help="least size of the n-gram model")
    parser.add_argument("--repeat", type=int, default=3, help="calls with each batch of requests")
    parser.add_argument("--realtime", action="store_true", help="let nothing disturb the timing")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/growth.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, nodes = measure(int(arguments.nodes), arguments.repeat, arguments.realtime)
    show(rows, nodes)
    write_result(
        arguments.output,
        "python -m benchmarks.growth" + " --realtime" * arguments.realtime,
        {
            "ngram_nodes": nodes,
            "requests": REQUESTS * arguments.repeat,
            "rows": [asdict(row) for row in rows],
        },
    )


if __name__ == "__main__":
    main()
