"""The DFlash drafter against the release's outputs, and batched against one request at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dart.draft.dflash import DFlashDrafter, load_dflash
from sglang_dart.draft.dflash_config import DFlashConfig, check_target, read_dflash_config
from sglang_dart.draft.domino import load_domino
from sglang_dart.draft.drafter import Roots, Rows
from tests import dartree

TOLERANCE = 5e-5
FILES = {
    "dflash_plain": ("dflash_cases.json", "dflash_tensors.safetensors"),
    "domino_shift": ("domino_cases.json", "domino_tensors.safetensors"),
    "domino_noshift": ("domino_cases.json", "domino_tensors.safetensors"),
}
MODELS = tuple(FILES)


def cases_of(name: str) -> list[list[dict]]:
    """The cases of each prompt, in order."""
    found = dartree.read(FILES[name][0])
    cases = (found if name == "dflash_plain" else found[name])["cases"]
    return [[c for c in cases if c["prompt_index"] == i] for i in (0, 1)]


def tensor(name: str, case: dict, part: str) -> torch.Tensor:
    return dartree.tensors(FILES[name][1])[f"{case['key']}.{part}"]


def feed(drafter: DFlashDrafter, name: str, case: dict) -> Roots:
    drafter.append(dartree.rows_of(case, tensor(name, case, "context_features")))
    return dartree.roots_of(case)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_rows_and_logits_equal_the_release(name, prompt):
    drafter = dartree.drafter(name)
    for case in cases_of(name)[prompt]:
        roots = feed(drafter, name, case)
        assert_close(drafter.block_hidden(roots)[0], tensor(name, case, "hidden"))
        logits = drafter.draft_logits(roots)[0]
        if name == "dflash_plain":
            assert_close(logits, tensor(name, case, "logits")[1:])
            assert logits.argmax(-1).tolist() == case["draft_tokens"]
        else:
            assert_close(logits, tensor(name, case, "base_logits"))


def test_levels_and_taps():
    levels = {name: dartree.drafter(name).levels for name in MODELS}
    assert levels == {"dflash_plain": 7, "domino_shift": 8, "domino_noshift": 7}
    assert dartree.drafter("dflash_plain").taps == (1, 3, 5)


def test_candidates_are_of_the_whole_vocabulary():
    drafter, case = dartree.drafter("dflash_plain"), cases_of("dflash_plain")[0][0]
    candidates = drafter.draft(feed(drafter, "dflash_plain", case), 5)
    expected = tensor("dflash_plain", case, "logits")[1:].log_softmax(-1).topk(5)
    assert torch.equal(candidates.token[0], expected.indices)
    assert_close(candidates.log_prob[0], expected.values)
    assert candidates.carry is None


def test_prompt_in_chunks_equals_prompt_at_once():
    case = cases_of("dflash_plain")[1][0]
    rows = dartree.rows_of(case, tensor("dflash_plain", case, "context_features"))
    whole, chunked = dartree.drafter("dflash_plain"), dartree.drafter("dflash_plain")
    whole.append(rows)
    for part in (slice(0, 1), slice(1, 10), slice(10, None)):
        fields = dataclasses.asdict(rows)
        chunked.append(Rows(**{name: value[part] for name, value in fields.items()}))
    torch.testing.assert_close(chunked.kv.key, whole.kv.key)
    torch.testing.assert_close(chunked.kv.value, whole.kv.value)
    roots = dartree.roots_of(case)
    torch.testing.assert_close(chunked.draft_logits(roots), whole.draft_logits(roots))


@pytest.mark.parametrize("name", MODELS)
def test_batch_equals_one_at_a_time(name):
    """Requests of different lengths, with padding rows and a padding request beside them."""
    lengths, width = [1, 3, 17, 30], 33
    drafter = dartree.drafter(name)
    generator = torch.Generator().manual_seed(0)
    feature = torch.randn(sum(lengths), 192, generator=generator)
    position = torch.cat([torch.arange(n) for n in lengths])
    slot = torch.randperm(63, generator=generator)[: sum(lengths)] + 1
    padding = torch.zeros(2, dtype=torch.int64)
    drafter.append(
        Rows(
            torch.cat([feature, torch.full((2, 192), torch.nan)]),
            torch.cat([position, padding]),
            torch.cat([position, padding]),
            torch.cat([slot, padding]),
        )
    )
    table = torch.full((len(lengths) + 1, width), 10**6)
    for row, part in zip(table[:-1], slot.split(lengths), strict=True):
        row[: len(part)] = part
    roots = Roots(
        torch.tensor([7, 200, 13, 90, 0]), torch.tensor([*lengths, 0]), torch.zeros(5, 192), table
    )
    batched = drafter.draft_logits(roots)
    assert batched.isfinite().all()
    for i in range(len(lengths)):
        alone = Roots(*(value[i : i + 1] for value in dataclasses.astuple(roots)))
        torch.testing.assert_close(
            batched[i : i + 1], drafter.draft_logits(alone), atol=1e-4, rtol=0
        )


def test_bfloat16_follows_float32():
    half, full = (dartree.drafter("domino_shift", dtype=d) for d in (torch.bfloat16, torch.float32))
    for case in cases_of("domino_shift")[1]:
        got = half.draft_logits(feed(half, "domino_shift", case))
        expected = full.draft_logits(feed(full, "domino_shift", case))
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).abs().max() < 0.05 * expected.abs().max()
        assert half.draft(dartree.roots_of(case), 8).log_prob.dtype == torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_fewer_levels_are_the_first_ones(name):
    """The block stays whole, since its rows see one another."""
    whole = dartree.drafter(name)
    few = type(whole)(whole.model, dartree.embed, dartree.lm_head, 8, levels=3)
    few.allocate(64)
    case = cases_of(name)[0][0]
    expected = whole.draft(feed(whole, name, case), 5)
    got = few.draft(feed(few, name, case), 5)
    assert few.levels == 3
    for mine, other in zip(vars(got).values(), vars(expected).values(), strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other[:, :3])
    assert (got.carry is None) == (expected.carry is None)


def test_kv_bytes_per_slot():
    drafter = dartree.drafter("dflash_plain")
    held = drafter.kv.key.nbytes + drafter.kv.value.nbytes
    assert drafter.kv_bytes_per_slot() * 64 == held


def test_needs_allocation():
    made = dartree.drafter("dflash_plain")
    bare = DFlashDrafter(made.model, dartree.embed, dartree.lm_head, 8)
    with pytest.raises(RuntimeError, match="allocate"):
        bare.draft(dartree.roots_of(cases_of("dflash_plain")[0][0]), 4)


# ---------------------------------------------------------------- config.json


@pytest.fixture
def write(tmp_path: Path):
    """Writes a copy of a golden drafter: changes to config.json, `...` leaves a key out."""

    def make(name: str, nested: dict | None = None, rename=lambda name: name, **changes) -> str:
        config = json.loads((dartree.GOLDEN / name / "config.json").read_text()) | changes
        if isinstance(config["dflash_config"], dict):
            config["dflash_config"] |= nested or {}
            config["dflash_config"] = kept(config["dflash_config"])
        (tmp_path / "config.json").write_text(json.dumps(kept(config)))
        weights = load_file(dartree.GOLDEN / name / "model.safetensors")
        save_file({rename(k): v for k, v in weights.items()}, tmp_path / "model.safetensors")
        return str(tmp_path)

    return make


def kept(config: dict) -> dict:
    return {key: value for key, value in config.items() if value is not ...}


def test_settings_at_the_top_level(write):
    nested = json.loads((dartree.GOLDEN / "domino_shift/config.json").read_text())["dflash_config"]
    flat = read_dflash_config(write("domino_shift", dflash_config=..., **nested))
    assert flat == read_dflash_config(str(dartree.GOLDEN / "domino_shift"))


def test_old_names_of_the_head(write):
    def rename(name: str) -> str:
        return f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name

    source = write(
        "domino_shift",
        {"projector_type": "causal_v5", "gru_hidden_dim": ..., "emb_dim": ...},
        rename,
        gru_hidden_dim=32,
        emb_dim=16,
    )
    loaded = load_domino(source, read_dflash_config(source)).state_dict()
    expected = load_file(dartree.GOLDEN / "domino_shift/model.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        lambda name: name.replace("fc.", "encoder.fc.").replace(
            "hidden_norm.", "encoder.output_norm_enc."
        ),
    ],
    ids=["prefix", "encoder"],
)
def test_other_names_of_the_backbone(write, rename):
    source = write("dflash_plain", rename=rename)
    loaded = load_dflash(source, read_dflash_config(source)).state_dict()
    expected = load_file(dartree.GOLDEN / "dflash_plain/model.safetensors")
    assert loaded.keys() == expected.keys()


def test_state_size_defaults_to_the_rank(write):
    config = read_dflash_config(write("domino_shift", {"gru_hidden_dim": ...}))
    assert config.domino.gru_hidden_dim == 16


@pytest.mark.parametrize(
    ("layers", "target", "taps"),
    [(5, 36, (1, 9, 17, 25, 33)), (5, 24, (1, 6, 11, 16, 21)), (1, 30, (15,)), (2, 8, (1, 5))],
)
def test_default_taps(write, layers, target, taps):
    source = write("dflash_plain", {"target_layer_ids": ...}, num_hidden_layers=layers,
                   layer_types=...)  # fmt: skip
    config = read_dflash_config(source)
    assert config.taps(target) == taps
    assert config.tap_count == len(taps)


@pytest.mark.parametrize(
    ("nested", "changes", "message"),
    [
        ({}, {"block_size": ...}, "block_size is missing; is this the right drafter"),
        ({"shift_label": ...}, {}, "shift_label is missing"),
        ({"shift_label": 1}, {}, "shift_label: .* got 1"),
        ({"projector_type": "rnn"}, {}, "projector_type: must be one of domino, causal_v5"),
        ({"target_layer_ids": [5, 3, 1]}, {}, "target_layer_ids: must be ascending"),
        ({}, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({}, {"use_sliding_window": True}, "use_sliding_window"),
        ({}, {"attention_bias": True}, "attention_bias"),
        ({}, {"rope_theta": ...}, "rope_theta is missing"),
        ({}, {"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({}, {"dflash_config": 3}, "dflash_config: expected an object"),
    ],
)
def test_bad_config_is_refused_in_one_line(write, nested, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_dflash_config(write("domino_shift", nested, **changes))
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_missing_tap_shows_in_the_shape(write):
    source = write("dflash_plain", {"target_layer_ids": [1, 3]})
    with pytest.raises(ValueError, match=r"fc.weight is \[64, 192\], not \[64, 128\]"):
        load_dflash(source, read_dflash_config(source))


def test_head_of_a_plain_config_is_refused():
    with pytest.raises(ValueError, match=r"unexpected embed_proj\.0\.weight"):
        load_dflash(
            str(dartree.GOLDEN / "domino_shift"),
            read_dflash_config(str(dartree.GOLDEN / "domino_shift")),
        )
    plain = read_dflash_config(str(dartree.GOLDEN / "dflash_plain"))
    with pytest.raises(ValueError, match="no projector_type"):
        load_domino(str(dartree.GOLDEN / "dflash_plain"), plain)


FITTING = {"hidden_size": 64, "vocab_size": 257, "layers": 8}


@pytest.mark.parametrize(
    ("nested", "target", "message"),
    [
        ({}, {"hidden_size": 128}, "hidden_size is 64, the target's is 128"),
        ({}, {"vocab_size": 300}, "vocab_size is 257, the target's is 300"),
        ({}, {"layers": 12}, "num_target_layers is 8, the target has 12"),
        ({"target_layer_ids": [1, 3, 7]}, {}, "layers 1, 3, 7 .from 0., .* last of the target's 8"),
        ({"mask_token_id": 257}, {}, "mask_token_id 257 is outside"),
    ],
)
def test_other_target_is_refused(write, nested, target, message):
    config = read_dflash_config(write("dflash_plain"))
    check_target("x", config, **FITTING)
    config = read_dflash_config(write("dflash_plain", nested))
    with pytest.raises(ValueError, match=message):
        check_target("x", config, **(FITTING | target))


def test_mask_token_must_be_known(write):
    config: DFlashConfig = read_dflash_config(write("dflash_plain", {"mask_token_id": ...}))
    model = load_dflash(str(dartree.GOLDEN / "dflash_plain"), config)
    with pytest.raises(ValueError, match=r"id of the token <\|MASK\|>"):
        DFlashDrafter(model, dartree.embed, dartree.lm_head, 8)
    assert DFlashDrafter(model, dartree.embed, dartree.lm_head, 8, mask_token_id=256).levels == 7
