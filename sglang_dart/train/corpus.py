"""Training texts in memory, split, and cut into batches of similar lengths."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_dart.train.method import Batch, Method, Seed
from sglang_dart.train.shards import read_columns, shard_files

# Texts are sorted by length within pools of this many batches: little padding, random order.
_POOL = 32


@dataclass(frozen=True)
class Corpus:
    """Texts end to end. Text s is ids[start[s]:start[s + 1]]; a batch's `sample` counts texts."""

    ids: np.ndarray
    """[tokens] int32"""
    mask: np.ndarray
    """[tokens] int8, 1 inside answers"""
    start: np.ndarray
    """[texts + 1] int64"""
    dropped: int
    """Texts left out because no answer token was inside the length limit."""

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text."""
        return np.diff(self.start)

    @property
    def trained_tokens(self) -> int:
        """Tokens inside answers."""
        return int(self.mask.sum())

    def take(self, chosen: np.ndarray) -> Corpus:
        """The texts `chosen`, in that order."""
        spans = [slice(self.start[text], self.start[text + 1]) for text in chosen]
        pick = np.concatenate([np.arange(s.start, s.stop) for s in spans] or [np.arange(0)])
        start = np.concatenate([[0], self.lengths[chosen].cumsum()])
        return Corpus(self.ids[pick], self.mask[pick], start, 0)

    def split(self, share: float) -> tuple[Corpus, Corpus]:
        """Training texts and held-out ones, `share` of all and at least one of each.

        A text's own bytes decide, so more data never moves a text from one side to the other.
        Raises ValueError for fewer than two texts.
        """
        if len(self) < 2:
            raise ValueError(f"{len(self)} texts: at least 2 are needed to hold one out")
        key = np.array(
            [
                zlib.crc32(self.ids[a:b].tobytes())
                for a, b in zip(self.start, self.start[1:], strict=False)
            ]
        )
        held = key < share * 2**32
        if held.all() or not held.any():
            held = key == key.min()
        return self.take(np.flatnonzero(~held)), self.take(np.flatnonzero(held))


def load_corpus(folders: Iterable[str | Path], vocab_size: int, max_length: int) -> Corpus:
    """Read shards; texts are cut at `max_length` tokens.

    Raises ValueError if the answers cannot be told from the rest (S-54), or an id is too large.
    """
    ids, masks, lengths, dropped = [], [], [], 0
    for path in shard_files(folders):
        table = read_columns(path, ("input_ids", "assistant_mask"))
        for row_ids, row_mask in zip(
            table["input_ids"].to_numpy(), table["assistant_mask"].to_numpy(), strict=True
        ):
            if len(row_ids) != len(row_mask):
                raise ValueError(
                    f"{path}: a text of {len(row_ids)} ids has a mask of {len(row_mask)}"
                )
            if not row_mask[:max_length].any():
                dropped += 1
                continue
            ids.append(row_ids[:max_length].astype(np.int32))
            masks.append(row_mask[:max_length].astype(np.int8))
            lengths.append(len(ids[-1]))
    if not ids:
        raise ValueError(
            f"no text has an answer token in its first {max_length} tokens ({dropped} texts read): "
            "is the chat template without markers, or --max-length too small?"
        )
    corpus = Corpus(
        np.concatenate(ids),
        np.concatenate(masks),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        dropped,
    )
    if corpus.mask.all():
        raise ValueError(
            "every token is marked as an answer's: the mask tells prompts and answers apart "
            "nowhere; is the chat template without markers?"
        )
    if corpus.ids.max() >= vocab_size or corpus.ids.min() < 0:
        raise ValueError(
            f"token id {int(corpus.ids.max())} is outside the target's vocabulary of {vocab_size}; "
            "these shards were made with another model"
        )
    return corpus


def count_tokens(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """How often each token occurs inside answers, [V] int64."""
    return np.bincount(corpus.ids[corpus.mask.astype(bool)], minlength=vocab_size)


def answer_numbers(mask: torch.Tensor) -> torch.Tensor:
    """Number the runs of ones of mask [B, T] from 1 on; 0 elsewhere."""
    mask = mask.bool()
    first = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return first.cumsum(1) * mask


def epoch_batches(lengths: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Cut all texts into batches of at most `batch_tokens` tokens, padding included.

    The same arguments give the same batches; each text is in one batch. A text that is longer than
    `batch_tokens` is a batch of its own.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    pool = max(1, int(_POOL * batch_tokens / max(1.0, lengths.mean())))
    batches: list[list[int]] = []
    for first in range(0, len(order), pool):
        part = order[first : first + pool]
        batch: list[int] = []
        for text in part[np.argsort(lengths[part], kind="stable")]:
            if batch and (len(batch) + 1) * lengths[text] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(int(text))
        batches.append(batch)
    return [batches[index] for index in rng.permutation(len(batches))]


def collate(corpus: Corpus, texts: list[int], method: Method, seed: Seed = ()) -> Batch:
    """Pad `texts` to one length and choose the rows to train; draws depend on `seed` and text."""
    width = int(corpus.lengths[texts].max())
    ids = np.zeros((len(texts), width), dtype=np.int64)
    mask = np.zeros((len(texts), width), dtype=np.int8)
    for row, text in enumerate(texts):
        span = slice(corpus.start[text], corpus.start[text + 1])
        ids[row, : corpus.lengths[text]] = corpus.ids[span]
        mask[row, : corpus.lengths[text]] = corpus.mask[span]
    turn = answer_numbers(torch.from_numpy(mask))
    rows = method.rows(turn, [(*seed, text) for text in texts])
    return Batch(torch.from_numpy(ids), rows, texts, seed)


def batch_stream(
    corpus: Corpus, method: Method, batch_tokens: int, seed: int, first: int, stride: int
) -> Iterator[Batch]:
    """Batches first, first + stride, … of an endless series of epochs; one is made ahead."""

    def texts() -> Iterator[tuple[list[int], Seed]]:
        epoch, batches = 0, epoch_batches(corpus.lengths, batch_tokens, seed, 0)
        index = first
        while True:
            while index >= len(batches):
                index -= len(batches)
                epoch += 1
                batches = epoch_batches(corpus.lengths, batch_tokens, seed, epoch)
            # Other rows of the same text in every epoch.
            yield batches[index], (seed, epoch)
            index += stride

    with ThreadPoolExecutor(1) as ahead:
        coming = None
        for chosen, draw in texts():
            ready, coming = coming, ahead.submit(collate, corpus, chosen, method, draw)
            if ready:
                yield ready.result()
