"""What is refused at start-up, and what the user may leave open."""

import json
from types import SimpleNamespace

import pytest

from sglang_dart.engine import arguments

ALLOWED = {
    "speculative_algorithm": "DART",
    "device": "cuda",
    "attention_backend": "flashinfer",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "disaggregation_mode": "null",
    "enable_torch_compile": False,
    "tp_size": 1,
    "speculative_accept_threshold_single": 1.0,
}


def args(**changed):
    return SimpleNamespace(**(ALLOWED | changed))


def test_the_usual_is_allowed():
    arguments.refuse_unsupported(args())
    arguments.refuse_unsupported(args(device="cpu", attention_backend="torch_native"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", 2),
        ("pp_size", 2),
        ("disaggregation_mode", "decode"),
        ("tokenizer_worker_num", 4),
        ("enable_dp_attention", True),
        ("enable_hierarchical_cache", True),
        ("enable_lora", True),
        ("enable_return_hidden_states", True),
        ("speculative_adaptive", True),
        ("speculative_accept_threshold_single", 0.9),
        ("attention_backend", "fa4"),
        ("attention_backend", "trtllm_mha"),
        ("decode_attention_backend", "flashmla"),
        ("device", "xpu"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_flag(field, value):
    with pytest.raises(ValueError, match=arguments.flag(field)) as caught:
        arguments.refuse_unsupported(args(**{field: value}))
    assert "\n" not in str(caught.value)


@pytest.fixture
def drafter(tmp_path, golden):
    config = json.loads((golden / "dart/head/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def shape(drafter, device="cuda", name="DART", **given):
    open_fields = {
        "speculative_num_steps": None,
        "speculative_num_draft_tokens": None,
        "speculative_eagle_topk": None,
    }
    filled = args(
        device=device,
        speculative_draft_model_path=drafter,
        speculative_draft_model_revision=None,
        **(open_fields | given),
    )
    arguments.fill_defaults(name, filled)
    return (
        filled.speculative_num_steps,
        filled.speculative_num_draft_tokens,
        filled.speculative_eagle_topk,
    )


def test_defaults(drafter):
    assert shape(drafter) == (8, 61, 2)
    assert shape(drafter, device="cpu") == (8, 32, 2)


def test_what_the_user_gives_is_kept(drafter):
    assert shape(drafter, speculative_num_steps=1) == (1, 61, 2)
    assert shape(drafter, speculative_num_steps=1, speculative_num_draft_tokens=2) == (1, 2, 2)
    assert shape(drafter, speculative_num_draft_tokens=256) == (8, 256, 2)
    assert shape(drafter, speculative_eagle_topk=1) == (8, 9, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"speculative_num_steps": 9}, "1 to 8 levels"),
        ({"speculative_num_steps": 0}, "1 to 8 levels"),
        ({"speculative_num_draft_tokens": 3}, "must be 9 to 1024"),
        ({"speculative_num_draft_tokens": 5000}, "must be 9 to 1024"),
        ({"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 61}, "a chain"),
    ],
)
def test_a_wrong_shape_is_refused_with_its_range(drafter, given, says):
    with pytest.raises(ValueError, match=says):
        shape(drafter, **given)


@pytest.fixture
def chain_drafter(tmp_path, golden):
    """A Domino drafter of 8 levels whose variant is chain."""
    config = json.loads((golden / "dartree/domino_shift/config.json").read_text())
    config["dartree_config"] = {"variant": "chain"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_dartree_keeps_what_the_flags_mean(golden):
    for drafter, levels in (("domino_shift", 8), ("domino_noshift", 7), ("dflash_plain", 7)):
        of = {"drafter": str(golden / "dartree" / drafter), "name": "DARTREE"}
        assert shape(**of) == (levels, 65, 2)
        assert shape(**of, speculative_num_steps=3) == (3, 65, 2)
        assert shape(**of, speculative_num_draft_tokens=17) == (levels, 17, 2)
        assert shape(**of, speculative_eagle_topk=1) == (levels, levels + 1, 1)


def test_the_variant_chain_is_a_chain(chain_drafter):
    assert shape(chain_drafter, name="DARTREE") == (8, 9, 1)
    assert shape(chain_drafter, name="DARTREE", speculative_eagle_topk=1) == (8, 9, 1)
    with pytest.raises(ValueError, match="--speculative-eagle-topk=4: the variant is chain"):
        shape(chain_drafter, name="DARTREE", speculative_eagle_topk=4)


def test_a_missing_drafter_is_named():
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        shape(None)
