"""CUDA-graph capture of the tree-masked verify."""

from __future__ import annotations

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleVerifyInput


class TreeGraphRunner(DecodeCudaGraphRunner):
    """Captures the target's verify with the tree mask and with taps.

    Without a spec input of its own SGLang would capture a custom algorithm mask-less, and the
    replay would silently ignore the tree.
    """

    def get_spec_info(self, num_tokens: int) -> EagleVerifyInput:
        """The verify input to capture with; shapes only, the pointers come at replay."""
        spec = get_spec()
        return EagleVerifyInput(
            draft_token=None,
            custom_mask=self.buffers.custom_mask,
            positions=None,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=spec.speculative_num_steps,
            topk=spec.speculative_eagle_topk,
            draft_token_num=spec.speculative_num_draft_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )
