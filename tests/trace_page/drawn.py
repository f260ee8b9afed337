"""What the tests of the page draw: words for token ids, made-up rounds, and a reader of pages."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser

import torch
from transformers import PreTrainedTokenizerFast

from sglang_dart.reference import Generation, Round
from sglang_dart.trace_page.page import render
from sglang_dart.trace_page.view import view
from sglang_dart.types import Candidates, Tree

BUDGET = 64
HOSTILE = "</script><script>alert(1)</script>"
RUNS = ("DART", *(f"DARTREE {variant}" for variant in ("pruned", "fixed", "chain", "marginal")))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, every byte a token, with an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
    return made


class Words:
    """Token t is "t5"; one has a hostile text."""

    def __init__(self, hostile: int = -1) -> None:
        self._hostile = hostile

    def label(self, token: int) -> str:
        return HOSTILE if token == self._hostile else f"t{token}"

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [f"{self.label(token)} " for token in tokens]


class LongWords(Words):
    """Labels as wide as they get, wide characters among them."""

    def label(self, token: int) -> str:
        return ("Donaudampfschifffahrt", "東京特許許可局局長", "iiiiiiiiiiiiiiii", " ")[token % 4]


def deep_generation() -> Generation:
    """Three rounds of 64 nodes, 16 levels deep, of which 0, 9 and 16 are accepted."""
    levels, rounds = 16, []
    for accepted in (0, 9, 16):
        # A spine of 16 nodes, and three more children at each of its places.
        parent = [-1, *range(levels), *(node for node in range(levels) for _ in range(3))]
        depth = [0]
        for above in parent[1:]:
            depth.append(depth[above] + 1)
        tree = Tree(
            torch.arange(len(parent))[None],
            torch.tensor([parent], dtype=torch.int32),
            torch.tensor([depth], dtype=torch.int32),
            -torch.arange(len(parent)).float()[None] / 4,
        )
        token = torch.arange(4).repeat(1, levels, 1)
        candidates = Candidates(token, -torch.ones(1, levels, 4))
        path = list(range(accepted + 1))
        rounds.append(Round(candidates, tree, path, [*path[1:], 0]))
    return Generation([0, *(token for r in rounds for token in r.token)], rounds)


def page_of(prompt: list[int], generation: Generation, words: Words | None = None) -> str:
    settings = {"algorithm": "DART", "target": "target" if words is None else HOSTILE}
    return render(view(generation, prompt, words or Words(), settings))


class Page(HTMLParser):
    """Elements of a page with their attributes, and the nodes of its drawings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.nodes: list[list[tuple[str, str]]] = []
        self._path: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "section" and given.get("class") == "round":
            self.nodes.append([])
        if tag == "g":
            self.nodes[-1].append((given["class"] or "", ""))
        self._path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._path[-2:] == ["g", "text"]:
            kind, label = self.nodes[-1][-1]
            self.nodes[-1][-1] = (kind, label + data)
