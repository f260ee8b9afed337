"""Attention of a block of few rows to its request's context, by slot, and to the block itself.

Twin: ContextKV.attend_plain in draft/context_kv.py, which gathers the whole slot table; here each
request reads its own length. The query heads that share a KV head are folded into the rows of one
tile, so that the context is read once.

Roofline, for bs requests of L tokens, Q rows, heads in groups of G: bytes 2 * bs * L * kv_heads *
head_dim * itemsize, FLOPs 2 * Q * G times as many values. Qwen3-8B in bfloat16 (8 KV heads of 128,
G = 4), Q = 16: 4 KiB and 0.26 MFLOP a token, 64 FLOP a byte, where an H200 (4.3 TB/s, 790 TFLOP/s)
balances at 184: the memory decides, with 2.0 us a request of 2048 tokens and layer.

Few requests do not fill a GPU, so the context is split: `_part_kernel`, grid (bs, KV heads * row
tiles, splits), attends to one part; `_join_kernel`, grid (row tiles), weighs the parts' results by
their sums. How many splits depends on shapes only, so the launches can be captured.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Programs that fill a large GPU twice, and the most parts that one context is worth.
PROGRAMS = 256
MAX_SPLITS = 32
# Bytes of a tile of keys, and as many of values.
TILE_BYTES = 16384


@torch.library.custom_op("sglang_dart::block_attention", mutates_args=())
def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    slot_table: torch.Tensor,
    length: torch.Tensor,
) -> torch.Tensor:
    """Attend from a block of rows to their request's context and to the block itself.

    As ContextKV.attend; context_key, context_value [slots, kv_heads, head_dim] are one layer's,
    contiguous. head_dim is at most 256; a length of 0 or less leaves the block alone.
    """
    bs, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    assert dim <= 256, f"head_dim {dim} is more than 256"
    assert context_key.is_contiguous(), "context_key has gaps"
    assert context_value.is_contiguous(), "context_value has gaps"
    assert slot_table.stride(1) == 1, "the rows of slot_table have gaps"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not bs:
        return out
    folded = rows * (heads // kv_heads)
    block_d = max(16, triton.next_power_of_2(dim))
    # Exact float32 products take no tensor core, and larger tiles of them spill registers.
    exact = query.dtype == torch.float32
    block_m = min(
        max(16, triton.next_power_of_2(folded)), 32 if exact else 128 if block_d <= 128 else 64
    )
    row_tiles = triton.cdiv(folded, block_m)
    splits = split_count(bs * kv_heads * row_tiles)
    lines = bs * rows * heads
    # What one part gives needs no joining, and then goes to `out` directly.
    part = out if splits == 1 else out.new_empty(splits, lines, dim, dtype=torch.float32)
    log_sum = out.new_empty(splits, lines, dtype=torch.float32)
    _part_kernel[(bs, kv_heads * row_tiles, splits)](
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        block_mask.contiguous(),
        context_key,
        context_value,
        slot_table,
        length,
        part,
        log_sum,
        slot_table.stride(0),
        # The kernels count in powers of two.
        math.log2(math.e) / math.sqrt(dim),
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=max(16, TILE_BYTES // (block_d * key.element_size())),
        BLOCK_Q=max(16, triton.next_power_of_2(rows)),
        BLOCK_D=block_d,
        num_warps=8 if exact or block_m > 64 else 4,
        num_stages=3,
    )
    if splits > 1:
        block_r = max(1, MAX_SPLITS // splits)
        _join_kernel[(triton.cdiv(lines, block_r),)](
            part, log_sum, out, lines, DIM=dim, SPLITS=splits, BLOCK_R=block_r, BLOCK_D=block_d
        )
    return out


@block_attention.register_fake
def _(query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def split_count(programs: int) -> int:
    """Parts of a context, a power of two, where one part each takes so many programs."""
    wanted = min(MAX_SPLITS, max(1, PROGRAMS // programs))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def _absorb(query, key, value, m_seen, scale, peak, total, out):
    """Take one tile into a running softmax: query [M, D], key [D, N], value [N, D], m_seen [M, N].

    peak, total [M]: highest score so far, and the sum of all weights against it; out [M, D].
    """
    score = tl.dot(query, key, input_precision="ieee") * scale
    score = tl.where(m_seen, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    # A padding row has seen nothing, and -inf - -inf is no number.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    out = out * shrink[:, None]
    out += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return new_peak, total * shrink + tl.sum(weight, 1), out


# Not specialised: the width of a slot table changes from step to step without graphs.
@triton.jit(do_not_specialize=["slot_stride"])
def _part_kernel(
    p_query,
    p_key,
    p_value,
    p_mask,
    p_context_key,
    p_context_value,
    p_slot,
    p_length,
    p_part,
    p_log_sum,
    slot_stride,
    scale,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    i_request = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1) % KV_HEADS
    i_tile = tl.program_id(1) // KV_HEADS
    i_split = tl.program_id(2)
    dim = tl.arange(0, BLOCK_D)
    m_dim = dim < DIM

    # Folded row f is query head f % GROUP of this KV head, at row f // GROUP of the block.
    folded = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = folded // GROUP
    m_row = row < ROWS
    # Its place among all rows and heads of all requests.
    line = (i_request * ROWS + row) * HEADS + i_head * GROUP + folded % GROUP  # [M]
    o_query = line[:, None] * DIM + dim  # [M, D]
    m_query = m_row[:, None] & m_dim
    query = tl.load(p_query + o_query, mask=m_query, other=0.0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    if i_split == 0:
        other = tl.arange(0, BLOCK_Q)
        m_other = other < ROWS
        o_other = ((i_request * ROWS + other) * KV_HEADS + i_head) * DIM
        key = tl.load(
            p_key + o_other[None, :] + dim[:, None],
            mask=m_other[None, :] & m_dim[:, None],
            other=0.0,
        )
        value = tl.load(p_value + o_other[:, None] + dim, mask=m_other[:, None] & m_dim, other=0.0)
        m_seen = tl.load(
            p_mask + row[:, None] * ROWS + other, mask=m_row[:, None] & m_other, other=0
        )
        peak, total, out = _absorb(query, key, value, m_seen != 0, scale, peak, total, out)

    length = tl.maximum(tl.load(p_length + i_request).to(tl.int32), 0)
    span = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    begin = i_split * span
    end = tl.minimum(begin + span, length)
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        m_column = column < end
        slot = tl.load(p_slot + i_request * slot_stride + column, mask=m_column, other=0)
        o_slot = (slot.to(tl.int64) * KV_HEADS + i_head) * DIM
        key = tl.load(
            p_context_key + o_slot[None, :] + dim[:, None],
            mask=m_column[None, :] & m_dim[:, None],
            other=0.0,
        )
        value = tl.load(
            p_context_value + o_slot[:, None] + dim, mask=m_column[:, None] & m_dim, other=0.0
        )
        peak, total, out = _absorb(query, key, value, m_column[None, :], scale, peak, total, out)

    if SPLITS == 1:
        # Padding rows have a sum of 0, and are not stored.
        out = out / tl.where(m_row, total, 1.0)[:, None]
        tl.store(p_part + o_query, out.to(p_part.dtype.element_ty), mask=m_query)
    else:
        # A part beyond the context stores no rows: its sum of 0 says so.
        LINES = tl.num_programs(0).to(tl.int64) * ROWS * HEADS
        full = m_row & (total > 0)
        part = out / tl.where(full, total, 1.0)[:, None]
        log_sum = tl.where(full, peak + tl.log2(tl.where(full, total, 1.0)), float("-inf"))
        tl.store(p_log_sum + i_split * LINES + line, log_sum, mask=m_row)
        tl.store(p_part + i_split * LINES * DIM + o_query, part, mask=full[:, None] & m_dim)


@triton.jit(do_not_specialize=["lines"])
def _join_kernel(
    p_part,
    p_log_sum,
    p_out,
    lines,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dim = tl.arange(0, BLOCK_D)
    line = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = tl.arange(0, SPLITS)[:, None].to(tl.int64) * lines + line  # [S, R]
    m_line = line < lines
    log_sum = tl.load(p_log_sum + at, mask=m_line, other=0.0)
    # The first part holds the block, so that the highest is never -inf.
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    weight = weight / tl.sum(weight, 0)
    m_part = (m_line & (log_sum > float("-inf")))[:, :, None] & (dim < DIM)
    part = tl.load(p_part + at[:, :, None] * DIM + dim, mask=m_part, other=0.0)  # [S, R, D]
    out = tl.sum(part * weight[:, :, None], 0)
    m_out = m_line[:, None] & (dim < DIM)
    tl.store(p_out + line[:, None] * DIM + dim, out.to(p_out.dtype.element_ty), mask=m_out)
