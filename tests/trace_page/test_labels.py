"""Labels: blanks visible, nothing that steers, widths in columns, texts in pieces."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_dart.trace_page.labels import TokenizerText, columns, shortened, visible
from tests.trace_page.drawn import byte_tokenizer


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\t\r", "↵⇥␍"),
        ("a\u202eb", "a\\u{202e}b"),
        ("\u200b\x00\ufeff", "\\u{200b}\\u{0}\\u{feff}"),
        ("\ud800", "\\u{d800}"),
        ("\u00a0", "\\u{a0}"),
        ("東京é", "東京é"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "width"), [("", 0), ("abc", 3), ("東京都", 6), ("e\u0301", 1), ("🎌", 2)]
)
def test_columns(text: str, width: int) -> None:
    assert columns(text) == width


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("東京都", 6, "東京都"),
        ("東京都", 5, "東京…"),
        ("東京", 2, "…"),
    ],
)
def test_cuts(text: str, limit: int, cut: str) -> None:
    assert shortened(text, limit) == cut


def test_pieces_of_a_text_join_to_it() -> None:
    tokenizer = byte_tokenizer()
    text, shown = TokenizerText(tokenizer), " né 🎌.\n"
    ids = tokenizer.encode(shown)
    assert len(ids) == len(shown.encode())
    pieces = text.pieces(ids)
    assert "".join(pieces) == shown
    assert pieces[:4] == [" ", "n", "", "é"]
    # A cut character is shown as far as it goes, not lost.
    assert "".join(text.pieces(ids[:-4])) != ""
    assert text.label(ids[0]) == " "
    assert "\ufffd" not in text.label(ids[2])
    assert text.label(256) == "<end>"
    assert text.label(9999) == "[9999]"


def test_a_decoder_that_drops_the_first_blank() -> None:
    """As Llama 2's: a word's blank is part of its token, and decoding a text strips one."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "a": 1, "▁the": 2, "▁": 3, "<0xE2>": 4}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=raw)
    assert made.decode([2]) == "the"
    text = TokenizerText(made)
    assert [text.label(token) for token in (2, 3, 4)] == [" the", " ", "<0xE2>"]
    assert text.pieces([2, 1, 2, 3]) == [" the", "a", " the", " "]


def test_bytes_that_never_become_a_character_are_not_lost() -> None:
    tokenizer = byte_tokenizer()
    broken = tokenizer.convert_tokens_to_ids("ÿ")
    ids = [broken, broken, *tokenizer.encode("ok"), broken]
    assert TokenizerText(tokenizer).pieces(ids) == ["", "", "\ufffd\ufffdo", "k", "\ufffd"]
