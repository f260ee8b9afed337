"""Fixtures that every suite shares: golden vectors, tiny models, poisoned memory."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dart.draft.checkpoint import DartConfig, read_config
from sglang_dart.draft.dart import DartDrafter, DartHead, load_head
from sglang_dart.score.continuity import CountedNgrams

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of single suites stand here, where a plain `pytest` finds them."""
    parser.addoption("--draws", type=int, default=4000, help="sampled answers a setting")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN (floats) or the largest value (integers)."""
    # The public function imports the whole compiler first, which takes seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden vectors."""
    return GOLDEN


@pytest.fixture(scope="session")
def golden_json() -> Callable[[str], Any]:
    """Reads a JSON file of the golden vectors."""
    return lambda name: json.loads((GOLDEN / name).read_text())


@pytest.fixture(scope="session")
def target_embedding() -> torch.Tensor:
    """Embedding matrix [257, 64] of the golden DART target."""
    return load_file(GOLDEN / "dart/target/model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="session")
def golden_drafter(target_embedding: torch.Tensor) -> Callable[..., DartDrafter]:
    """Makes a drafter from the golden head, KV allocated: `golden_drafter(slots, **options)`."""
    source = str(GOLDEN / "dart/head")

    def make(slots: int = 64, dtype: torch.dtype = torch.float32, **options: Any) -> DartDrafter:
        head = load_head(source, read_config(source), dtype=dtype)
        drafter = DartDrafter(head, target_embedding.__getitem__, target_layers=8, **options)
        drafter.allocate(slots)
        return drafter

    return make


@pytest.fixture
def tiny_config() -> DartConfig:
    """Sizes of a head for a 17-token vocabulary, hidden 12, 4 query heads on 2 KV heads."""
    return DartConfig(
        vocab_size=17,
        draft_vocab_size=11,
        hidden_size=12,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        target_hidden_size=12,
        draft_length=3,
        rms_norm_eps=1e-6,
    )


@pytest.fixture
def tiny_drafter(tiny_config: DartConfig) -> DartDrafter:
    """A random drafter of `tiny_config` with 64 slots."""
    generator = torch.Generator().manual_seed(5)
    head = DartHead(tiny_config).requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    head.d2t.copy_(torch.arange(11) // 2)
    embedding = torch.randn(17, 12, generator=generator)
    drafter = DartDrafter(head, embedding.__getitem__, target_layers=7)
    drafter.allocate(64)
    return drafter


def read_trie(path: Path) -> CountedNgrams:
    """Read a well-formed n-gram file, whose layout is little-endian and packed.

    u64 order, u64 nodes, then per node: i32 token, u64 parent, i32 count, u64 children, and per
    child: i32 token, u64 node.
    """
    data = path.read_bytes()
    order, nodes = struct.unpack_from("<QQ", data)
    offset, paths, counts = 16, {0: ()}, {}
    for node in range(nodes):
        _, _, count, children = struct.unpack_from("<iQiQ", data, offset)
        offset += 24
        counts[paths[node]] = count
        for token, child in struct.iter_unpack("<iQ", data[offset : offset + 12 * children]):
            paths[child] = (*paths[node], token)
        offset += 12 * children
    return CountedNgrams(order, counts)


@pytest.fixture(scope="session")
def golden_ngram() -> Callable[[str], CountedNgrams]:
    """Reads a golden n-gram file by name, once a session."""
    return functools.cache(lambda name: read_trie(GOLDEN / "dart" / name))
