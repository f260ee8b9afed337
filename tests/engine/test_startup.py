"""What keeps a server from starting: one line that names the file or flag, before any weight."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dart.engine.algorithm import NAMES


@pytest.fixture(scope="module")
def resolve(target: str) -> Callable[..., Any]:
    """`resolve(**flags)`: the arguments as SGLang's launcher completes them."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()

    def run(**flags: Any) -> Any:
        given = {"model_path": target, "device": "cpu", "speculative_algorithm": "DART"} | flags
        args = ServerArgs(**given)
        args.resolve_once()
        return resolved_view(args)

    return run


@pytest.fixture
def drafter(tmp_path: Path, head: str) -> Callable[..., str]:
    """`drafter(field=value)`: the golden head with fields changed, or removed if None."""

    def make(**fields: Any) -> str:
        for file in Path(head).iterdir():
            if file.name != "config.json":
                (tmp_path / file.name).symlink_to(file)
        config = json.loads((Path(head) / "config.json").read_text()) | fields
        kept = {name: value for name, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return str(tmp_path)

    return make


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_the_user_leaves_open_is_filled(resolve, head) -> None:
    args = resolve(speculative_draft_model_path=head)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (8, 32)
    # Not lowered, as SGLang does for its own algorithms.
    assert args.max_running_requests is None
    assert args.disable_overlap_schedule
    assert args.attention_backend == "torch_native"


@pytest.mark.parametrize("name", ["dart", "DART"])
def test_the_name_may_be_written_small(resolve, head, name) -> None:
    resolve(speculative_algorithm=name, speculative_draft_model_path=head)


def test_a_missing_drafter_is_named(resolve) -> None:
    with pytest.raises(ValueError, match="--speculative-draft-model-path") as caught:
        resolve()
    one_line(caught)


def test_an_empty_folder_is_named(resolve, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        resolve(speculative_draft_model_path=str(tmp_path))
    assert str(tmp_path) in one_line(caught)


@pytest.mark.parametrize("field", ["draft_vocab_size", "draft_length", "hidden_size"])
def test_a_missing_field_is_named(resolve, drafter, field) -> None:
    folder = drafter(**{field: None})
    with pytest.raises(ValueError, match=field) as caught:
        resolve(speculative_draft_model_path=folder)
    assert "config.json" in one_line(caught)


def test_a_config_without_model_type_is_named(resolve, drafter) -> None:
    """SGLang reads the drafter's config.json too, and needs the field."""
    folder = drafter(model_type=None)
    with pytest.raises(ValueError, match="model_type") as caught:
        resolve(speculative_draft_model_path=folder)
    assert folder in one_line(caught)


def test_another_target_is_named(resolve, drafter) -> None:
    folder = drafter(hidden_size=32, target_hidden_size=32)
    with pytest.raises(ValueError, match="another target") as caught:
        resolve(speculative_draft_model_path=folder)
    assert folder in one_line(caught)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "recurrent layers",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            "latent attention",
        ),
    ],
)
def test_targets_that_verify_no_trees_are_refused(
    resolve, target, head, tmp_path, config, says
) -> None:
    usual = json.loads((Path(target) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(usual | config))
    with pytest.raises(ValueError, match=says) as caught:
        resolve(model_path=str(tmp_path), speculative_draft_model_path=head)
    assert config["architectures"][0] in one_line(caught)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"tp_size": 2}, "--tp-size"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"is_embedding": True}, "--is-embedding"),
        ({"enable_return_hidden_states": True}, "--enable-return-hidden-states"),
        ({"return_hidden_states_mode": "full"}, "hidden-states"),
        ({"attention_backend": "triton"}, "--attention-backend"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"speculative_num_steps": 9}, "--speculative-num-steps=9"),
        ({"speculative_num_steps": 0}, "--speculative-num-steps=0"),
        ({"speculative_num_draft_tokens": 4}, "--speculative-num-draft-tokens=4"),
        ({"speculative_num_draft_tokens": 1025}, "--speculative-num-draft-tokens=1025"),
        ({"speculative_eagle_topk": 0}, "--speculative-eagle-topk"),
    ],
)
def test_a_refused_flag_is_named(resolve, head, flags, says) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        resolve(speculative_draft_model_path=head, **flags)
    one_line(caught)


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_num_steps": 1},
        {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2},
        {"speculative_eagle_topk": 1},
        # More branches than the vocabulary has tokens.
        {"speculative_eagle_topk": 500},
        {"speculative_num_draft_tokens": 256},
    ],
)
def test_edge_values_are_accepted(resolve, head, flags) -> None:
    args = resolve(speculative_draft_model_path=head, **flags)
    for flag, value in flags.items():
        if flag != "speculative_eagle_topk":
            assert getattr(args, flag) == value


def test_a_setting_out_of_bounds_is_named(resolve, head, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_DART_CONFIG", '{"candidates": 0}')
    with pytest.raises(ValueError, match="SGLANG_DART_CONFIG: candidates") as caught:
        resolve(speculative_draft_model_path=head)
    one_line(caught)


def launch(target: str, **env: str) -> str:
    """What a launcher prints that fails before it loads anything."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", target]
    flags = ["--speculative-algorithm", "DART", "--device", "cpu"]
    done = subprocess.run(
        [*command, *flags],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode
    return done.stderr + done.stdout


@pytest.mark.server
def test_a_launcher_ends_with_the_line(target) -> None:
    last = launch(target).strip().splitlines()[-1]
    assert "DART needs a drafter: give --speculative-draft-model-path" in last


@pytest.mark.server
def test_an_import_error_inside_is_said(target, tmp_path) -> None:
    """A dependency that cannot be imported: SGLang goes on without us, but the cause is logged."""
    (tmp_path / "pydantic.py").write_text("raise ImportError('no pydantic here')\n")
    said = launch(target, PYTHONPATH=str(tmp_path))
    assert "no pydantic here" in said


def test_names_that_are_taken_are_left(resolve, caplog) -> None:
    """Loading twice changes nothing."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dart.engine import algorithm

    before = [SpeculativeAlgorithm.from_string(name) for name in NAMES]
    with caplog.at_level(logging.WARNING):
        algorithm.register()
    assert [SpeculativeAlgorithm.from_string(name) for name in NAMES] == before
    assert not caplog.records
