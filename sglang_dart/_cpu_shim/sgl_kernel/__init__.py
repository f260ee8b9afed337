"""Plain-torch stand-ins for the compiled operators that SGLang imports on a CPU.

The `sglang-kernel` wheel of PyPI holds CUDA code only and does not load without a driver; the CPU
build is not on PyPI. `sglang_dart.cpu_host` puts the folder above this package in front of
`sys.path` when neither is usable. Names and argument order are those that SGLang 0.5.23 calls
(`sglang/kernels/ops/speculative`, `ops/kvcache`, `ops/sampling`, `srt/mem_cache/allocation.py`).
"""

from __future__ import annotations

import ctypes
from typing import NoReturn

import torch

from sglang_dart.verify.noise import murmur3


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the packed slots [sum(end - start)] into columns start .. end - 1 of each row."""
    begin = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[begin : begin + count]
        begin += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Pack columns start .. end - 1 of each row into the front of `out_cache_loc`."""
    begin = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        count = end - start
        out_cache_loc[begin : begin + count] = req_to_token[row, start:end]
        begin += count


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes (entries that are not -1) into the front."""
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Take the last token of each accepted run; `accept_lens` [bs] counts the bonus."""
    last = (accept_lens.long() - 1).unsqueeze(1)
    run = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(run.gather(1, last).squeeze(1))


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy rows `src_loc` to rows `tgt_loc` in every buffer, as if all at once.

    data_ptrs [buffers] uint64 addresses, strides [buffers] bytes a row.
    """
    moves = [
        (target, source)
        for target, source in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True)
        if target != source
    ]
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # Every source is read before any row is written: a target may be a later source.
        rows = [ctypes.string_at(base + source * stride, stride) for _, source in moves]
        for (target, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree along the target's tokens.

    candidates, retrive_*, target_predict [bs, N]. Fills predicts [bs * N] at the visited nodes,
    accept_index [bs, D + 1] with flat node numbers, accept_token_num [bs] (the bonus not counted).
    """
    width = candidates.shape[1]
    last_column = accept_index.shape[1] - 1
    tokens, targets = candidates.tolist(), target_predict.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    flat = retrive_index.tolist()
    for i, token in enumerate(tokens):
        node, depth = 0, 0
        while True:
            accept_index[i, depth] = flat[i][node]
            predicts[flat[i][node]] = targets[i][node]
            child = children[i][node] if depth < last_column else -1
            while 0 <= child < width and token[child] != targets[i][node]:
                child = siblings[i][child]
            if not 0 <= child < width:
                break
            node, depth = child, depth + 1
        accept_token_num[i] = depth


def _murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 of (seed [n], position [n], column [m]) -> [n, m] uint32."""
    return murmur3(seed, positions, col_indices).to(torch.uint32)


# SGLang calls this one through torch.ops, inside a compiled function.
_murmur_hash32_op = torch.library.custom_op(
    "sgl_kernel::murmur_hash32_cpu", _murmur_hash32, mutates_args=()
)
_murmur_hash32_op.register_fake(
    lambda seed, positions, col_indices: seed.new_empty(
        (seed.shape[0], col_indices.shape[0]), dtype=torch.uint32
    )
)


def assign_draft_cache_locs_contiguous_cpu(*_: object, **__: object) -> NoReturn:
    """Needed by EAGLE's drafter only."""
    _unavailable("assign_draft_cache_locs_contiguous_cpu")


def build_tree_kernel_efficient_cpu(*_: object, **__: object) -> NoReturn:
    """Needed by EAGLE's drafter only."""
    _unavailable("build_tree_kernel_efficient_cpu")


def rotate_input_ids_cpu(*_: object, **__: object) -> NoReturn:
    """Needed by multi-layer EAGLE only."""
    _unavailable("rotate_input_ids_cpu")


def _unavailable(name: str) -> NoReturn:
    raise NotImplementedError(
        f"sgl_kernel.{name} has no stand-in: this speculative algorithm needs SGLang's CPU build "
        "of sgl-kernel; DART, DARTREE and NGRAM do not"
    )


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> zip[tuple[int, int, int]]:
    return zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
