"""What a prefill leaves behind: rows for the draft KV, and the newest tokens of each prompt."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dart.draft.drafter import Roots, Rows


def prompt_rows(batch: Any, feature: torch.Tensor, root: torch.Tensor) -> Rows:
    """The rows of the prompt tokens that this step has read.

    Row t carries the embedding of token t + 1. After the last row of a request stands its root,
    or, where a chunk ends inside the text, the next token of that.
    feature [sum of extend lengths, taps * H], root [bs] -> as many rows.
    """
    device = feature.device
    extend = torch.tensor(batch.extend_lens, dtype=torch.int64)
    prefix = torch.tensor(batch.prefix_lens, dtype=torch.int64)
    end = extend.cumsum(0)
    offset = torch.arange(int(end[-1])) - torch.repeat_interleave(end - extend, extend)
    position = torch.repeat_interleave(prefix, extend) + offset

    following = root.long()
    for i, req in enumerate(batch.reqs):
        if req is batch.chunked_req:
            known = _after_chunk(batch, int(prefix[i] + extend[i]))
            if known is not None:
                following = following.clone()
                # A slice: a scalar index would copy through the host and wait.
                following[i : i + 1].fill_(known)
    next_token = batch.input_ids.long().roll(-1)
    next_token[(end - 1).to(device, non_blocking=True)] = following
    return Rows(
        feature=feature,
        next_token=next_token,
        position=position.to(device, non_blocking=True),
        slot=batch.out_cache_loc,
    )


def _after_chunk(batch: Any, end: int) -> int | None:
    """The known token at position `end`, where the chunk of `batch.chunked_req` ends.

    A request that was retracted reads its answer anew, and 0.5.23 looks into the prompt only.
    """
    req = batch.chunked_req
    place = end - len(req.origin_input_ids)
    if 0 <= place < len(req.output_ids):
        return req.output_ids[place]
    return batch.chunked_req_next_prompt_token


def inner_roots(
    batch: Any, rows: Rows, slot_table: torch.Tensor, *, most: int, longest: int
) -> tuple[Roots, torch.Tensor] | None:
    """Tokens inside the prompts as roots to draft from, and the token that follows each.

    The last `most` of this step's rows that have 1 to `longest` tokens before them; None if there
    are none. slot_table [bs, W]: the requests' slots.
    """
    extend = torch.tensor(batch.extend_lens, dtype=torch.int64)
    prefix = torch.tensor(batch.prefix_lens, dtype=torch.int64)
    request = torch.repeat_interleave(torch.arange(len(extend)), extend)
    first = (extend.cumsum(0) - extend)[request]
    position = prefix[request] + torch.arange(len(request)) - first
    row = ((position > 0) & (position <= longest)).nonzero().flatten()[-most:]
    if not len(row):
        return None
    on_device = row.to(slot_table.device)
    roots = Roots(
        token=batch.input_ids.long()[on_device],
        length=rows.position[on_device],
        # Not the one before the root, which may be of an earlier step: block drafters read none.
        last_feature=rows.feature[on_device],
        slot_table=slot_table[request[row].to(slot_table.device), :longest],
    )
    return roots, rows.next_token[on_device]


def last_row(batch: Any, device: torch.device) -> torch.Tensor:
    """Index of each request's last row, [bs] int64."""
    end = torch.tensor(batch.extend_lens, dtype=torch.int64).cumsum(0)
    return (end - 1).to(device, non_blocking=True)


def prompt_tail(batch: Any, root: torch.Tensor, length: int) -> torch.Tensor:
    """The newest `length` tokens of each request, root last, -1 before the start: [bs, length]."""
    before = length - 1
    tail = torch.full((len(batch.reqs), length), -1, dtype=torch.int64)
    for i, req in enumerate(batch.reqs):
        text = list(req.origin_input_ids[-before:]) + list(req.output_ids[-before:])
        known = text[-before:] if before else []
        if known:
            tail[i, before - len(known) : before] = torch.tensor(known, dtype=torch.int64)
    tail = tail.to(root.device, non_blocking=True)
    tail[:, -1] = root
    return tail
