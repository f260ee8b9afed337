"""Texts in memory: split, batches, and data that cannot be trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dart.train.corpus import answer_numbers, count_tokens, epoch_batches, load_corpus
from sglang_dart.train.shards import Sample, read_meta, read_samples, write_shard


def shard(folder: Path, *texts: tuple[list[int], list[int]]) -> Path:
    samples = [Sample(ids, mask, 0, 0.0, "test") for ids, mask in texts]
    write_shard(folder / "shard-000000.parquet", samples, {"model": "tiny"})
    return folder


def test_shard_keeps_samples_and_settings(tmp_path: Path) -> None:
    folder = shard(tmp_path, ([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]))
    path = folder / "shard-000000.parquet"
    assert [s.input_ids for s in read_samples(path)] == [[1, 2, 3], [4, 5]]
    assert read_meta(path) == {"model": "tiny"}
    assert [p.name for p in folder.iterdir()] == ["shard-000000.parquet"]


def test_corpus_cuts_long_texts_and_drops_those_without_answer(tmp_path: Path) -> None:
    folder = shard(
        tmp_path, ([1, 2, 3, 4], [0, 1, 1, 1]), ([5, 6, 7, 8], [0, 0, 0, 1]), ([9, 9], [0, 1])
    )
    corpus = load_corpus([folder], vocab_size=10, max_length=3)
    assert corpus.ids.tolist() == [1, 2, 3, 9, 9]
    assert corpus.start.tolist() == [0, 3, 5]
    assert (corpus.dropped, corpus.trained_tokens) == (1, 3)
    assert count_tokens(corpus, 10).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([([1, 2], [0, 0]), ([3, 4], [0, 0])], "no text has an answer token"),
        ([([1, 2], [1, 1]), ([3, 4], [1, 1])], "every token is marked"),
        ([([1, 12], [0, 1])], "outside the target's vocabulary of 10"),
        ([([1, 2], [0, 1, 1])], "a text of 2 ids has a mask of 3"),
    ],
)
def test_unusable_data_is_refused(tmp_path: Path, texts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_corpus([shard(tmp_path, *texts)], vocab_size=10, max_length=8)


def test_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*.parquet shards"):
        load_corpus([tmp_path], vocab_size=10, max_length=8)


def test_split_is_a_property_of_each_text(texts: Path) -> None:
    everything = load_corpus([texts], 264, 512)
    part = load_corpus([texts / "shard-000001.parquet"], 264, 512)
    train, held = everything.split(0.3)
    train_of_part, held_of_part = part.split(0.3)
    assert len(train) + len(held) == len(everything)

    def bodies(corpus) -> set[bytes]:
        return {
            corpus.ids[a:b].tobytes() for a, b in zip(corpus.start, corpus.start[1:], strict=False)
        }

    assert bodies(held_of_part) <= bodies(held)
    assert bodies(train_of_part) <= bodies(train)
    assert not bodies(train) & bodies(held)


@pytest.mark.parametrize("batch_tokens", [1, 40, 64, 100_000])
def test_batches_hold_each_text_once_within_the_limit(batch_tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 333)
    batches = epoch_batches(lengths, batch_tokens, seed=1, epoch=2)
    assert sorted(text for batch in batches for text in batch) == list(range(333))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= batch_tokens
    assert batches == epoch_batches(lengths, batch_tokens, seed=1, epoch=2)
    assert batches != epoch_batches(lengths, batch_tokens, seed=1, epoch=3)


def test_answers_are_numbered_by_run() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 0, 1]])
    assert answer_numbers(mask).tolist() == [[0, 1, 1, 0, 2], [1, 0, 2, 0, 3]]
