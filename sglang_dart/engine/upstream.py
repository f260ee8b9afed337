"""Every upstream symbol that we rely on, and a check that says which one has moved."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

TESTED = "0.5.23"


@dataclass(frozen=True)
class Symbol:
    """A dotted path, and the parameters, fields or methods that it must have."""

    path: str
    needs: tuple[str, ...] = ()


_SRT = "sglang.srt."
_GRAPHS = f"{_SRT}model_executor.runner.decode_cuda_graph_runner"
SYMBOLS: tuple[Symbol, ...] = (
    # Registration and hooks.
    Symbol(
        f"{_SRT}speculative.spec_info.SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
    ),
    Symbol(f"{_SRT}speculative.spec_info.SpeculativeAlgorithm.from_string"),
    Symbol(
        f"{_SRT}speculative.spec_info.CustomSpecAlgo",
        ("handle_server_args", "supports_grammar_overlap", "has_draft_kv"),
    ),
    Symbol(f"{_SRT}plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Symbol(f"{_SRT}plugins.hook_registry.HookType", ("AFTER", "AROUND")),
    Symbol(f"{_SRT}arg_groups.resolution_hooks.register_resolution_hook", ("name",)),
    Symbol(f"{_SRT}arg_groups.overrides.declare_resolution", ("server_args", "source", "fields")),
    Symbol(f"{_SRT}arg_groups.overrides.model_config_of", ("server_args",)),
    Symbol(f"{_SRT}arg_groups.overrides.resolving_view", ("server_args",)),
    Symbol(f"{_SRT}configs.hybrid_arch.mambaish_config", ("model_config",)),
    Symbol(f"{_SRT}configs.model_config.AttentionArch", ("MLA",)),
    # Hooked functions.
    Symbol(f"{_SRT}mem_cache.allocation_sizing.get_req_to_token_extra_context_len"),
    Symbol(f"{_SRT}mem_cache.allocation_sizing.get_alloc_reserve_per_decode"),
    Symbol(f"{_SRT}mem_cache.allocation_sizing.get_alloc_page_size"),
    Symbol(
        f"{_SRT}model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        ("self", "kvc", "num_layers"),
    ),
    Symbol(f"{_SRT}mem_cache.cache_init_params.CacheInitParams", ("__init__", "is_eagle")),
    Symbol(
        f"{_SRT}managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        ("self", "meta_info", "recv_obj", "i"),
    ),
    # Worker surface.
    Symbol(
        f"{_SRT}speculative.base_spec_worker.BaseSpecWorker",
        (
            "target_worker",
            "draft_worker",
            "alloc_memory_pool",
            "init_cuda_graphs",
            "on_verify_complete_cpu",
            "prewarm_sampling",
            "last_shared_read_runner",
            "weight_update_runners",
        ),
    ),
    Symbol(
        f"{_SRT}managers.utils.GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "new_seq_lens",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "extra_keep_alive_refs",
        ),
    ),
    Symbol(
        f"{_SRT}managers.overlap_utils.FutureMap",
        ("device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens"),
    ),
    Symbol(f"{_SRT}speculative.spec_info.SpecInput", ("is_draft_input", "is_verify_input")),
    Symbol(f"{_SRT}speculative.spec_info.SpecInputType", ("EAGLE_DRAFT", "EAGLE_VERIFY")),
    Symbol(
        f"{_SRT}runtime_context.get_spec",
    ),
    Symbol(
        f"{_SRT}managers.schedule_batch.ScheduleBatch",
        (
            "reqs",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "out_cache_loc",
            "prefix_lens",
            "extend_lens",
            "chunked_req",
            "chunked_req_next_prompt_token",
            "spec_info",
        ),
    ),
    # The prefill of the self-test.
    Symbol(
        f"{_SRT}managers.schedule_batch.Req",
        ("rid", "origin_input_text", "origin_input_ids", "sampling_params"),
    ),
    Symbol(
        f"{_SRT}managers.schedule_batch.ScheduleBatch.init_new",
        (
            "reqs",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "model_config",
            "enable_overlap",
            "spec_algorithm",
        ),
    ),
    Symbol(f"{_SRT}managers.schedule_batch.ScheduleBatch.prepare_for_extend"),
    Symbol(
        f"{_SRT}sampling.sampling_params.SamplingParams",
        ("temperature", "max_new_tokens"),
    ),
    # The output layer, for drafters that have none.
    Symbol(
        f"{_SRT}layers.logits_processor.LogitsProcessor._compute_lm_head",
        ("hidden_states", "lm_head"),
    ),
    # Taps.
    Symbol(
        f"{_SRT}model_executor.model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig",
        ("eagle_use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"),
    ),
    Symbol(f"{_SRT}model_executor.forward_batch_info.CaptureHiddenMode", ("FULL",)),
    # Verification.
    Symbol(
        f"{_SRT}speculative.eagle_worker_common.run_eagle_verify",
        (
            "batch",
            "target_worker",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "plan_stream",
            "plan_stream_ctx",
            "topk",
            "num_draft_tokens",
            "device",
            "metadata_ready_pre_pad",
            "finalize_tree_path",
            "grammar_barrier",
        ),
    ),
    Symbol(f"{_SRT}speculative.eagle_worker_common.eagle_sample", ("verify_input", "batch")),
    Symbol(
        f"{_SRT}speculative.eagle_info.EagleVerifyInput",
        (
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "spec_steps",
            "topk",
            "draft_token_num",
            "generate_attn_arg_prefill",
        ),
    ),
    Symbol(f"{_SRT}speculative.eagle_utils.TreeMaskMode", ("FULL_MASK", "QLEN_ONLY")),
    Symbol(f"{_SRT}speculative.eagle_utils.default_tree_mask_mode"),
    Symbol(f"{_SRT}layers.attention.verify_mask.VerifyMask", ("buffer", "mode", "max_bs", "fits")),
    Symbol(f"{_SRT}layers.logits_processor.LogitsProcessorOutput", ("next_token_logits",)),
    Symbol(
        f"{_SRT}layers.sampler.apply_custom_logit_processor",
        ("logits", "sampling_batch_info", "num_tokens_in_batch"),
    ),
    Symbol(f"{_SRT}layers.sampler.create_sampler"),
    Symbol(f"{_SRT}speculative.spec_utils.SIMULATE_ACC_LEN"),
    # CUDA graphs.
    Symbol(
        f"{_SRT}model_executor.model_runner.ModelRunner",
        (
            "_decode_cuda_graph_runner_cls",
            "_get_attention_backend",
            "load_model",
            "maybe_enable_batch_invariant_mode",
        ),
    ),
    Symbol(
        f"{_GRAPHS}.DecodeCudaGraphRunner",
        ("attn_backend", "speculative_num_steps", "speculative_num_draft_tokens", "capture"),
    ),
    Symbol(f"{_GRAPHS}.DecodeCudaGraphRunner.get_spec_info", ("self", "num_tokens")),
    Symbol(
        f"{_GRAPHS}.DecodeCudaGraphRunner.capture_one_shape",
        ("size", "forward", "stream_idx", "variant_label", "attention_variant"),
    ),
    Symbol(
        f"{_GRAPHS}.DecodeCudaGraphRunner._make_graph_key",
        ("size", "stream_idx", "variant_label", "attention_variant"),
    ),
    Symbol(
        f"{_SRT}model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.replay",
        ("shape_key", "static_forward_batch"),
    ),
    Symbol(f"{_SRT}model_executor.cuda_graph_config.with_phase", ("config", "phase", "changes")),
    Symbol(
        f"{_SRT}model_executor.cuda_graph_config.check_cuda_graph_backend", ("phase", "backend")
    ),
    Symbol(f"{_SRT}model_executor.cuda_graph_config.Phase", ("DECODE",)),
    Symbol(f"{_SRT}model_executor.cuda_graph_config.Backend", ("DISABLED",)),
    Symbol(f"{_SRT}mem_cache.kv_index_translator.KVIndexTranslator.bind_and_verify_backends"),
    Symbol(f"{_SRT}runtime_context.get_exec"),
    Symbol(f"{_SRT}runtime_context._ConfigBag", ("override",)),
    # Without a GPU.
    Symbol(f"{_SRT}layers.attention.attention_registry.register_attention_backend", ("name",)),
    Symbol(f"{_SRT}layers.attention.torch_native_backend.TorchNativeAttnBackend"),
    Symbol(f"{_SRT}arg_groups.choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES", ("append",)),
    Symbol(
        f"{_SRT}arg_groups.choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND", ("append",)
    ),
    Symbol(f"{_SRT}layers.quantization.unquant.UnquantizedLinearMethod", ("apply",)),
    Symbol(f"{_SRT}layers.quantization.unquant.UnquantizedEmbeddingMethod", ("apply",)),
    Symbol(
        f"{_SRT}model_executor.model_runner_components.weight_updater.WeightUpdater",
        (
            "get_model",
            "update_weights_from_disk",
            "load_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "end_weight_update",
        ),
    ),
)


def check() -> list[str]:
    """Give one line for each symbol that is gone or has changed; empty if all is well."""
    problems = []
    installed = importlib.metadata.version("sglang")
    for symbol in SYMBOLS:
        try:
            found = resolve(symbol.path)
        except (ImportError, AttributeError) as error:
            problems.append(f"sglang {installed}: {symbol.path} is gone ({error})")
            continue
        missing = [name for name in symbol.needs if not has(found, name)]
        if missing:
            problems.append(f"sglang {installed}: {symbol.path} lacks {', '.join(missing)}")
    return problems


def resolve(path: str) -> Any:
    """Import the longest module prefix of a dotted path and walk the rest."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only the name itself may be missing: it is then an attribute of a shorter prefix.
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def has(found: Any, name: str) -> bool:
    """Whether a class, struct or function has this attribute, field or parameter."""
    if hasattr(found, name):
        return True
    if inspect.isclass(found):
        if any(name in vars(base).get("__annotations__", {}) for base in found.__mro__):
            return True
        found = found.__init__
    return callable(found) and name in inspect.signature(found).parameters
