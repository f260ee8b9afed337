"""The attention backend of hosts without a GPU, against the one that it replaces and the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dart.engine import cpu_attention
from sglang_dart.engine.cpu_attention import TorchNativeTreeBackend

HEADS, KV_HEADS, DIM, SLOTS, COLUMNS = 6, 2, 8, 200, 40


class Pool:
    """One layer of KV, written and read by slot."""

    def __init__(self) -> None:
        self.key, self.value = (torch.randn(SLOTS, KV_HEADS, DIM) for _ in range(2))

    def get_key_buffer(self, _: int) -> torch.Tensor:
        return self.key

    def get_value_buffer(self, _: int) -> torch.Tensor:
        return self.value

    def set_kv_buffer(self, _: Any, where: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key[where.loc] = key.view(-1, KV_HEADS, DIM)
        self.value[where.loc] = value.view(-1, KV_HEADS, DIM)


@pytest.fixture
def runner() -> SimpleNamespace:
    torch.manual_seed(0)
    table = torch.stack([torch.randperm(SLOTS)[:COLUMNS] for _ in range(4)]).int()
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=Pool(),
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
    )


def layer(window: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        layer_id=0,
        scaling=0.3,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=window,
    )


def step(runner: SimpleNamespace, mode: ForwardMode, before: list[int], new: list[int]) -> Any:
    """A forward batch whose requests hold `before` tokens and bring `new` ones."""
    rows = torch.arange(len(before)) + 1
    table = runner.req_to_token_pool.req_to_token
    total = [b + n for b, n in zip(before, new, strict=True)]
    slots = [table[row, b:t] for row, b, t in zip(rows, before, total, strict=True)]
    verify = mode.is_target_verify()
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(before),
        req_pool_indices=rows,
        seq_lens=torch.tensor(before if verify else total),
        extend_prefix_lens=None if verify else torch.tensor(before),
        extend_seq_lens=None if verify else torch.tensor(new),
        encoder_lens=None,
        out_cache_loc=torch.cat(slots).long(),
        encoder_out_cache_loc=None,
        spec_info=None,
    )


def inputs(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("bound", [0, 2**30], ids=["one by one", "padded batch"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("before", [[7], [5, 29, 0]])
def test_decode_equals_torch_native(
    monkeypatch: pytest.MonkeyPatch,
    runner: SimpleNamespace,
    before: list[int],
    window: int | None,
    bound: int,
) -> None:
    monkeypatch.setattr(cpu_attention, "PADDED_BATCH_BYTES", bound)
    batch = step(runner, ForwardMode.DECODE, before, [1] * len(before))
    parts = inputs(len(before))
    got, want = (
        run(make(runner), ForwardMode.DECODE, parts, window, batch)
        for make in (TorchNativeTreeBackend, TorchNativeAttnBackend)
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("before", "new"), [([0], [9]), ([11], [6]), ([0, 11, 3], [9, 6, 1])], ids=str
)
def test_prompt_chunks_equal_torch_native(
    runner: SimpleNamespace, before: list[int], new: list[int], window: int | None
) -> None:
    batch = step(runner, ForwardMode.EXTEND, before, new)
    parts = inputs(sum(new))
    got, want = (
        run(make(runner), ForwardMode.EXTEND, parts, window, batch)
        for make in (TorchNativeTreeBackend, TorchNativeAttnBackend)
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bound", [0, 2**30], ids=["one by one", "padded batch"])
@pytest.mark.parametrize("window", [None, 4])
def test_every_path_of_a_tree_equals_its_chain(
    monkeypatch: pytest.MonkeyPatch, runner: SimpleNamespace, window: int | None, bound: int
) -> None:
    """What a node sees is what plain prefill of its path would see."""
    monkeypatch.setattr(cpu_attention, "PADDED_BATCH_BYTES", bound)
    parents = [[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 1, 2, -1]]
    width, before = 6, [13, 2]
    mask = torch.eye(width, dtype=torch.bool).repeat(2, 1, 1)
    for i, parent in enumerate(parents):
        for node in range(width):
            if parent[node] >= 0:
                mask[i, node] |= mask[i, parent[node]]
    batch = step(runner, ForwardMode.TARGET_VERIFY, before, [width, width])
    batch.spec_info = SimpleNamespace(draft_token_num=width, custom_mask=mask.flatten())
    parts = inputs(2 * width)
    backend = TorchNativeTreeBackend(runner)
    got = run(backend, ForwardMode.TARGET_VERIFY, parts, window, batch).view(2, width, -1)

    for i in range(2):
        for node in range(width):
            path = mask[i, node].nonzero().flatten()
            chain = step(runner, ForwardMode.EXTEND, before, [len(path), len(path)])
            for name in ("req_pool_indices", "seq_lens", "extend_prefix_lens", "extend_seq_lens"):
                setattr(chain, name, getattr(chain, name)[i : i + 1])
            chain.out_cache_loc = chain.out_cache_loc.view(2, -1)[i]
            rows = [part.view(2, width, -1)[i, path] for part in parts]
            native = TorchNativeAttnBackend(runner)
            want = run(native, ForwardMode.EXTEND, rows, window, chain)
            torch.testing.assert_close(got[i, node], want[-1], atol=1e-5, rtol=1e-5)


def test_width_may_change_every_step(runner: SimpleNamespace) -> None:
    backend = TorchNativeTreeBackend(runner)
    for width in (4, 1, 7):
        batch = step(runner, ForwardMode.TARGET_VERIFY, [3, 5], [width, width])
        mask = torch.ones(2, width, width, dtype=torch.bool).tril()
        batch.spec_info = SimpleNamespace(draft_token_num=width, custom_mask=mask.flatten())
        parts = inputs(2 * width)
        got = run(backend, ForwardMode.TARGET_VERIFY, parts, None, batch)
        chain = step(runner, ForwardMode.EXTEND, [3, 5], [width, width])
        want = run(TorchNativeAttnBackend(runner), ForwardMode.EXTEND, parts, None, chain)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_replaces_torch_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch_native", None)
    cpu_attention.register()
    assert ATTENTION_BACKENDS["torch_native"] is TorchNativeTreeBackend


def run(
    backend: Any, mode: ForwardMode, parts: list[torch.Tensor], window: int | None, batch: Any
) -> torch.Tensor:
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
    return forward(*parts, layer(window), batch)
