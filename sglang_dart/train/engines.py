"""Two ways to let the target write: SGLang's offline engine, and `generate` of transformers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# SGLang sorts the vocabulary of a whole batch as soon as one request of it is greedy and another
# is not (greedy is top-k 1 there). This temperature picks the best token without a sort.
_NEARLY_GREEDY = 1e-3


@dataclass(frozen=True)
class Written:
    """What the target wrote after a prompt. ids: without the end token. ended: it came to one."""

    ids: list[int]
    ended: bool


class Engine(Protocol):
    """Writes continuations, many at a time."""

    concurrent: int
    """Requests worth having in flight."""

    async def write(
        self, prompt: list[int], temperature: float, max_new_tokens: int, stop: Sequence[int]
    ) -> Written:
        """Continue one prompt until a token of `stop`, which is not part of the result."""

    def run(self, work: Any) -> None:
        """Run a coroutine that uses this engine."""

    def close(self) -> None:
        """Free what the engine holds."""


class SglangEngine:
    """One replica of `sgl.Engine`. For a small target several replicas share a GPU, because the
    Python scheduler, not the GPU, limits one of them."""

    def __init__(
        self, model: str, *, concurrent: int, max_length: int, seed: int, dtype: str
    ) -> None:
        import sglang as sgl
        import torch

        self.concurrent = concurrent
        options: dict[str, Any] = {}
        if torch.cuda.is_available():
            step = max(1, concurrent // 4)
            options = {
                # FlashInfer would first compile for minutes.
                "attention_backend": "triton",
                "sampling_backend": "pytorch",
                # Few graphs, for they cost start-up time: the batch is nearly always full.
                "cuda_graph_bs_decode": sorted({1, 8, *range(step, concurrent + 1, step)}),
                "disable_prefill_cuda_graph": True,
                "chunked_prefill_size": 16384,
                # Each replica takes what max_total_tokens needs and leaves the rest to the others.
                "mem_fraction_static": 0.9,
            }
        self._engine = sgl.Engine(
            model_path=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            random_seed=seed,
            max_running_requests=concurrent,
            max_total_tokens=concurrent * max_length,
            # Prompts share little, and a full cache would be pruned at every step, in Python.
            disable_radix_cache=True,
            context_length=max_length,
            stream_interval=max_length,
            skip_server_warmup=True,
            **options,
        )

    async def write(
        self, prompt: list[int], temperature: float, max_new_tokens: int, stop: Sequence[int]
    ) -> Written:
        """Continue one prompt."""
        reply = await self._engine.async_generate(
            input_ids=prompt,
            sampling_params={
                "temperature": max(temperature, _NEARLY_GREEDY),
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(stop),
            },
        )
        ids = list(reply["output_ids"])
        ended = reply["meta_info"]["finish_reason"]["type"] == "stop"
        if ended and ids and ids[-1] in stop:
            ids.pop()
        return Written(ids, ended)

    def run(self, work: Any) -> None:
        """Run a coroutine in the engine's own event loop."""
        self._engine.loop.run_until_complete(work)

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()


class TransformersEngine:
    """Requests that wait together are one batch: slow, but it needs nothing but transformers."""

    def __init__(self, model: str, *, concurrent: int, seed: int, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.concurrent = concurrent
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.to(device).eval()
        self._waiting: dict[tuple, list[tuple[list[int], asyncio.Future]]] = defaultdict(list)
        self._pump: asyncio.Task | None = None
        torch.manual_seed(seed)

    async def write(
        self, prompt: list[int], temperature: float, max_new_tokens: int, stop: Sequence[int]
    ) -> Written:
        """Continue one prompt."""
        future: asyncio.Future = asyncio.get_running_loop().create_future()
        self._waiting[temperature, max_new_tokens, tuple(stop)].append((prompt, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._drain())
        return await future

    def run(self, work: Any) -> None:
        """Run a coroutine."""
        asyncio.run(work)

    def close(self) -> None:
        """Nothing to free beyond the object itself."""

    async def _drain(self) -> None:
        # Let everybody who is about to ask do so.
        await asyncio.sleep(0)
        while self._waiting:
            key = max(self._waiting, key=lambda key: len(self._waiting[key]))
            requests = self._waiting.pop(key)
            for (_, future), written in zip(requests, self._batch(requests, *key), strict=True):
                future.set_result(written)
            await asyncio.sleep(0)

    def _batch(
        self,
        requests: list[tuple[list[int], asyncio.Future]],
        temperature: float,
        max_new_tokens: int,
        stop: tuple[int, ...],
    ) -> list[Written]:
        import torch

        width = max(len(prompt) for prompt, _ in requests)
        ids = torch.tensor([[stop[0]] * (width - len(p)) + p for p, _ in requests])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in requests])
        device = self._model.device
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            out = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max_new_tokens,
                eos_token_id=list(stop),
                pad_token_id=stop[0],
                **sampling,
            )
        return [_until(row, stop) for row in out[:, width:].tolist()]


def _until(ids: list[int], stop: Sequence[int]) -> Written:
    end = next((place for place, token in enumerate(ids) if token in stop), None)
    return Written(ids if end is None else ids[:end], end is not None)
