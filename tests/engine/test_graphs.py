"""The widths that are captured: which sizes, what they cost, what is in place in a round.

On a GPU `test_gpu.py` holds the graphs themselves against plain decoding.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dart.engine import graphs, upstream
from sglang_dart.engine.graphs import MOST_ROWS, VerifyGraphs, captured_sizes
from sglang_dart.tree.budget import short_ladder

# SGLang 0.5.23's own sizes for up to 64 requests with speculation.
SIZES = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)]


def test_plain_decoding_is_captured_at_every_size() -> None:
    assert captured_sizes(SIZES, 1) == SIZES


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32, 61, 65, 512, 1024])
def test_trees_are_captured_at_fewer_and_smaller_sizes(width: int) -> None:
    sizes = captured_sizes(SIZES, width)
    assert sizes[0] == 1
    assert sizes == sorted(set(sizes))
    assert set(sizes) <= set(SIZES)
    assert sizes[-1] == 1 or sizes[-1] * width <= MOST_ROWS
    # As far as the rows allow: the next size of SGLang's has too many.
    beyond = [size for size in SIZES if size > sizes[-1]]
    assert not beyond or beyond[0] * width > MOST_ROWS


def test_sizes_of_the_default_tree() -> None:
    assert captured_sizes(SIZES, 61) == [1, 2, 3, 4, 6, 8]
    assert captured_sizes(SIZES, 4) == [1, 2, 3, 4, 6, 8, 12, 16, 22, 30, 40, 52, 64]
    assert captured_sizes([3, 5], 4) == [3, 5]
    assert sum(len(captured_sizes(SIZES, width)) for width in short_ladder(61)) < 3 * len(SIZES)


class Captured:
    """Stands in for LadderGraphRunner: graphs of batch sizes 1, 2 and 4."""

    capture_bs = (1, 2, 4)
    max_bs = 4
    disable_padding = False

    def __init__(self, runner: Any = None, *, attn_backend: Any = None, **shape: int) -> None:
        from sglang.srt.runtime_context import get_spec

        self.attn_backend, self.shape = attn_backend, shape
        self.width = get_spec().speculative_num_draft_tokens
        self.branching = get_spec().speculative_eagle_topk
        self.seconds = {size: size * self.width / 1000 for size in self.capture_bs}

    fits = graphs.LadderGraphRunner.fits


class Target:
    """Stands in for the ModelRunner: its back-ends are the widths that they were made for."""

    def __init__(self) -> None:
        self.attn_backend = self._get_attention_backend()
        self.decode_cuda_graph_runner = Captured()
        self.kv_index_translator = SimpleNamespace(bind_and_verify_backends=lambda backends: None)

    def _get_attention_backend(self) -> int:
        from sglang.srt.runtime_context import get_spec

        return get_spec().speculative_num_draft_tokens


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    from sglang.srt.runtime_context import get_context, get_spec

    monkeypatch.setattr(graphs, "LadderGraphRunner", Captured)
    monkeypatch.setattr(graphs.torch.cuda, "mem_get_info", lambda: (0, 0))
    shape = {
        "speculative_num_steps": 8,
        "speculative_num_draft_tokens": 32,
        "speculative_eagle_topk": 2,
    }
    with get_context().override_server_args(device="cpu"), get_spec().override(**shape):
        yield Target()
        # Capture leaves the configuration as it was.
        assert all(getattr(get_spec(), name) == value for name, value in shape.items())


@pytest.fixture
def captured(target: Target) -> VerifyGraphs:
    made = VerifyGraphs(target, [1, 4, 8, 32])
    made.capture()
    return made


def test_each_width_has_a_backend_and_graphs_of_its_own(target, captured) -> None:
    for width in captured.widths:
        with captured.of(width):
            runner = target.decode_cuda_graph_runner
            assert target.attn_backend == runner.width == width
            # A root alone is a chain.
            assert runner.branching == (1 if width == 1 else 2)
            if width < 32:
                assert runner.attn_backend == width
                assert runner.shape["speculative_num_draft_tokens"] == width
                assert runner.shape["speculative_num_steps"] == min(8, width - 1)
        assert target.attn_backend == target.decode_cuda_graph_runner.width == 32


def test_what_is_usual_comes_back_after_an_error(target, captured) -> None:
    with pytest.raises(KeyError), captured.of(4):
        raise KeyError
    assert target.attn_backend == target.decode_cuda_graph_runner.width == 32


def test_graphs_of_old_weights_are_not_used(target, captured) -> None:
    target.decode_cuda_graph_runner = anew = Captured()
    with captured.of(4):
        first = target.decode_cuda_graph_runner
    with captured.of(4):
        assert target.decode_cuda_graph_runner is first
    with captured.of(32):
        assert target.decode_cuda_graph_runner is anew


def test_cost_is_that_of_the_graph_that_takes_the_requests(captured) -> None:
    assert captured.seconds(3, 8) == captured.seconds(4, 8) == pytest.approx(0.032)
    assert captured.seconds(9, 1) == pytest.approx(0.004)


def test_a_batch_fits_what_is_captured(captured, monkeypatch) -> None:
    assert [captured.fits(requests, 8) for requests in (1, 3, 4, 5)] == [True, True, True, False]
    monkeypatch.setattr(Captured, "disable_padding", True)
    assert [captured.fits(requests, 8) for requests in (1, 3, 4)] == [True, False, True]


def test_too_little_memory_is_one_line_with_the_way_out(target, monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise graphs.torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "LadderGraphRunner", full)
    with pytest.raises(RuntimeError, match="trees of 8 nodes: lower --cuda-graph-max-bs") as caught:
        VerifyGraphs(target, [1, 4, 8, 32]).capture()
    assert "\n" not in str(caught.value)


def test_sglang_captures_the_sizes_of_the_configuration() -> None:
    """What LadderGraphRunner overrides is what the runner reads."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, Phase, with_phase
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
    from sglang.srt.runtime_context import get_context, get_exec

    with get_context().override_server_args(device="cpu") as args:
        runner: Any = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=64), server_args=args)
        config = with_phase(CudaGraphConfig(), Phase.DECODE, bs=[1, 2, 4])
        with get_exec().graph.override(cuda_graph_config=config):
            sizes, _ = get_batch_sizes_to_capture(runner, 61, gathered_buffer_required=False)
    assert sizes == [1, 2, 4]


