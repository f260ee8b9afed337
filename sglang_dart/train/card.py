"""The model card of a trained drafter: data, command, figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Card:
    """What a card says of its kind of drafter.

    drafts: tokens at once. hits: which positions count as right. data: how the data shaped it.
    """

    kind: str
    algorithm: str
    tags: tuple[str, ...]
    drafts: int
    hits: str
    data: str


def model_card(card: Card, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Markdown with everything that is needed to judge the drafter and to make it again."""
    data, scores = summary["data"], summary["held_out"]
    levels = range(len(scores["accuracy"]))
    name = Path(str(summary["target"])).name
    return f"""---
library_name: sglang-dart
tags: [speculative-decoding, {", ".join(card.tags)}]
---
# {card.kind} for {name}

Drafts {card.drafts} tokens at once for `{name}` in SGLang with
[sglang-dart](https://pypi.org/project/sglang-dart/): `--speculative-algorithm {card.algorithm}
--speculative-draft-model-path <this folder>`. The target verifies every draft, so this drafter
changes speed, never the output.

## Figures
Held-out texts: {data["held_out_texts"]} ({summary["date"]}, {summary["device"]}). Share of
positions {card.hits}, teacher-forced:

| level | {" | ".join(str(level) for level in levels)} |
|---|{"---|" * len(levels)}
| accuracy | {" | ".join(f"{hit:.1%}" for hit in scores["accuracy"])} |

Loss {scores["loss"]:.4f}. A greedy chain of these drafts commits {scores["chain"]:.2f} tokens a
round (bonus included, no tree, no n-gram), counted from every position alike{_base(scores)}.

## Data
{data["texts"]} texts written by the target itself, {data["tokens"]} tokens, of which
{data["answer_tokens"]} ({data["answer_share"]:.1%}) in answers and trained on;
{data["dropped_texts"]} texts dropped for having none. {card.data}

## Training
{_origin(settings)}{summary["parameters"]} parameters, {summary["step"]} steps,
{summary["tokens"]} tokens seen (padding included), {summary["seconds"]:.0f} s.

```
{summary["command"]}
```

```json
{json.dumps(settings, indent=2)}
```
"""


def _origin(settings: Mapping[str, Any]) -> str:
    start = settings.get("start")
    return "" if start is None else f"Began from the weights of `{start}`. "


def _base(scores: Mapping[str, Any]) -> str:
    base = scores["base_chain"]
    return "" if base is None else f"; {base:.2f} without the correction head"


def gate_section(gate: Mapping[str, Any]) -> str:
    """Markdown with what the parity gate measured, to be added to a card."""
    server = f"{gate['server']:.3f}" if gate["server"] is not None else f"- ({gate['note']})"
    return f"""
## Accept length
{gate["prompts"]} held-out prompts, {gate["new_tokens"]} new tokens, greedy, trees of
{gate["budget"]} nodes beside the root, no n-gram:

| by `sglang_dart/reference.py` | by the server |
|---|---|
| {gate["reference"]:.3f} | {server} |
"""
