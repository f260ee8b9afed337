"""`sglang-dart train dart`, `dflash` and `domino`: train a drafter, then pass the parity gate."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dart.cli import emit
from sglang_dart.train.terminal import Bar, is_main_process, show_step, terminal

Model = Annotated[str, typer.Option(help="Target: a folder or a hub id.")]
Data = Annotated[list[Path], typer.Option(help="Shards from `train data`; repeatable.")]
Out = Annotated[Path, typer.Option(help="Run folder; a run in it is resumed.")]
Minutes = Annotated[float | None, typer.Option(min=0, help="Train for so long.")]
Epochs = Annotated[float, typer.Option(min=0, help="Passes over the data.")]
MaxSteps = Annotated[int | None, typer.Option(min=1)]
Rate = Annotated[float, typer.Option(min=0, help="Peak learning rate.")]
BatchTokens = Annotated[int, typer.Option(min=16, help="Tokens of a step on each device.")]
WarmupSteps = Annotated[int, typer.Option(min=0)]
WeightDecay = Annotated[float, typer.Option(min=0)]
Clip = Annotated[float, typer.Option(min=0, help="Largest gradient norm.")]
IntermediateSize = Annotated[
    int | None, typer.Option(min=1, help="MLP width. Default: the target's.")
]
Borrow = Annotated[bool, typer.Option(help="Start from the target's weights where they fit.")]
Start = Annotated[
    str | None,
    typer.Option(help="Start from this drafter, a folder or a hub id; it fixes all sizes."),
]
MaxLength = Annotated[int, typer.Option(min=8, help="Texts are cut here.")]
HeldOut = Annotated[float, typer.Option(min=0, max=0.5, help="Share of texts for validation.")]
LogInterval = Annotated[int, typer.Option(min=1)]
SaveInterval = Annotated[int, typer.Option(min=1)]
EvalInterval = Annotated[int, typer.Option(min=1)]
Seed = Annotated[int, typer.Option()]
DoGate = Annotated[
    bool, typer.Option(help="At the end, decode held-out prompts by reference and server.")
]
GateServer = Annotated[bool, typer.Option(help="Ask the server as well.")]
GatePrompts = Annotated[int, typer.Option(min=1)]
GateTokens = Annotated[int, typer.Option(min=2)]
Device = Annotated[str, typer.Option(help="cuda, cpu or auto.")]
Precision = Annotated[str, typer.Option(help="bf16, fp32 or auto (fp32 on a CPU).")]
# Of DFlash and Domino.
Layers = Annotated[int, typer.Option(min=1, help="Decoder layers.")]
Taps = Annotated[
    str, typer.Option(help="Target layers to read, such as 1,14,27. Default: as many as layers.")
]
BlockSize = Annotated[int, typer.Option(min=2, max=64, help="Rows of a block, root included.")]
MaskTokenId = Annotated[
    int | None, typer.Option(min=0, help="Stands for masks. Default: one that no text has.")
]
Anchors = Annotated[int, typer.Option(min=1, help="Blocks drawn a text and epoch, at most.")]
Decay = Annotated[float, typer.Option(min=0.01, help="Level j weighs exp(-j / decay).")]
LabelKind = Annotated[
    str,
    typer.Option(help="text: the tokens that follow; target: the target's distributions there."),
]
RowChunk = Annotated[int, typer.Option(min=1, help="Rows at a time in the loss: bounds memory.")]


def dart(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    minutes: Minutes = None,
    epochs: Epochs = 3.0,
    max_steps: MaxSteps = None,
    lr: Rate = 1e-3,
    batch_tokens: BatchTokens = 32768,
    warmup_steps: WarmupSteps = 100,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 0.5,
    gamma: Annotated[float, typer.Option(min=0, max=1, help="Level j weighs gamma**j.")] = 0.6,
    draft_length: Annotated[int, typer.Option(min=1, max=63, help="Mask rows.")] = 7,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Most frequent tokens.")] = 32000,
    intermediate_size: IntermediateSize = None,
    final_norm_passes: Annotated[int, typer.Option(min=1, max=2)] = 2,
    borrow: Borrow = True,
    start: Start = None,
    max_length: MaxLength = 2048,
    held_out: HeldOut = 0.01,
    log_interval: LogInterval = 20,
    save_interval: SaveInterval = 500,
    eval_interval: EvalInterval = 500,
    seed: Seed = 0,
    chunk: Annotated[
        int, typer.Option(min=1, help="Teacher positions at a time in the loss: bounds memory.")
    ] = 512,
    gate: DoGate = True,
    gate_server: GateServer = True,
    gate_prompts: GatePrompts = 16,
    gate_tokens: GateTokens = 128,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Train a DART head; on several GPUs start it with `accelerate launch -m sglang_dart.train`.

    Words after `--` go to the server of the parity gate. Exit code 1 if the gate fails.
    """
    given = locals()
    from sglang_dart.train.dart import DartSettings, train_dart

    _train("DART", DartSettings, train_dart, given)


