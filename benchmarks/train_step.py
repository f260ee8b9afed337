"""Time the parts of a training step: batch, target, forward, backward, optimiser.

    python -m benchmarks.train_step --model TARGET [--method dart --method domino] [--ops]

Random texts of 300 tokens, 220 of them in an answer; sizes as of examples/train_smollm2.sh. The
parts are waited for one by one, so their sum is more than a step that runs ahead: `step_ms` is such
a step. --ops prints the operators that take longest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.result import write_result
from sglang_dart.train.block import BlockRecipe, DominoSettings
from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.corpus import Corpus, collate, epoch_batches
from sglang_dart.train.dart import DartRecipe, DartSettings
from sglang_dart.train.loop import LoopSettings

LENGTH, PROMPT = 300, 80


def random_texts(count: int, vocab_size: int) -> Corpus:
    ids = np.random.default_rng(0).integers(0, vocab_size, count * LENGTH, dtype=np.int32)
    mask = np.tile(np.repeat(np.array([0, 1], np.int8), [PROMPT, LENGTH - PROMPT]), count)
    return Corpus(ids, mask, np.arange(count + 1) * LENGTH, 0)


def recipe_of(name: str, given: argparse.Namespace) -> Any:
    common = {"model": given.model, "data": (), "loop": LoopSettings(1e-3), "precision": "bf16"}
    if name == "dart":
        return DartRecipe(DartSettings(**common, draft_vocab_size=8192, chunk=given.chunk or 2048))
    return BlockRecipe(
        DominoSettings(
            **common,
            layers=2,
            taps=(1, 8, 14, 20, 27),
            emb_dim=64,
            gru_hidden_dim=256,
            anchors=given.anchors,
            chunk=given.chunk or 8192,
            # What the token is costs nothing.
            mask_token_id=0,
            labels=given.labels,
        )
    )


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = recipe_of(name, given)
    target = FrozenTarget.load(given.model, recipe.taps, dtype=torch.bfloat16, device=device)
    corpus = random_texts(max(2, 8 * given.batch_tokens // LENGTH), target.config.vocab_size)
    method: Any = recipe.prepare(target, corpus).method
    method.schedule(0.25)
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-4, fused=device.type == "cuda")
    batches = epoch_batches(corpus.lengths, given.batch_tokens, seed=0, epoch=0)
    spent: dict[str, list[float]] = {}

    def part(label: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.setdefault(label, []).append(1e3 * (time.perf_counter() - start))
        return found

    def forward(batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return method(batch, target.capture(batch.ids))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(method.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def whole(batch: Any) -> None:
        forward(batch).loss.backward()
        update()

    rows = 0
    for step in range(given.steps):
        texts = batches[step % len(batches)]
        batch = part("batch", lambda texts=texts: collate(corpus, texts, method).to(device))
        rows = len(batch.rows.prefix)
        part("target", lambda batch=batch: target.capture(batch.ids))
        # The target's forward is in it once more.
        loss = part("forward", lambda batch=batch: forward(batch).loss)
        part("backward", loss.backward)
        part("optimiser", update)
        part("step", lambda batch=batch: whole(batch))
    if given.ops:
        show_operators(whole, batch)
    figures = {f"{label}_ms": round(float(np.median(times)), 2) for label, times in spent.items()}
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    tokens = round(1e3 * batch.ids.numel() / figures["step_ms"])
    return {"method": name, "rows": rows, **figures, "tokens_per_s": tokens, "gib": round(peak, 1)}


def show_operators(run: Callable[[Any], None], batch: Any) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        run(batch)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", action="append", choices=("dart", "domino"))
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--chunk", type=int, help="default: 2048 for dart, 8192 for domino")
    parser.add_argument("--labels", default="text", choices=("text", "target"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ops", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = [measure(name, given) for name in given.method or ("dart", "domino")]
    table = Table(title="Training step, median")
    for column in found[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in found:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if given.output:
        command = "python -m benchmarks.train_step"
        write_result(given.output, command, {"settings": vars(given), "parts": found})


if __name__ == "__main__":
    main()