def test_each_width_captures_and_times_its_own_sizes(monkeypatch) -> None:
    """The class itself, on a runner that records instead of capturing."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, Phase, with_phase
    from sglang.srt.runtime_context import get_context, get_exec, get_spec

    def make(self: Any, model_runner: Any, **shape: int) -> None:
        self.capture_bs = list(get_exec().graph.cuda_graph_config.decode.bs)
        self.backend = SimpleNamespace(replay=lambda key, batch: replayed.append(key))
        for size in reversed(self.capture_bs):
            self.capture_one_shape(size, None, None, None, None)

    replayed: list[Any] = []
    base = graphs.DecodeCudaGraphRunner
    monkeypatch.setattr(base, "__init__", make)
    monkeypatch.setattr(base, "capture_one_shape", lambda self, *shape: None)
    monkeypatch.setattr(base, "_make_graph_key", lambda self, *key: key)
    monkeypatch.setattr(graphs, "_replay_seconds", lambda replay: replay() or 0.5)
    config = with_phase(CudaGraphConfig(), Phase.DECODE, bs=SIZES)
    with (
        get_context().override_server_args(device="cpu"),
        get_spec().override(speculative_num_draft_tokens=61),
        get_exec().graph.override(cuda_graph_config=config),
    ):
        widest = graphs.LadderGraphRunner(None)
        assert widest.seconds == dict.fromkeys([8, 6, 4, 3, 2, 1], 0.5)
        assert replayed[0] == (8, None, None, None)
        narrow = graphs.LadderGraphRunner(None, speculative_num_draft_tokens=4)
        assert list(narrow.seconds) == captured_sizes(SIZES, 4)[::-1]
        assert get_exec().graph.cuda_graph_config.decode.bs == SIZES


def test_a_graph_is_as_fast_as_its_fastest_replay_but_the_first(monkeypatch) -> None:
    clock, takes = 0.0, iter([0.1, 3.0, 2.0, 5.0])

    def replay() -> None:
        nonlocal clock
        clock += next(takes)

    class Mark:
        def __init__(self) -> None:
            self.time = clock

        def seconds_since(self, earlier: Mark) -> float:
            return self.time - earlier.time

    monkeypatch.setattr(graphs, "DeviceMark", Mark)
    monkeypatch.setattr(graphs.torch.cuda, "synchronize", lambda: None)
    assert graphs._replay_seconds(replay) == pytest.approx(2.0)


def attributes(path: str, context: type[ast.expr_context]) -> set[str]:
    """Attributes of `self` that the class or function at `path` reads, or assigns."""
    source = inspect.getsource(upstream.resolve(path))
    nodes = ast.walk(ast.parse(textwrap.dedent(source)))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_the_attributes_that_we_use_are_those_that_sglang_sets_and_reads() -> None:
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    swapped = {"attn_backend", "decode_cuda_graph_runner"}
    assert swapped <= attributes(runner, ast.Store)
    assert swapped <= attributes(f"{runner}._forward_raw", ast.Load)
    graph_runner = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
    read = {"capture_bs", "max_bs", "disable_padding", "backend", "buffers"}
    shape = {"speculative_num_steps", "speculative_num_draft_tokens"}
    assert read | shape <= attributes(graph_runner, ast.Store)
    usage = {"_additional_graph_memory_usage", "_additional_graph_time_usage"}
    worker = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker"
    assert usage <= attributes(worker, ast.Load)
