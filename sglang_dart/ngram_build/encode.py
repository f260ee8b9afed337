"""Documents → token ids, by any Hugging Face tokenizer."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_dart.ngram_build.documents import Document, Message

# What is encoded together, and the longest piece of one document: it bounds the memory that the
# tokenizer takes (about a hundred bytes a token).
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 18
# Private-use characters around the number of a special token that stands in a message as text.
_OPEN, _CLOSE = "\uf8fd", "\uf8fe"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True)
class TokenizerSource:
    """What a worker needs to encode as the parent would: cheap to send, quick to load."""

    name: str
    # tokenizer.json, or "" if the tokenizer is not a fast one.
    json: str
    special: tuple[str, ...]
    eos: int

    @classmethod
    def of(cls, tokenizer: Any, name: str, eos: int | None) -> TokenizerSource:
        """Raises ValueError if documents cannot be ended."""
        end = tokenizer.eos_token_id if eos is None else eos
        if not isinstance(end, int):
            raise ValueError(f"tokenizer {name} has no end-of-sequence token; give --eos-id")
        fast = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else ""
        added = tokenizer.added_tokens_decoder.values()
        special = sorted({str(token) for token in added if token.special}, key=len, reverse=True)
        return cls(name, fast, tuple(special), end)


def load_tokenizer(name: str) -> Any:
    """A transformers tokenizer: a folder or a hub id. Raises ValueError in one line."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"tokenizer {name}: {reason}") from error


@dataclass
class Encoder:
    """Encodes documents in order, a batch at a time.

    A document's text is plain: the spelling of a special token in it is encoded as ordinary text.
    Messages go through the chat template, whose special tokens count; what their contents spell
    does not. Whatever tokens the tokenizer puts around a text (a BOS, say) are kept.
    """

    source: TokenizerSource
    bad: Counter[str]
    _plain: Any = field(init=False)
    _templated: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._plain = (
            _load_fast(self.source) if self.source.json else load_tokenizer(self.source.name)
        )
        if self.source.json:
            self._plain.encode_special_tokens = True
        pattern = "|".join(re.escape(token) for token in self.source.special)
        self._special = re.compile(pattern or r"(?!)")

    def encode(self, documents: Iterable[Document]) -> Iterator[list[np.ndarray]]:
        """Token ids of the documents, without the end-of-sequence token, in batches."""
        batch: list[Document] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += len(document) if isinstance(document, str) else 1024
            if size >= _BATCH_CHARACTERS:
                yield self._encode_batch(batch)
                batch, size = [], 0
        if batch:
            yield self._encode_batch(batch)

    def _encode_batch(self, documents: list[Document]) -> list[np.ndarray]:
        pieces: list[str] = []
        place: list[slice] = []
        for document in documents:
            start = len(pieces)
            pieces += _pieces(document) if isinstance(document, str) else []
            place.append(slice(start, len(pieces)))
        encoded = self._encode_plain(pieces, {piece.start for piece in place})
        rows = [
            np.concatenate(encoded[piece])
            if isinstance(document, str)
            else self._encode_messages(document)
            for document, piece in zip(documents, place, strict=True)
        ]
        return [row for row in rows if len(row)]

    def _encode_plain(self, texts: list[str], first: set[int]) -> list[np.ndarray]:
        """Encode texts as plain; those in `first` with the tokens that open a text."""
        result: list[np.ndarray] = [np.empty(0, np.int64)] * len(texts)
        for opens in (True, False):
            chosen = [i for i in range(len(texts)) if (i in first) == opens]
            # A tokenizer's own rows take many times the memory of the ids in them.
            for few in _in_batches(chosen, texts):
                rows = self._encode_rows([texts[i] for i in few], opens)
                for i, row in zip(few, rows, strict=True):
                    result[i] = np.asarray(row, np.int64)
        return result

    def _encode_rows(self, texts: list[str], opens: bool) -> list[list[int]]:
        if self.source.json:
            rows = self._plain.encode_batch_fast(texts, add_special_tokens=opens)
            return [row.ids for row in rows]
        rows = self._plain(texts, add_special_tokens=opens, split_special_tokens=True)
        return rows["input_ids"]

    def _encode_messages(self, messages: list[Message]) -> np.ndarray:
        from jinja2 import TemplateError

        if self._templated is None:
            self._templated = load_tokenizer(self.source.name)
        if not self._templated.chat_template:
            raise ValueError(
                f"tokenizer {self.source.name} has no chat template to put messages in"
            )
        marked = [message | {"content": self._mark(message["content"])} for message in messages]
        try:
            text = self._templated.apply_chat_template(marked, tokenize=False)
        except TemplateError:
            self.bad["refused by the chat template"] += 1
            return np.empty(0, np.int64)
        # Text outside the marks and numbers of special tokens inside them take turns.
        parts: list[np.ndarray] = []
        for i, part in enumerate(_MARK.split(text)):
            if i % 2:
                parts += self._encode_plain([self.source.special[int(part)]], set())
            elif part:
                ids = self._templated(part, add_special_tokens=False)["input_ids"]
                parts.append(np.asarray(ids, np.int64))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _mark(self, content: str) -> str:
        plain = content.replace(_OPEN, "").replace(_CLOSE, "")
        return self._special.sub(
            lambda found: f"{_OPEN}{self.source.special.index(found[0])}{_CLOSE}", plain
        )


def _load_fast(source: TokenizerSource) -> Any:
    # One thread a worker: the workers share out the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source.json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _in_batches(chosen: list[int], texts: list[str]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for i in chosen:
        batch.append(i)
        size += len(texts[i])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text before white space, where tokens begin anyway."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        stop = start + _PIECE_CHARACTERS
        space = max(text.rfind(character, start + 1, stop) for character in " \n")
        stop = space if space > start else stop
        yield text[start:stop]
        start = stop
    yield text[start:]
