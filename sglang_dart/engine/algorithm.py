"""What SGLang asks of an algorithm, and the names that it may ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

from sglang_dart.algorithms import NAMES
from sglang_dart.engine import arguments

logger = logging.getLogger(__name__)


class TreeAlgorithm(CustomSpecAlgo):
    """A draft-tree algorithm as SGLang sees it. One instance a name and process."""

    name: str

    draft_bytes_per_slot = 0
    """Draft KV that lies beside one token of target KV; the worker sets it before the pools."""

    keys_are_bigrams = False
    """Whether a slot's draft row depends on the token after it; the worker sets it."""

    def supports_grammar_overlap(self) -> bool:
        """Verification advances the grammar itself, so overlap stays on with grammars."""
        return True

    def has_draft_kv(self) -> bool:
        """False: the tree lives in the mask, so the smaller KV reserve is right."""
        return False

    # Called by 0.5.23 on every algorithm, but missing from CustomSpecAlgo.

    def need_topk(self) -> bool:
        """Whether the scheduler relays candidates; ours stay in RoundState."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Whether a disaggregated prefill sends draft states; disaggregation is refused."""
        return False

    def get_platform_worker_cls(self) -> None:
        """A platform's own worker; none."""
        return None

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """The scheduler's relay between iterations."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def __getattr__(self, name: str) -> Callable[..., bool]:
        """Answer False to predicates that a later SGLang asks and this class does not know."""
        if not name.startswith(("is_", "supports_", "need_", "carries_")):
            raise AttributeError(name)
        logger.warning("sglang-dart: SGLang asks %s.%s(), answering False", self.name, name)
        answer = _no
        setattr(self, name, answer)
        return answer

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what the user left open."""
        arguments.fill_defaults(self.name, server_args)


def _no(*_: Any, **__: Any) -> bool:
    return False


def is_ours(name: str | None) -> bool:
    """Whether --speculative-algorithm names one of ours."""
    return name is not None and name.upper() in NAMES


def find(name: str) -> TreeAlgorithm:
    """The registered algorithm of this process."""
    algorithm = SpeculativeAlgorithm.from_string(name)
    assert isinstance(algorithm, TreeAlgorithm)
    return algorithm


def register() -> None:
    """Make every name known to SGLang, once a process."""
    for name in NAMES:
        try:
            SpeculativeAlgorithm.from_string(name)
            continue
        except ValueError:
            pass
        decorate = SpeculativeAlgorithm.register(
            name,
            supports_overlap=True,
            validate_server_args=arguments.refuse_unsupported,
            spec_class=TreeAlgorithm,
        )
        decorate(_worker)


def _worker(_: Any) -> type:
    from sglang_dart.engine.worker import TreeWorker

    return TreeWorker
