"""`sglang-dart trace`: a generation round by round, as one HTML page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from sglang_dart import _core
from sglang_dart.algorithms import NAMES, Method, Target, dartree_variant, load_method
from sglang_dart.cli import emit, run_tool
from sglang_dart.demo import PROMPTS, prepare_models
from sglang_dart.draft.domino import DominoDrafter
from sglang_dart.draft.drafter import Drafter
from sglang_dart.measure.datasets import encode_chat, load_tokenizer
from sglang_dart.ngram_model import open_ngram, vocabulary_of
from sglang_dart.options import DartreeOptions
from sglang_dart.reference import generate
from sglang_dart.trace_page.labels import TokenizerText
from sglang_dart.trace_page.page import render
from sglang_dart.trace_page.view import view

app = typer.Typer(add_completion=False)
_progress = Console(stderr=True)


class FileNgrams:
    """An n-gram file as the reference asks it, a path at a time."""

    def __init__(self, model: _core.NgramModel) -> None:
        self.order = model.order
        self._model = model

    def probability(self, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """See NgramModel in score/continuity.py."""
        paths = context.reshape(-1, context.shape[-1]).tolist()
        asked = token.flatten(0, -2).tolist()
        found = [
            torch.from_numpy(self._model.query([t for t in path if t >= 0], candidates)[0])
            for path, candidates in zip(paths, asked, strict=True)
        ]
        return torch.stack(found).view(token.shape)


@app.command()
def trace(
    prompt: Annotated[str, typer.Option(help="A question to the model.")] = PROMPTS[0],
    algorithm: Annotated[str, typer.Option(help="DART or DARTREE.")] = "DART",
    model: Annotated[
        str, typer.Option(help="Target: a folder or a hub id. Default: SmolLM2-135M-Instruct.")
    ] = "",
    drafter: Annotated[str, typer.Option(help="Drafter: a folder or a hub id.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws, if the temperature is not 0.")] = 0,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("trace.html"),
) -> None:
    """Decode one answer in plain torch, without a server, and show every round's tree on a page.

    It runs on the CPU in float32. Settings of the tree come from SGLANG_DART_CONFIG, as a server's
    do, but for `threads`, `adaptive` and `cpu_rows`, which concern a server alone.
    """
    algorithm = algorithm.upper()
    if algorithm not in NAMES:
        raise ValueError(f"--algorithm {algorithm}: must be one of {', '.join(NAMES)}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    source, chosen = prepare_models(algorithm, model=model, drafter=drafter)
    method = load_method(algorithm, chosen.source, None)
    tokenizer = load_tokenizer(source)
    ids = encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    options = method.options
    ngram = None
    if options.ngram is not None:
        ngram = FileNgrams(open_ngram(options.ngram, vocabulary_of(tokenizer, source)))
    with _progress.status(f"decoding with {algorithm}, at most {max_new_tokens} tokens"):
        target, loaded = load_pair(source, method, tokenizer)
        generation = generate(
            target,
            loaded,
            ids,
            max_new_tokens,
            options=options,
            ngram=ngram,
            end=end_tokens(target, tokenizer),
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed),
        )
    settings = {
        "algorithm": algorithm,
        "target": source,
        "drafter": chosen.source + ("" if chosen.trained else " (untrained)"),
        **described(method, loaded),
        "temperature": f"{temperature:g}" + (f", seed {seed}" if temperature else ""),
    }
    text = TokenizerText(tokenizer)
    page = render(view(generation, ids, text, settings))
    out.write_text(page, encoding="utf-8")
    result = {
        "tool": "trace",
        "algorithm": algorithm,
        "target": source,
        "drafter": chosen.source,
        "drafter_trained": chosen.trained,
        "page": str(out),
        "tokens": len(generation.tokens),
        "rounds": len(generation.rounds),
        "accept_length": generation.accept_length,
        "ids": generation.tokens,
        "answer": "".join(text.pieces(generation.tokens)),
    }
    emit(result)


def load_pair(source: str, method: Method, tokenizer: Any) -> tuple[Any, Drafter]:
    """The target as a Hugging Face model, float32 on the CPU, and the drafter on top of it.

    Raises ValueError if the two do not fit.
    """
    from transformers import AutoModelForCausalLM

    target: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    target.eval().requires_grad_(False)
    config = target.config
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    method.check_target(layers=config.num_hidden_layers, **sizes)
    known = Target(
        layers=config.num_hidden_layers,
        **sizes,
        embed=target.get_input_embeddings(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        lm_head=target.get_output_embeddings(),
        token_id=lambda text: tokenizer.get_vocab().get(text),
    )
    return target, method.load_drafter(known)


def described(method: Method, drafter: Drafter) -> dict[str, str]:
    """How the trees are made, for the header of the page."""
    options, said = method.options, {}
    budget = options.budget or method.budget
    if isinstance(options, DartreeOptions):
        variant = dartree_variant(options, causal=isinstance(drafter, DominoDrafter))
        budget = drafter.levels if variant == "chain" else budget
        said["variant"] = str(variant)
    said |= {"budget": f"{budget} nodes", "candidates": f"{options.candidates} a level"}
    return said if options.ngram is None else said | {"n-gram model": options.ngram}


def end_tokens(target: Any, tokenizer: Any) -> Sequence[int]:
    """Tokens that end an answer, by the model's generation settings and its tokenizer."""
    ends = target.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return sorted({end for end in [*listed, tokenizer.eos_token_id] if end is not None})


if __name__ == "__main__":
    sys.exit(run_tool(app, "python -m sglang_dart.trace"))
