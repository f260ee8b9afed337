"""The DART drafter against the release's outputs, and batched against one request at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from sglang_dart.draft.checkpoint import DartConfig
from sglang_dart.draft.dart import DartDrafter, check_target, dart_taps
from sglang_dart.draft.drafter import Roots, Rows

TOLERANCE = 5e-5
PROMPTS = (0, 1, 2)


class Round(NamedTuple):
    key: str
    rows: Rows
    roots: Roots


def slots_of(position: torch.Tensor) -> torch.Tensor:
    """Any injective map from positions (< 61) to slots that is not the identity."""
    return (position * 7) % 61 + 1


def rounds_of(prompt: dict[str, Any], index: int, tensors: dict[str, torch.Tensor]) -> Iterator:
    for number, given in enumerate(prompt["rounds"]):
        key = f"p{index}.r{number}"
        tokens = torch.tensor(given["tokens"])
        feature = tensors[f"{key}.features"]
        position = given["first_position"] + torch.arange(len(tokens))
        following = torch.cat([tokens[1:], torch.tensor([given["root"]])])
        length = given["first_position"] + len(tokens)
        table = torch.full((1, 40), 63)
        table[0, :length] = slots_of(torch.arange(length))
        yield Round(
            key,
            Rows(feature, following, position, slots_of(position)),
            Roots(torch.tensor([given["root"]]), torch.tensor([length]), feature[-1:], table),
        )


@pytest.fixture(scope="module")
def tensors(golden: Path) -> dict[str, torch.Tensor]:
    return load_file(golden / "dart/draft_logits.safetensors")


@pytest.fixture(scope="module")
def cases(golden_json: Callable, tensors: dict[str, torch.Tensor]) -> list[list[Round]]:
    prompts = golden_json("dart/draft_logits.json")["prompts"]
    return [list(rounds_of(prompt, index, tensors)) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_equal_the_release(cases, tensors, golden_drafter, prompt, passes):
    drafter = golden_drafter(final_norm_passes=passes)
    for case in cases[prompt]:
        drafter.append(case.rows)
        logits = drafter.draft_logits(case.roots)
        torch.testing.assert_close(
            logits[0], tensors[f"{case.key}.logits_norm{passes}"], atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_kv_rows_equal_the_release(cases, tensors, golden_drafter, prompt):
    drafter = golden_drafter()
    for case in cases[prompt]:
        drafter.append(case.rows)
        for held, name in ((drafter.kv.key, "k"), (drafter.kv.value, "v")):
            rows = held[0, case.rows.slot].transpose(0, 1)
            torch.testing.assert_close(
                rows, tensors[f"{case.key}.draft_{name}_rows"], atol=TOLERANCE, rtol=0
            )


def test_candidates_are_target_ids(cases, tensors, golden_drafter):
    drafter, case = golden_drafter(), cases[0][0]
    drafter.append(case.rows)
    candidates = drafter.draft(case.roots, 25)
    value, index = tensors[f"{case.key}.logits_norm2"].topk(25)
    assert candidates.token.shape == (1, 8, 25)
    assert torch.equal(candidates.token[0], drafter.head.target_id()[index])
    expected = torch.log(torch.softmax(value, -1) + 1e-10)
    torch.testing.assert_close(candidates.log_prob[0], expected, atol=1e-4, rtol=0)


def test_prompt_in_chunks_equals_prompt_at_once(cases, golden_drafter):
    case, whole, chunked = cases[2][0], golden_drafter(), golden_drafter()
    whole.append(case.rows)
    for part in (slice(0, 1), slice(1, 20), slice(20, None)):
        fields = dataclasses.asdict(case.rows)
        chunked.append(Rows(**{name: value[part] for name, value in fields.items()}))
    torch.testing.assert_close(chunked.kv.key, whole.kv.key)
    torch.testing.assert_close(
        chunked.draft_logits(case.roots), whole.draft_logits(case.roots), atol=1e-5, rtol=0
    )


def random_roots(drafter: DartDrafter, lengths: list[int], seed: int = 0) -> Roots:
    """Requests with disjoint slots, whose rows are appended in one call with padding rows."""
    generator = torch.Generator().manual_seed(seed)
    config = drafter.head.config
    total, width = sum(lengths), max(lengths) + 3
    feature = torch.randn(total, 3 * config.target_hidden_size, generator=generator)
    token = torch.randint(config.vocab_size, (total,), generator=generator)
    position = torch.cat([torch.arange(length) for length in lengths])
    slot = torch.randperm(63, generator=generator)[:total] + 1
    # Padding of a captured graph: slot 0, values that must not matter.
    drafter.append(
        Rows(
            torch.cat([feature, torch.full((2, feature.shape[1]), torch.nan)]),
            torch.cat([token, token.new_zeros(2)]),
            torch.cat([position, position.new_zeros(2)]),
            torch.cat([slot, slot.new_zeros(2)]),
        )
    )
    table = torch.full((len(lengths), width), 10**6)
    for row, part in zip(table, slot.split(lengths), strict=True):
        row[: len(part)] = part
    last = torch.tensor(lengths).cumsum(0) - 1
    return Roots(token[last], torch.tensor(lengths), feature[last], table)


def one(roots: Roots, index: int) -> Roots:
    return Roots(*(value[index : index + 1] for value in dataclasses.astuple(roots)))


@pytest.mark.parametrize("lengths", [[1], [1, 3, 17, 30], [5, 5, 5], [17, 1]])
def test_batch_equals_one_at_a_time(tiny_drafter, lengths):
    roots = random_roots(tiny_drafter, lengths)
    batched = tiny_drafter.draft_logits(roots)
    assert batched.isfinite().all()
    for index in range(len(lengths)):
        alone = tiny_drafter.draft_logits(one(roots, index))
        torch.testing.assert_close(batched[index : index + 1], alone, atol=1e-5, rtol=1e-5)


def test_padding_request_disturbs_nobody(tiny_drafter):
    roots = random_roots(tiny_drafter, [4, 9])
    alone = tiny_drafter.draft_logits(roots)
    padding = Roots(
        token=torch.zeros(1, dtype=torch.int64),
        length=torch.zeros(1, dtype=torch.int64),
        last_feature=torch.zeros(1, roots.last_feature.shape[1]),
        slot_table=torch.full((1, roots.slot_table.shape[1]), -1),
    )
    padded = Roots(
        *(
            torch.cat([mine, other])
            for mine, other in zip(
                dataclasses.astuple(roots), dataclasses.astuple(padding), strict=True
            )
        )
    )
    logits = tiny_drafter.draft_logits(padded)
    torch.testing.assert_close(logits[:2], alone, atol=1e-5, rtol=1e-5)
    assert logits.isfinite().all()


def test_bfloat16_follows_float32(cases, golden_drafter):
    half, full = golden_drafter(dtype=torch.bfloat16), golden_drafter()
    for case in cases[2]:
        half.append(case.rows)
        full.append(case.rows)
        got, expected = half.draft_logits(case.roots), full.draft_logits(case.roots)
        assert got.dtype == torch.bfloat16
        assert half.draft(case.roots, 25).log_prob.dtype == torch.float32
        assert (got.float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("levels", [1, 2, 7])
def test_fewer_levels_are_the_first_ones(cases, golden_drafter, levels):
    all_of_them, few = golden_drafter(), golden_drafter(levels=levels)
    assert (all_of_them.levels, few.levels) == (8, levels)
    for case in cases[0]:
        all_of_them.append(case.rows)
        few.append(case.rows)
        expected = all_of_them.draft_logits(case.roots)[:, :levels]
        torch.testing.assert_close(few.draft_logits(case.roots), expected, atol=1e-5, rtol=0)


def test_kv_bytes_per_slot(tiny_drafter):
    kv = tiny_drafter.kv
    held = kv.key.nbytes + kv.value.nbytes
    assert tiny_drafter.kv_bytes_per_slot() * 64 == held


def test_needs_allocation(tiny_drafter):
    bare = DartDrafter(tiny_drafter.head, tiny_drafter.embed, target_layers=7)
    with pytest.raises(RuntimeError, match="allocate"):
        bare.draft(random_roots(tiny_drafter, [2]), 4)


@pytest.mark.parametrize(
    ("layers", "taps"), [(7, (1, 2, 3)), (28, (1, 13, 24)), (36, (1, 17, 32)), (64, (1, 31, 60))]
)
def test_taps(layers, taps):
    assert dart_taps(layers) == taps


def test_small_target_is_refused():
    with pytest.raises(ValueError, match="at least 7 layers, got 6"):
        dart_taps(6)


def test_other_target_is_refused(tiny_config: DartConfig):
    check_target("x", tiny_config, hidden_size=12, vocab_size=17)
    with pytest.raises(ValueError, match="hidden_size is 12, the target's hidden size is 16"):
        check_target("x", tiny_config, hidden_size=16, vocab_size=17)
    with pytest.raises(ValueError, match="vocab_size 17 exceeds the target's 16"):
        check_target("x", tiny_config, hidden_size=12, vocab_size=16)
