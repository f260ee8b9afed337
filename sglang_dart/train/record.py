"""What a run leaves to look at: sums of loss and hits, a CSV log, a picture of both."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dart.train.blocks import Rows
from sglang_dart.train.loss import Distilled


@dataclass(frozen=True)
class Scores:
    """Means over the batches that a tally saw.

    accuracy[j]: share of level-j rows whose best token is the target's (a token outside the draft
    vocabulary is a miss). chain: tokens a greedy chain would commit a round, the bonus included,
    from prefixes that have rows at all levels; base_chain: without the correction head, if any.
    """

    loss: float
    accuracy: list[float]
    chain: float
    base_chain: float | None = None


class Tally:
    """Sums kept on the device, so that counting never waits for it."""

    def __init__(self, levels: int, device: torch.device) -> None:
        self.levels = levels
        self._loss = torch.zeros(2, device=device, dtype=torch.float64)
        self._hit = torch.zeros(2, levels, device=device, dtype=torch.int64)
        # Tokens, tokens without a correction head, rounds.
        self._chain = torch.zeros(3, device=device, dtype=torch.int64)
        self._corrected = False

    @torch.no_grad()
    def add(self, distilled: Distilled, rows: Rows, places: int) -> None:
        """Count one batch of `places` = B * T prefixes."""
        correct = distilled.correct
        # Texts whose rows all lie outside the vocabulary have a loss of 0; they count all the same.
        self._loss += torch.stack([distilled.loss.detach(), torch.ones_like(distilled.loss)])
        self._hit[0].index_add_(0, rows.level, correct.long())
        self._hit[1].index_add_(0, rows.level, torch.ones_like(rows.level))
        # A prefix has all levels if its deepest row exists.
        grid = torch.zeros(places, self.levels, dtype=torch.int64, device=correct.device)
        full = grid.index_put((rows.prefix, rows.level), torch.ones_like(rows.level))[:, -1]
        self._corrected = distilled.base_correct is not None
        for which, hits in enumerate((correct, distilled.base_correct)):
            if hits is not None:
                accepted = grid.index_put((rows.prefix, rows.level), hits.long()).cumprod(1).sum(1)
                self._chain[which] += ((accepted + 1) * full).sum()
        self._chain[2] += full.sum()

    def hits(self) -> tuple[list[int], list[int]]:
        """Rows that were right, and all rows, by level."""
        right, count = self._hit.tolist()
        return right, count

    def scores(self) -> Scores:
        """The means so far."""
        loss, batches = self._loss.tolist()
        hit, count = self._hit.tolist()
        tokens, base, rounds = self._chain.tolist()
        accuracy = [h / max(n, 1) for h, n in zip(hit, count, strict=True)]
        base_chain = base / max(rounds, 1) if self._corrected else None
        return Scores(loss / max(batches, 1), accuracy, tokens / max(rounds, 1), base_chain)


class Log:
    """`log.csv`: one line a record, appended at once."""

    def __init__(self, path: Path, levels: int, resume_step: int) -> None:
        """Open the log; records after `resume_step` are taken out, for their steps run again."""
        self.path = path
        self._names = ["split", "step", "epoch", "tokens", "seconds", "lr", "grad_norm", "loss"]
        self._names += ["chain", "base_chain", *(f"accuracy_{level}" for level in range(levels))]
        kept = [row for row in read_log(path) if int(row["step"]) <= resume_step]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(kept)

    def add(self, scores: Scores, **fields: Any) -> None:
        """Append one record."""
        row = dict(fields, loss=f"{scores.loss:.6f}", chain=f"{scores.chain:.4f}")
        if scores.base_chain is not None:
            row["base_chain"] = f"{scores.base_chain:.4f}"
        row |= {f"accuracy_{level}": f"{hit:.5f}" for level, hit in enumerate(scores.accuracy)}
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerow(row)


def read_log(path: Path) -> list[dict[str, str]]:
    """The records of a log; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(log: Path, picture: Path) -> None:
    """Draw loss, accuracy of each level and accept length of a chain against the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    records = read_log(log)
    held_out = [row for row in records if row["split"] == "held-out"]
    train = [row for row in records if row["split"] == "train"]
    for rows, style, label in ((train, "-", "train"), (held_out, "o--", "held-out")):
        if rows:
            left.plot(_column(rows, "tokens"), _column(rows, "loss"), style, label=label, ms=3)
    if held_out:
        seen = _column(held_out, "tokens")
        levels = [name for name in held_out[0] if name.startswith("accuracy_")]
        shades = pyplot.get_cmap("viridis")
        for index, name in enumerate(levels):
            label = f"level {name.removeprefix('accuracy_')}"
            shade = shades(index / len(levels))
            middle.plot(seen, _column(held_out, name), "o--", label=label, ms=3, color=shade)
        right.plot(seen, _column(held_out, "chain"), "o--", label="greedy chain", ms=3)
    left.set(xlabel="tokens seen", ylabel="loss", yscale="log")
    middle.set(xlabel="tokens seen", ylabel="accuracy (held-out)", ylim=(0, 1))
    right.set(xlabel="tokens seen", ylabel="accept length (held-out)")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7, loc="best", ncols=2)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def as_fields(scores: Scores) -> Mapping[str, Any]:
    """Scores in the form of JSON."""
    return asdict(scores)
