"""A run learns, survives a kill to the bit, and stops at what is not finite."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dart.train.block import BlockSettings, DominoSettings, train_block
from sglang_dart.train.dart import DartSettings, train_dart
from sglang_dart.train.loop import LoopSettings, checkpoints
from sglang_dart.train.record import read_log
from sglang_dart.train.run import Settings, Trained

STEPS = 50


@pytest.fixture
def loop() -> LoopSettings:
    return LoopSettings(
        lr=3e-3,
        max_steps=STEPS,
        epochs=100,
        batch_tokens=512,
        warmup_steps=5,
        log_interval=1,
        save_interval=10,
        eval_interval=25,
    )


@pytest.fixture
def settings(target_folder: Path, texts: Path, loop: LoopSettings) -> DartSettings:
    return DartSettings(
        model=str(target_folder),
        data=(str(texts),),
        loop=loop,
        precision="fp32",
        draft_length=3,
        # Reduced, while the target's output matrix is tied to its embedding.
        draft_vocab_size=200,
        held_out=0.1,
    )


@pytest.fixture(params=["dart", "dflash", "domino"])
def any_settings(
    request: pytest.FixtureRequest,
    settings: DartSettings,
    target_folder: Path,
    texts: Path,
    loop: LoopSettings,
) -> Settings:
    """Of every method in turn."""
    if request.param == "dart":
        return settings
    kind, more = BlockSettings, {}
    if request.param == "domino":
        kind, more = DominoSettings, {"emb_dim": 12, "gru_hidden_dim": 20}
    return kind(
        model=str(target_folder),
        data=(str(texts),),
        loop=loop,
        precision="fp32",
        held_out=0.1,
        layers=1,
        taps=(1, 4, 6),
        block_size=4,
        # Fewer than a text has, so that every epoch draws others.
        anchors=8,
        **more,
    )


def run(folder: Path, settings: Settings, on_step: Callable = lambda *_: None) -> Trained:
    train = train_dart if isinstance(settings, DartSettings) else train_block
    return train(folder, settings, device="cpu", command="test", on_step=on_step)


def test_loss_falls_and_the_log_shows_it(tmp_path: Path, any_settings: Settings) -> None:
    trained = run(tmp_path, any_settings)
    rows = read_log(tmp_path / "log.csv")
    train = [float(row["loss"]) for row in rows if row["split"] == "train"]
    held_out = [float(row["loss"]) for row in rows if row["split"] == "held-out"]
    assert len(train) == STEPS
    # A divergence can fall to 0, a cross-entropy only to what is random in the texts.
    share = 0.7 if isinstance(any_settings, DartSettings) else 0.9
    assert sum(train[-10:]) < share * sum(train[:10])
    assert held_out[-1] < train[0]
    assert trained.scores.loss == pytest.approx(held_out[-1], abs=1e-6)
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000040", "step-00000050"]


def test_killed_run_ends_with_the_same_bits(tmp_path: Path, any_settings: Settings) -> None:
    settings = any_settings

    class Killed(Exception):
        pass

    whole = run(tmp_path / "whole", settings)
    last = random.Random(0).randrange(11, STEPS)

    def kill(progress, _done, _scores) -> None:
        if progress.step == last:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "killed", settings, kill)
    # A kill while a checkpoint is written leaves a folder that no run reads.
    (tmp_path / "killed" / "checkpoints" / ".step-00000099").mkdir()
    lost: list[int] = []
    resumed = run(tmp_path / "killed", settings, lambda p, *_: lost.append(p.step))
    assert last - lost[0] < settings.loop.save_interval
    assert lost[-1] == STEPS
    expected, found = (load_file(t.head / "model.safetensors") for t in (whole, resumed))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name in ("model.safetensors", "optimizer.bin"):
        expected, found = (
            (tmp_path / which / "checkpoints" / "step-00000050" / name).read_bytes()
            for which in ("whole", "killed")
        )
        assert expected == found
    steps = [row["step"] for row in read_log(tmp_path / "killed/log.csv") if row["lr"]]
    assert steps == [row["step"] for row in read_log(tmp_path / "whole/log.csv") if row["lr"]]


def test_other_settings_do_not_resume(tmp_path: Path, settings: DartSettings) -> None:
    short = dataclasses.replace(settings, loop=dataclasses.replace(settings.loop, max_steps=1))
    run(tmp_path, short)
    with pytest.raises(ValueError, match=r"its run has gamma = 0.6, now 0.5"):
        run(tmp_path, dataclasses.replace(short, gamma=0.5))


def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, settings: DartSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_dart.train import dart

    method_class = dart.DartMethod
    calls = 0

    class Poisoned(method_class):
        def forward(self, batch, capture):
            nonlocal calls
            calls += self.training and torch.is_grad_enabled()
            found = super().forward(batch, capture)
            if calls > 12 and 7 in batch.sample:
                return dataclasses.replace(found, loss=found.loss * float("nan"))
            return found

    monkeypatch.setattr(dart, "DartMethod", Poisoned)
    with pytest.raises(RuntimeError, match="not finite") as error:
        run(tmp_path, settings)
    message = str(error.value)
    assert "texts with such a loss: [7]" in message
    newest = checkpoints(tmp_path)[-1]
    assert message.endswith(f"last good checkpoint: {newest}")
    assert int(message.split()[1].rstrip(":")) > int(newest.name.removeprefix("step-"))


def test_clock_ends_a_run(tmp_path: Path, settings: DartSettings) -> None:
    loop = dataclasses.replace(settings.loop, minutes=1e-6)
    run(tmp_path, dataclasses.replace(settings, loop=loop))
    rows = read_log(tmp_path / "log.csv")
    assert {row["step"] for row in rows} == {"1"}
