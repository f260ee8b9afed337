"""Time drafting on a GPU: block attention, and a whole draft eager and replayed from graphs.

    python -m benchmarks.draft_kernels [--output draft_kernels.jsonl]

Shapes of Qwen3-8B and its published drafters in bfloat16, random weights: a block of 16 rows, 32
heads on 8 KV heads of 128, five layers, 151936 tokens. Each figure is the median of replays with a
cold L2 cache, as the target's verify leaves it; the bound is the context's KV at the bandwidth that
copying 1 GiB reaches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sglang_dart.capture import Captured, CudaRecorder
from sglang_dart.draft.captured import CapturedDrafter
from sglang_dart.draft.context_kv import ContextKV
from sglang_dart.draft.dflash_config import DFlashConfig, DominoConfig
from sglang_dart.draft.domino import DominoDrafter, DominoModel
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.tree.plan import TreePlanner
from sglang_dart.tree.recipe import pruned

BATCHES, LENGTHS = (1, 4, 16, 64), (512, 2048)
ROWS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 32, 8, 128, 5
HIDDEN, VOCABULARY, CANDIDATES, WIDTH = 4096, 151936, 64, 65
REPEAT = 20
FLUSH_BYTES = 1 << 28


def median_us(run: Callable[[], object]) -> float:
    """Median time of a call on the device, the cache flushed before each."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPEAT + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return sorted(times[3:])[REPEAT // 2]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source)) * 1e6


def scattered_table(bs: int, length: int, columns: int) -> torch.Tensor:
    """Slots of `bs` requests in random places, [bs, columns], as a long-running server has them."""
    slots = torch.randperm(bs * length, device="cuda").int().view(bs, length) + 1
    return torch.nn.functional.pad(slots, (0, columns - length))


def attention(bs: int, length: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of one layer's attention: the kernel, its twin, and what the memory allows."""
    shape = (LAYERS, bs * length + 1, KV_HEADS, HEAD_DIM)
    kv = ContextKV(*shape, dtype=torch.bfloat16, device="cuda")
    kv.key.normal_()
    kv.value.normal_()
    block = (
        torch.randn(bs, ROWS, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool, device="cuda")
    seen = torch.full((bs,), length, device="cuda")
    parts = (*block, mask, scattered_table(bs, length, length), seen)

    def layer_us(attend: Callable[..., torch.Tensor]) -> float:
        replay, _ = CudaRecorder()(lambda: tuple(attend(i, *parts) for i in range(LAYERS)))
        return median_us(replay) / LAYERS

    return {
        "bs": bs,
        "length": length,
        "kernel_us": layer_us(kv.attend),
        "twin_us": layer_us(kv.attend_plain),
        "bound_us": 4 * bs * length * KV_HEADS * HEAD_DIM / bandwidth * 1e6,
    }


def domino() -> DominoDrafter:
    """A drafter with the sizes of Qwen3-8B's, random weights."""
    config = DFlashConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=12288,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        block_size=ROWS,
        mask_token_id=151669,
        target_layer_ids=[1, 9, 17, 25, 33],
        domino=DominoConfig(shift_label=True, emb_dim=256, gru_hidden_dim=1024),
    )
    with torch.device("meta"):
        model = DominoModel(config)
    model = model.to_empty(device="cuda").to(torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    table = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return DominoDrafter(model, table.__getitem__, lambda hidden: hidden @ table.T, 36)


def planner_of(drafter: DominoDrafter) -> TreePlanner:
    return TreePlanner(
        lambda budget: pruned(budget, 12),
        drafter.levels,
        CANDIDATES,
        head=drafter.path_head,
        home=torch.device("cuda"),
    )


def drafting(drafter: DominoDrafter, bs: int, length: int) -> dict[str, Any]:
    """Microseconds of a round's own steps, eager and replayed, for DARTREE pruned 64/12."""
    drafter.allocate(bs * length + 1)
    columns = drafter.levels + 1
    table = scattered_table(bs, length, length + WIDTH)
    token = torch.randint(VOCABULARY, (bs * columns,), device="cuda")
    feature = torch.randn(bs * columns, LAYERS * HIDDEN, device="cuda", dtype=torch.bfloat16)
    position = torch.arange(length - columns, length, device="cuda").repeat(bs)
    rows = Rows(feature, token, position, table[:, length - columns : length].long().flatten())
    committed = torch.full((bs,), length, device="cuda")
    roots = Roots(token[:bs], committed, feature[:bs], table)

    record = CudaRecorder()
    replayed = CapturedDrafter(
        drafter,
        CANDIDATES,
        feature=feature,
        slot_table=table,
        rows=columns,
        sizes=[bs],
        record=record,
    )
    candidates = drafter.draft(roots, CANDIDATES)
    planners = planner_of(drafter), planner_of(drafter)
    like = candidates, committed, committed
    planners[1].capture(lambda growth, _: Captured(growth, like, [bs], record), [WIDTH])
    end = torch.full((bs, 1), -1)

    def step_us(drafter: Any, planner: TreePlanner) -> tuple[float, float, float]:
        return (
            median_us(lambda: drafter.append(rows)),
            median_us(lambda: drafter.draft(roots, CANDIDATES)),
            median_us(lambda: planner.plan(candidates, token[:bs, None], committed, WIDTH, end)),
        )

    steps = zip(
        ("append", "draft", "growth"),
        step_us(drafter, planners[0]),
        step_us(replayed, planners[1]),
        strict=True,
    )
    row: dict[str, Any] = {"bs": bs, "length": length}
    for name, eager, captured in steps:
        row |= {f"{name}_eager_us": eager, f"{name}_us": captured}
    return row


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_us", ", µs").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(v) if isinstance(v, int) else f"{v:.1f}" for v in row.values()))
    Console(width=140).print(table)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON lines: one for each row of the tables")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    drafter = domino()
    tables = {
        f"Attention of one layer, {name}, copies at {bandwidth / 1e12:.2f} TB/s": [
            attention(bs, length, bandwidth) for bs in BATCHES for length in LENGTHS
        ],
        "A round's own steps, DARTREE pruned 64, width 12": [
            drafting(drafter, bs, LENGTHS[-1]) for bs in BATCHES
        ],
    }
    for title, rows in tables.items():
        show(title, rows)
    if arguments.output:
        lines = [
            {"device": name, "bandwidth": bandwidth, "table": title} | row
            for title, rows in tables.items()
            for row in rows
        ]
        arguments.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
