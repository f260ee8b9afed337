"""A plug-in that writes down, inside a running server, what the KV pools hold of live requests.

`environment(folder)` has a server load it beside ours; `snapshots(folder)` reads what it saw.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FOLDER = "SGLANG_DART_TEST_KV_FOLDER"
# Of the rounds, and in each one request in turn: a snapshot is some hundred kilobytes.
EVERY = 3

_rounds = itertools.count()


@dataclass(frozen=True)
class Snapshot:
    """One request at the start of a round. text: prompt and answer as far as the host knows it.

    length L: committed positions. target, draft [2 * layers, L, kv_heads, head_dim]: keys of all
    layers, then values.
    """

    rid: str
    text: list[int]
    length: int
    retractions: int
    cached: int
    target: torch.Tensor
    draft: torch.Tensor


def environment(folder: Path) -> dict[str, str]:
    """Variables for a server that writes its snapshots there; the folder is its entry point too."""
    info = folder / "kv_probe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nkv_probe = {__name__}:{register.__name__}\n"
    )
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), FOLDER: str(folder)}


def snapshots(folder: Path) -> Iterator[Snapshot]:
    """In the order of the rounds."""
    for file in sorted(folder.glob("*.pt")):
        yield Snapshot(**torch.load(file, weights_only=True))


def register() -> None:
    """Entry point of group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    step = "sglang_dart.engine.worker.TreeWorker.forward_batch_generation"
    HookRegistry.register(step, _look, HookType.BEFORE)


def _look(worker: Any, batch: Any, *_: Any, **__: Any) -> None:
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        return
    number, left = divmod(next(_rounds), EVERY)
    if left:
        return
    index = number % len(batch.reqs)
    req, length = batch.reqs[index], int(batch.seq_lens[index])
    slot = worker.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length].long()
    pool = batch.token_to_kv_pool_allocator.get_kvcache()
    draft = worker.drafter.kv
    snapshot = Snapshot(
        rid=req.rid,
        text=[*req.origin_input_ids, *req.output_ids],
        length=length,
        retractions=req.retraction_count,
        cached=req.cached_tokens,
        target=torch.stack([layer[slot] for layer in (*pool.k_buffer, *pool.v_buffer)]),
        draft=torch.cat([draft.key, draft.value])[:, slot],
    )
    torch.save(asdict(snapshot), Path(os.environ[FOLDER]) / f"{number:06}.pt")