def dflash(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    minutes: Minutes = None,
    epochs: Epochs = 6.0,
    max_steps: MaxSteps = None,
    lr: Rate = 6e-4,
    batch_tokens: BatchTokens = 16384,
    warmup_steps: WarmupSteps = 100,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    layers: Layers = 5,
    taps: Taps = "",
    block_size: BlockSize = 16,
    intermediate_size: IntermediateSize = None,
    mask_token_id: MaskTokenId = None,
    anchors: Anchors = 512,
    decay: Decay = 7.0,
    labels: LabelKind = "text",
    borrow: Borrow = True,
    start: Start = None,
    max_length: MaxLength = 2048,
    held_out: HeldOut = 0.01,
    log_interval: LogInterval = 20,
    save_interval: SaveInterval = 500,
    eval_interval: EvalInterval = 500,
    seed: Seed = 0,
    chunk: RowChunk = 2048,
    gate: DoGate = True,
    gate_server: GateServer = True,
    gate_prompts: GatePrompts = 16,
    gate_tokens: GateTokens = 128,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Train a DFlash drafter: blocks of masks, no correction head.

    Words after `--` go to the server of the parity gate. Exit code 1 if the gate fails.
    """
    given = locals()
    from sglang_dart.train.block import BlockSettings, train_block

    _train("DARTREE", BlockSettings, train_block, given)


def domino(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    minutes: Minutes = None,
    epochs: Epochs = 3.0,
    max_steps: MaxSteps = None,
    lr: Rate = 6e-4,
    batch_tokens: BatchTokens = 16384,
    warmup_steps: WarmupSteps = 100,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    layers: Layers = 5,
    taps: Taps = "",
    block_size: BlockSize = 16,
    intermediate_size: IntermediateSize = None,
    mask_token_id: MaskTokenId = None,
    shift_label: Annotated[
        bool, typer.Option(help="Row k of a block predicts position k + 1, not k.")
    ] = True,
    emb_dim: Annotated[int, typer.Option(min=1, help="Rank of the correction.")] = 256,
    gru_hidden_dim: Annotated[int, typer.Option(min=1, help="State of a path.")] = 1024,
    base_until: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the run over which the base loss fades out."),
    ] = 0.5,
    anchors: Anchors = 256,
    decay: Decay = 7.0,
    labels: LabelKind = "text",
    borrow: Borrow = True,
    start: Start = None,
    max_length: MaxLength = 2048,
    held_out: HeldOut = 0.01,
    log_interval: LogInterval = 20,
    save_interval: SaveInterval = 500,
    eval_interval: EvalInterval = 500,
    seed: Seed = 0,
    chunk: RowChunk = 2048,
    gate: DoGate = True,
    gate_server: GateServer = True,
    gate_prompts: GatePrompts = 16,
    gate_tokens: GateTokens = 128,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Train a Domino drafter: a DFlash backbone and the causal head that corrects it.

    Words after `--` go to the server of the parity gate. Exit code 1 if the gate fails.
    """
    given = locals()
    from sglang_dart.train.block import DominoSettings, train_block

    _train("DARTREE", DominoSettings, train_block, given)


def _train(algorithm: str, kind: type, train: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Train with the settings of class `kind` that a command was given, then pass the gate."""
    from sglang_dart.train.loop import LoopSettings

    if "taps" in given:
        given = {**given, "taps": _layers(given["taps"])}
    device, precision = _machine(given["device"], given["precision"])
    if given["start"] is not None:
        given = {**given, **_as_started(kind, given)}
    settings = kind(
        **_fields(kind, given)
        | {"data": tuple(map(str, given["data"])), "precision": precision}
        | {"loop": LoopSettings(**_fields(LoopSettings, given))}
    )
    if is_main_process():
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        # One line a file at every checkpoint.
        logging.getLogger("accelerate").setLevel(logging.WARNING)
    with Bar("train") as bar:
        trained = train(
            given["out"],
            settings,
            device=device,
            command=_command_line(),
            on_step=show_step(bar),
        )
    if is_main_process():
        result = trained.summary | {"head": str(trained.head)}
        if given["gate"]:
            _pass_gate(algorithm, trained, result, device, given)
        else:
            emit(result)


def _pass_gate(
    algorithm: str, trained: Any, result: dict[str, Any], device: str, given: Mapping[str, Any]
) -> None:
    from sglang_dart.train.card import gate_section
    from sglang_dart.train.gate import check_parity

    terminal.print("parity gate: decoding held-out prompts")
    found = check_parity(
        algorithm,
        trained.head,
        given["model"],
        trained.held_out,
        device=device,
        prompts=given["gate_prompts"],
        new_tokens=given["gate_tokens"],
        with_server=given["gate_server"],
        server_flags=given["context"].args,
    )
    for line in (*found.failures, *([found.note] if found.note else [])):
        terminal.print(f"[bold red]PARITY GATE: {line}", highlight=False)
    with (trained.head / "README.md").open("a") as card:
        card.write(gate_section(asdict(found)))
    emit(result | {"gate": asdict(found)})
    if found.failures:
        raise typer.Exit(1)


def _machine(device: str, precision: str) -> tuple[str, str]:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    if precision not in ("bf16", "fp32") or device not in ("cuda", "cpu"):
        raise ValueError(f"--device {device} --precision {precision}: cuda or cpu, bf16 or fp32")
    return device, precision


def _as_started(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What --start makes of options that were not given; those that were are checked later."""

    def is_default(name: str) -> bool:
        source = given["context"].get_parameter_source(name)
        return source is None or source.name == "DEFAULT"

    if not is_default("borrow"):
        flag = "--borrow" if given["borrow"] else "--no-borrow"
        raise ValueError(f"{flag}: with --start all weights are {given['start']}'s; leave it out")
    # A head that has learned already needs no time in which only the backbone learns.
    found = {"borrow": False, "base_until": 0.0} | kind.fixed_by(given["start"])
    return {name: value for name, value in found.items() if is_default(name)}


def _fields(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are fields of a settings class of the same name."""
    return {f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given}


def _layers(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--taps {text}: expected layers such as 1,14,27") from error


def _command_line() -> str:
    program = Path(sys.argv[0])
    called = "python -m sglang_dart.train" if program.stem == "__main__" else program.name
    return f"{called} {shlex.join(sys.argv[1:])}"
