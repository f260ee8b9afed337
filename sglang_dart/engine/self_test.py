"""A text that the target reads before it serves, to know a wrong drafter from the start."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

# Any language model finds many of these words before they come.
TEXT = (
    "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday. "
    "The first ten numbers are one, two, three, four, five, six, seven, eight, nine and ten. "
    "The capital of France is Paris, the capital of Italy is Rome, the capital of Spain is Madrid "
    "and the capital of Germany is Berlin. The four seasons of the year are spring, summer, autumn "
    "and winter. The opposite of hot is cold, the opposite of big is small, and the opposite of "
    "good is bad."
)
MOST_TOKENS = 128


def text_ids(tokenizer: Any, most: int) -> list[int]:
    """The text in the target's tokens, at most `most` of them."""
    return tokenizer.encode(TEXT)[: min(most, MOST_TOKENS)]


class _NoCache(SimpleNamespace):
    """What a batch asks of a prefix cache, where nothing is to be kept."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, _: Any) -> None:
        """The pools are empty: nothing has to go."""

    def maybe_hand_to_session(self, _: Any) -> None:
        """There are no sessions."""


@contextmanager
def prefill_of(target_worker: Any, ids: list[int]) -> Iterator[ScheduleBatch]:
    """A prefill of one prompt, outside the scheduler; its slots are free again at the end."""
    runner = target_worker.model_runner
    rows, allocator = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    request = Req(
        rid="sglang-dart self-test",
        origin_input_text="",
        origin_input_ids=array("q", ids),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = len(ids)
    batch = ScheduleBatch.init_new(
        reqs=[request],
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        tree_cache=_NoCache(
            page_size=allocator.page_size,
            device=runner.device,
            token_to_kv_pool_allocator=allocator,
        ),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    try:
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        yield batch
    finally:
        allocator.free(batch.out_cache_loc)
        rows.free(request)
