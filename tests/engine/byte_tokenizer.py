"""A tokenizer whose ids are the bytes of UTF-8, and one end token: for the tiny targets."""

from __future__ import annotations

from pathlib import Path

END = 256

# Every message on a line of its own: a prompt's ids are known without the tokenizer.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer of 257 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {_character(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)


def encode(text: str) -> list[int]:
    """The ids of `text`."""
    return list(text.encode())


def _character(byte: int) -> str:
    """How byte-level tokenizers write a byte: as itself if it is printable in Latin-1."""
    if byte in _PRINTABLE:
        return chr(byte)
    return chr(256 + sum(other not in _PRINTABLE for other in range(byte)))


_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
