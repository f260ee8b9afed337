"""Checkpoints: published layouts load, anything else is refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dart.draft import checkpoint
from sglang_dart.draft.checkpoint import CONFIG, INDEX, SINGLE, read_config
from sglang_dart.draft.dart import load_head

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def published(golden: Path) -> Tensors:
    return load_file(golden / "dart/head" / SINGLE)


@pytest.fixture
def config_json(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "dart/head" / CONFIG).read_text())


@pytest.fixture
def write(tmp_path: Path, config_json: dict[str, Any]) -> Callable[..., str]:
    """Writes a checkpoint folder: tensors (None: none) and changes to config.json."""

    def make(tensors: Tensors | None, **changes: Any) -> str:
        config = config_json | changes
        config = {key: value for key, value in config.items() if value is not ...}
        (tmp_path / CONFIG).write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, tmp_path / SINGLE)
        return str(tmp_path)

    return make


def load(source: str, **options: Any) -> Tensors:
    return load_head(source, read_config(source), **options).state_dict()


def assert_same(got: Tensors, published: Tensors) -> None:
    assert got.keys() == published.keys() - {"t2d", "embed_tokens.weight"}
    for name, tensor in got.items():
        assert torch.equal(tensor, published[name]), name


def test_single_file(write, published):
    assert_same(load(write(published)), published)


def test_prefix_is_dropped(write, published):
    assert_same(load(write({f"model.{k}": v for k, v in published.items()})), published)


def test_head_outside_the_prefix(write, published):
    renamed = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in published.items()}
    assert_same(load(write(renamed)), published)


def test_same_name_twice(write, published):
    twice = published | {"model.norm.weight": published["norm.weight"].clone()}
    with pytest.raises(ValueError, match=r"two tensors are named norm\.weight"):
        load(write(twice))


def write_shards(folder: str, tensors: Tensors, prefix: str = "") -> None:
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        part = {prefix + name: tensors[name] for name in names[number::3]}
        save_file(part, Path(folder) / shard)
        weight_map |= dict.fromkeys(part, shard)
    (Path(folder) / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_shards(write, published, prefix):
    source = write(None)
    write_shards(source, published, prefix)
    assert_same(load(source), published)


def test_missing_shard(write, published):
    source = write(None)
    write_shards(source, published)
    (Path(source) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard model-00002-of-00003\.safetensors.* is missing"):
        load(source)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": "../model.bin"}}])
def test_broken_index(write, index):
    source = write(None)
    (Path(source) / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json"):
        load(source)


def test_every_mismatch_is_listed(write, published):
    del published["norm.weight"], published["midlayer.mask_rep"]
    published["midlayer.self_attn.q_norm.weight"] = torch.zeros(16)
    published["fc.weight"] = torch.zeros(64, 320)
    with pytest.raises(ValueError, match="do not match") as caught:
        load(write(published))
    message = str(caught.value)
    for part in (
        "missing midlayer.mask_rep [128]",
        "missing norm.weight [64]",
        "unexpected midlayer.self_attn.q_norm.weight",
        "fc.weight is [64, 320], not [64, 192]",
    ):
        assert part in message
    assert "\n" not in message


def test_embedding_is_tolerated_and_t2d_optional(write, published):
    del published["t2d"]
    published["embed_tokens.weight"] = torch.zeros(257, 64)
    assert_same(load(write(published)), published)


def test_whole_vocabulary_needs_no_d2t(write, published):
    del published["d2t"]
    with pytest.raises(ValueError, match=r"missing d2t \[200\]"):
        load(write(published))
    published["lm_head.weight"] = torch.zeros(257, 64)
    head = load(write(published, draft_vocab_size=257))
    assert torch.equal(head["d2t"], torch.zeros(257, dtype=torch.int64))


def test_d2t_outside_the_vocabulary(write, published):
    published["d2t"][199] = 58
    with pytest.raises(ValueError, match=r"maps draft id 199 to 257, outside .* 257"):
        load(write(published))
    published["d2t"][199] = 57
    published["d2t"][0] = -1
    with pytest.raises(ValueError, match="maps draft id 0 to -1"):
        load(write(published))


def test_d2t_with_twins(write, published):
    published["d2t"][3] = published["d2t"][2] - 1
    with pytest.raises(ValueError, match="1 draft ids to a target id that is taken"):
        load(write(published))


def test_d2t_of_floats(write, published):
    published["d2t"] = published["d2t"].float()
    with pytest.raises(ValueError, match=r"d2t is torch\.float32"):
        load(write(published))


def test_zero_d2t_warns(write, published, caplog):
    published["d2t"].zero_()
    load(write(published))
    assert "draft ids are taken as target ids" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cast(write, published, dtype):
    halves = {k: v.to(dtype) if v.is_floating_point() else v for k, v in published.items()}
    got = load(write(halves), dtype=torch.float32)
    assert torch.equal(got["fc.weight"], halves["fc.weight"].float())
    assert got["d2t"].dtype == torch.int64
    assert load(write(published), dtype=dtype)["norm.weight"].dtype == dtype


def test_quantised_is_refused(write, published):
    published["fc.weight"] = published["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"fc\.weight .*quantised"):
        load(write(published))


def test_later_overwrite_does_not_reach_loaded_weights(write, published):
    source = write(published)
    head = load(source)
    data = (Path(source) / SINGLE).read_bytes()
    (Path(source) / SINGLE).write_bytes(bytes(len(data)))
    assert_same(head, published)


def test_config(write):
    config = read_config(write(None))
    assert (config.hidden_size, config.target_hidden_size, config.head_dim) == (64, 64, 16)
    assert (config.draft_length, config.rope_theta) == (7, 1e6)
    assert config.raw["architectures"] == ["LlamaForCausalLMDart"]


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": ...}, 10000.0),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, 10000.0),
    ],
)
def test_rope_theta(write, changes, theta):
    assert read_config(write(None, **changes)).rope_theta == theta


def test_head_dim_default(write):
    assert read_config(write(None, head_dim=...)).head_dim == 16
    assert read_config(write(None, head_dim=None)).head_dim == 16


def test_copied_tie_is_noted(write, caplog):
    caplog.set_level("INFO")
    read_config(write(None, tie_word_embeddings=True))
    assert "tie_word_embeddings is ignored" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_length": ...}, "draft_length is missing"),
        ({"draft_vocab_size": ...}, "draft_vocab_size is missing"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"draft_length": 0}, "draft_length: .*greater than or equal to 1, got 0"),
        ({"hidden_size": "64"}, "hidden_size: .*valid integer, got '64'"),
        ({"draft_vocab_size": 300}, "draft_vocab_size 300 exceeds vocab_size 257"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim: .*multiple of 2, got 15"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: .*None, got"),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": ...}, "rope_scaling: .*yarn"),
        ({"hidden_act": "gelu"}, "hidden_act: .*'silu', got 'gelu'"),
    ],
)
def test_bad_config(write, changes, message):
    with pytest.raises(ValueError, match=f"{re.escape(CONFIG)}.*{message}") as caught:
        read_config(write(None, **changes))
    assert "\n" not in str(caught.value)


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json here"):
        read_config(str(tmp_path))


def test_no_weights(write):
    with pytest.raises(ValueError, match=r"found neither model\.safetensors nor"):
        load(write(None))


def test_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        read_config(str(tmp_path / "absent"))


def test_file_instead_of_folder(write):
    with pytest.raises(ValueError, match="expected a checkpoint folder, got a file"):
        read_config(f"{write(None)}/{CONFIG}")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_malformed_json(tmp_path, text):
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        read_config(str(tmp_path))


def test_damaged_weights(write, tmp_path):
    source = write(None)
    (tmp_path / SINGLE).write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(source)


def test_reading_a_config_opens_no_weights(write, published, monkeypatch):
    source = write(published)
    monkeypatch.setattr(checkpoint, "_open", lambda path: pytest.fail(f"opened {path}"))
    read_config(source)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local hub cache, and a hub that must not be asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cache_snapshot(hub_cache: Path, source: Path, revision: str) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_cache / "models--owner--head"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(commit)
    for file in source.iterdir():
        if file.is_file():
            (snapshot / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("revision", [None, "v2"])
def test_hub_id_from_the_cache(hub_cache, golden, published, revision):
    cache_snapshot(hub_cache, golden / "dart/head", revision or "main")
    config = read_config("owner/head", revision)
    assert_same(load_head("owner/head", config, revision=revision).state_dict(), published)


def test_shards_from_the_cache(hub_cache, write, published):
    source = write(None)
    write_shards(source, published)
    cache_snapshot(hub_cache, Path(source), "main")
    config = read_config("owner/head")
    assert_same(load_head("owner/head", config).state_dict(), published)


def test_hub_id_neither_reachable_nor_cached(hub_cache):
    with pytest.raises(RuntimeError, match=r"hub cannot be reached, .* has no config\.json"):
        read_config("owner/other")
