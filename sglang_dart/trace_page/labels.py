"""What a token looks like in a drawing: one line, blanks visible, nothing that could disturb it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol

_VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
# What decoders write for bytes that are no whole character.
_BROKEN = "\ufffd"
_ZERO_WIDTH = ("Mn", "Me")


class TokenText(Protocol):
    """How token ids are shown."""

    def label(self, token: int) -> str:
        """One token by itself, its blanks as they are."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """A text token by token; the pieces joined are the text."""


class TokenizerText:
    """Shows tokens as a Hugging Face tokenizer decodes them, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop a blank at the start of a text, so nothing is decoded at its start.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._start = len(self._decode(self._anchor))
        self._known: dict[int, str] = {}

    def label(self, token: int) -> str:
        """The token's text; part of a character as the vocabulary has it."""
        if token not in self._known:
            text = self._decode([*self._anchor, token])[self._start :]
            if _BROKEN in text or not text:
                # Ids beyond the tokenizer's own exist in models whose vocabulary is padded.
                text = self._tokenizer.convert_ids_to_tokens(token) or f"[{token}]"
            self._known[token] = text
        return self._known[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """A character made of several tokens comes with the last of them, the others are empty."""
        pieces: list[str] = []
        # tokens[begin:shown] stand before the next piece, so that a decode need not begin at 0.
        begin = shown = 0
        for count in range(1, len(tokens) + 1):
            text = self._decode([*self._anchor, *tokens[begin:count]])
            if text.endswith(_BROKEN) and count < len(tokens):
                pieces.append("")
                continue
            before = self._decode([*self._anchor, *tokens[begin:shown]])
            pieces.append(text[len(before) :])
            begin, shown = shown, count
        return pieces

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def visible(text: str) -> str:
    """The text in one line: blanks as signs, what steers a terminal or a line's direction by code.

    Tokens are whatever a model emits: a right-to-left mark must not turn a drawing around.
    """
    return "".join(_VISIBLE.get(c) or (c if _prints(c) else f"\\u{{{ord(c):x}}}") for c in text)


def columns(text: str) -> int:
    """Width in columns of a fixed-width font, wide characters counting two."""
    return sum(_columns(c) for c in text)


def shortened(text: str, limit: int) -> str:
    """The text cut to `limit` columns, an ellipsis in place of the rest."""
    if columns(text) <= limit:
        return text
    kept, left = "", limit - 1
    for c in text:
        left -= _columns(c)
        if left < 0:
            break
        kept += c
    return kept + "…"


def _prints(c: str) -> bool:
    category = unicodedata.category(c)
    return category[0] not in "CZ"


def _columns(c: str) -> int:
    if unicodedata.category(c) in _ZERO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1
