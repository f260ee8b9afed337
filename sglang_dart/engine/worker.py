"""The worker that SGLang drives: life-cycle, and dispatch to prefill and decode."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_dart.algorithms import Target, load_method
from sglang_dart.commit import RoundState
from sglang_dart.draft.context_kv import ContextKVHolder
from sglang_dart.draft.dflash import DFlashDrafter
from sglang_dart.draft.drafter import Roots, Rows
from sglang_dart.draft.shift_check import ShiftCheck
from sglang_dart.engine import algorithm, prefill, self_test, step_cost
from sglang_dart.engine.adaptivity import why_constant
from sglang_dart.engine.carry import RoundCarry
from sglang_dart.engine.mark import DeviceMark
from sglang_dart.engine.memory import mib, room_for, tensor_bytes
from sglang_dart.engine.metrics import RoundMetrics
from sglang_dart.engine.verifier import TargetVerifier, length_bounds
from sglang_dart.engine.width import RoundWidth
from sglang_dart.ngram_model import Vocabulary, vocabulary_of
from sglang_dart.round import RoundBatch, decode_round
from sglang_dart.tree.budget import AdaptiveWidth, ladder, short_ladder

logger = logging.getLogger(__name__)

# Roots of one prefill that a check of the drafter's config looks at, and how far into a prompt:
# their contexts are gathered, all at once.
SHIFT_ROOTS = 128
SHIFT_CONTEXT = 512

Publish = Callable[[torch.Tensor], None]


class TreeWorker(BaseSpecWorker):
    """Drafts trees with a private drafter and verifies them with the target.

    The drafter is no SGLang model: it has one layer or a few, reads its own KV through the
    target's slot table, and needs none of the scheduler's draft machinery.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        spec = get_spec()
        self._target_worker = target_worker
        self.device = target_worker.device
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self._branching = spec.speculative_eagle_topk
        self._overlap = not server_args.disable_overlap_schedule

        started = time.perf_counter()
        runner = target_worker.model_runner
        method = load_method(
            spec.speculative_algorithm,
            spec.speculative_draft_model_path,
            spec.speculative_draft_model_revision,
        )
        with room_for("the drafter's weights", "take a smaller drafter, or quantise the target"):
            self.drafter = method.load_drafter(
                _target_of(target_worker), self.speculative_num_steps
            )
        self._weight_load_time = time.perf_counter() - started
        self.planner = method.planner(
            self.drafter,
            self.speculative_num_steps,
            chain=self._branching == 1,
            vocabulary=_vocabulary(target_worker),
            device=torch.device(self.device),
        )
        self._width = RoundWidth(self.speculative_num_draft_tokens)
        self._graphs: Any = None
        self._metrics = RoundMetrics(self.speculative_num_steps, server_args)

        self._shift_check: ShiftCheck | None = None
        if isinstance(self.drafter, DFlashDrafter):
            _check_output_layer(runner.model)
            source = spec.speculative_draft_model_path
            self._shift_check = ShiftCheck(self.drafter, source)
        _tap(runner, self.drafter.taps)
        registered = algorithm.find(spec.speculative_algorithm)
        registered.draft_bytes_per_slot = self.drafter.kv_bytes_per_slot()
        registered.keys_are_bigrams = self.drafter.reads_next_token
        constant = why_constant(method.options, runner.device, server_args)
        if constant is not None:
            logger.info("sglang-dart: trees of constant width: %s", constant)
        if runner.device == "cuda":
            self._choose_graphs(runner, adaptive=constant is None)
        else:
            self._choose_cpu_width(method.options.cpu_rows, runner.model, constant is None)

    # ---------------------------------------------------------------- life-cycle

    @property
    def draft_worker(self) -> None:
        """None: the drafter is no SGLang worker."""
        return None

    @property
    def weight_load_time(self) -> float:
        """Seconds that loading the drafter took."""
        return self._weight_load_time

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Make the draft KV and the per-request state, sized like the target's pools."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        slots = token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size
        slot_bytes = self.drafter.kv_bytes_per_slot()
        weights = tensor_bytes(self.drafter, beside=self.target_worker.model_runner.model)
        kv = f"draft KV {mib(slots * slot_bytes)} ({slots} slots of {slot_bytes} bytes)"
        with room_for(kv, "lower --mem-fraction-static or --max-total-tokens"):
            self.drafter.allocate(slots)
        with room_for("the rounds' buffers", "lower --max-running-requests"):
            self._state = RoundState(
                rows=req_to_token_pool.req_to_token.shape[0],
                levels=self.drafter.levels,
                candidates=self.planner.candidates,
                tail=self.planner.context_length,
                device=torch.device(self.device),
                carry=self.drafter.carry_size,
                home=self.planner.home,
            )
        logger.info(
            "sglang-dart: memory: drafter's weights %s, %s, rounds' buffers %s",
            mib(weights),
            kv,
            mib(tensor_bytes(self._state)),
        )

    def init_cuda_graphs(self) -> None:
        """SGLang calls it when the target's graphs are captured: now for what is ours."""
        super().init_cuda_graphs()
        runner = self.target_worker.model_runner
        if runner.device != "cuda":
            return
        # No size where SGLang has been told to use no graphs.
        sizes = {self.speculative_num_draft_tokens: runner.decode_cuda_graph_capture_bs}
        if self._graphs is not None:
            self._graphs.capture()
            self._additional_graph_memory_usage["target_verify"] = self._graphs.gib
            self._additional_graph_time_usage["target_verify"] = self._graphs.capture_seconds
            chosen = AdaptiveWidth(self._graphs.widths, self._graphs.seconds, self._graphs.fits)
            self._width = RoundWidth(self._graphs.widths[-1], adaptive=chosen, mark=DeviceMark)
            sizes = self._graphs.sizes()
        self._capture_drafting(sizes)

    def prewarm_sampling(self) -> Any:
        """SGLang calls it last before it serves; then the target can read a text."""
        warmed = super().prewarm_sampling()
        tokenizer = self.target_worker.tokenizer
        if self._shift_check is not None and tokenizer is not None:
            check, ids = self._shift_check, self_test.text_ids(tokenizer, self._max_prompt())
            with self_test.prefill_of(self.target_worker, ids) as batch:
                self._prefill(batch, None)
            logger.info("sglang-dart: self-test: %s", check.counted())
        return warmed

    def _capture_drafting(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """Replay drafts and growths for these batch sizes, by width of tree."""
        # A scripted drafter, made for tests, reads values on the host.
        if not any(sizes.values()) or not isinstance(self.drafter, ContextKVHolder):
            return
        from sglang_dart.engine.draft_graphs import capture_drafting

        runner = self.target_worker.model_runner
        taps = len(self.drafter.taps) * runner.model_config.hidden_size
        self.drafter, used = capture_drafting(
            self.drafter,
            self.planner,
            self._state,
            sizes,
            feature=torch.zeros(1, taps, dtype=runner.dtype, device=self.device),
            slot_table=self.req_to_token_pool.req_to_token,
        )
        self._additional_graph_memory_usage["draft_decode"] = used / 2**30

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Count what a verify step accepted; SGLang calls it when the counts are on the host."""
        self._metrics.count(num_correct_drafts_per_req)

    # ---------------------------------------------------------------- steps

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Publish | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One engine step: a prefill, or a round of the running batch."""
        assert not batch.forward_mode.is_idle(), "idle steps come with DP attention, refused"
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        self._width.interrupt()
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)

        root = result.next_token_ids
        feature = result.logits_output.hidden_states
        result.logits_output.hidden_states = None
        rows = prefill.prompt_rows(batch, feature, root)
        self.drafter.append(rows)
        slot_table = self._slot_table(batch, int(batch.seq_lens_cpu.max()))
        self._look_at_shift(batch, rows, slot_table)
        roots = Roots(
            token=root.long(),
            length=batch.seq_lens,
            last_feature=feature[prefill.last_row(batch, feature.device)],
            slot_table=slot_table,
        )
        candidates = self.drafter.draft(roots, self.planner.candidates)
        tail = prefill.prompt_tail(batch, root, self._state.tail_length)
        self._state.put(_rows(batch), batch.req_pool_indices, candidates, tail)
        result.next_draft_input = RoundCarry(bonus_tokens=root)
        return result

    def _look_at_shift(self, batch: Any, rows: Rows, slot_table: torch.Tensor) -> None:
        """Hold the first prompts against what the drafter's config says."""
        if self._shift_check is None:
            return
        found = prefill.inner_roots(
            batch, rows, slot_table, most=SHIFT_ROOTS, longest=SHIFT_CONTEXT
        )
        if found is not None:
            self._shift_check.observe(*found)
        if self._shift_check.done:
            self._shift_check = None

    def _max_prompt(self) -> int:
        """Tokens of the longest prompt that fits."""
        table = self.req_to_token_pool.req_to_token
        return min(table.shape[1] - 1, self.token_to_kv_pool_allocator.size // 2)

    def _decode(
        self, batch: Any, on_publish: Publish | None, grammar_barrier: Any
    ) -> GenerationBatchResult:
        if batch.seq_lens.is_cuda:
            # Made on the scheduler's stream, read on ours.
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        row = _rows(batch)
        width, draft = self._width.begin(row)
        self._metrics.step(width, self._width.expected(len(row), width))
        round_batch = RoundBatch(
            row=row,
            row_index=batch.req_pool_indices,
            length=batch.seq_lens.clone(),
            # Gathered before the verify, so that its end is the last read of shared tables.
            slot_table=self._slot_table(batch, max(length_bounds(batch)) + width),
            end=_end_tokens(batch.reqs),
        )
        verifier = TargetVerifier(batch, self, self._branching, grammar_barrier, on_publish)
        with nullcontext() if self._graphs is None else self._graphs.of(width):
            tree, verdict = decode_round(
                round_batch,
                width=width,
                state=self._state,
                planner=self.planner,
                verifier=verifier,
                drafter=self.drafter,
                draft=draft,
            )
        self._width.end(tree, self.planner.value, verdict)
        result = verifier.result
        assert result is not None
        bonus = result.next_draft_input.bonus_tokens
        result.next_draft_input = RoundCarry(bonus_tokens=bonus)
        result.extra_keep_alive_refs += [round_batch, verdict]
        return result

    def _choose_graphs(self, runner: Any, adaptive: bool) -> None:
        from sglang_dart.engine.graphs import LadderGraphRunner, TreeGraphRunner, VerifyGraphs

        # Asked by the runner when it captures, long after the worker's constructor.
        runner._decode_cuda_graph_runner_cls = lambda: (
            LadderGraphRunner if adaptive else TreeGraphRunner
        )
        if adaptive:
            self._graphs = VerifyGraphs(runner, short_ladder(self.speculative_num_draft_tokens))

    def _choose_cpu_width(self, rows: int, model: Any, adaptive: bool) -> None:
        ceiling = self.speculative_num_draft_tokens
        if adaptive:
            chosen = AdaptiveWidth(ladder(ceiling), step_cost.measure_linear(model))
            self._width = RoundWidth(ceiling, adaptive=chosen)
        elif rows:
            self._width = RoundWidth(ceiling, rows=rows)

    def _slot_table(self, batch: Any, columns: int) -> torch.Tensor:
        table = self.req_to_token_pool.req_to_token
        return table[batch.req_pool_indices, : min(columns, table.shape[1])]


def _rows(batch: Any) -> list[int]:
    return [req.kv.req_pool_idx for req in batch.reqs]


def _end_tokens(reqs: list[Any]) -> torch.Tensor:
    """Tokens that end each request's answer, [bs, E] int64, filled up with -1."""
    ends = [
        []
        if req.sampling_params.ignore_eos
        else [*(req.eos_token_ids or ()), *(req.sampling_params.stop_token_ids or ())]
        for req in reqs
    ]
    widest = max(map(len, ends))
    padded = [tokens + [-1] * (widest - len(tokens)) for tokens in ends]
    return torch.tensor(padded, dtype=torch.int64).view(len(reqs), widest)


def _target_of(target_worker: Any) -> Target:
    runner, tokenizer = target_worker.model_runner, target_worker.tokenizer
    config = runner.model_config

    def token_id(text: str) -> int | None:
        return None if tokenizer is None else tokenizer.get_vocab().get(text)

    return Target(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embed=runner.model.get_input_embeddings(),
        dtype=runner.dtype,
        device=torch.device(runner.device),
        lm_head=_lm_head(runner.model, config.vocab_size),
        token_id=token_id,
    )


def _lm_head(model: Any, vocab_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's own output layer, tied or not, for drafters that have none.

    Computed as the target computes it, whatever its weights are stored as; without what the logits
    are scaled or capped by, since drafters are trained on the bare product.
    """

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        row = hidden.flatten(0, -2)
        padded = model.logits_processor._compute_lm_head(row, model.lm_head)
        # The weight is padded to a multiple of 64 rows.
        return padded[:, :vocab_size].view(*hidden.shape[:-1], vocab_size)

    return logits


def _check_output_layer(model: Any) -> None:
    missing = [name for name in ("lm_head", "logits_processor") if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f"target {type(model).__name__} does not show its output layer, which a block drafter "
            f"shares: it lacks {', '.join(missing)}; serve a Llama- or Qwen-class model"
        )


def _vocabulary(target_worker: Any) -> Vocabulary:
    """The target's vocabulary; without a tokenizer only its size is known."""
    size = target_worker.model_runner.model_config.vocab_size
    if target_worker.tokenizer is None:
        return Vocabulary(size=size)
    return dataclasses.replace(vocabulary_of(target_worker.tokenizer), size=size)


def _tap(runner: Any, taps: tuple[int, ...]) -> None:
    """Have the target hand over the outputs of these layers with every forward."""
    if not hasattr(runner.model, "set_eagle3_layers_to_capture"):
        raise ValueError(
            f"target {type(runner.model).__name__} cannot be tapped: it lacks "
            "set_eagle3_layers_to_capture; serve a Llama- or Qwen-class model"
        )
    runner.spec_aux_config.eagle_use_aux_hidden_state = True
    runner.spec_aux_config.eagle_aux_hidden_state_layer_ids = list(taps)
