"""An experiment whose best iteration is known, and what compares its runs, for several tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
import pytest
from paddle.io import DataLoader
from tiny import DEVICE, Points, Tiny, metrics, same_bits

from expbase import main
from expbase.extras.prediction import Prediction

BEST = 4  # the iteration that Graded.valid finds best


class Graded(Prediction, Tiny):
    """A validation with a number of many digits, one that counts, and a best iteration."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.other = DataLoader(Points(7), batch_size=2, shuffle=True)

    def setup_model(self) -> None:
        super().setup_model()
        self.input_spec = [paddle.static.InputSpec([None, 4], "float32")]

    def valid(self) -> dict[str, float]:
        losses, total = 0.0, 0
        for points, labels in self.valid_batches():
            losses += float(F.cross_entropy(self.model(points), labels, reduction="sum"))
            total += len(labels)
        sizes, own = self.gather(total), {"rank": self.rank}
        means = self.average({"loss": losses / max(total, 1)}, weight=total)
        return {**means, "samples": sum(sizes), "score": -abs(self.iteration - BEST), **own}

    def predict_batch(self, batch: Any) -> Any:
        return self.model(batch[0])


# What the runs of Graded below have in common: each checkpoint is validated and kept.
SETTINGS = {
    "seed": 5, "max_iteration": 6, "valid_interval": 2, "save_interval": 2, "log_interval": 1,
    "keep_last": 0, "monitor": "score",
}  # fmt: skip


def steps(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").glob("step-*"))


def same_run(one: Path, other: Path) -> None:
    """Asserts the same checkpoints, to the bit, and the same curves but for times."""
    assert steps(one) == steps(other) != []
    for step in steps(one):
        same_bits(one / "checkpoints" / step, other / "checkpoints" / step)

    def facts(line: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in line.items() if k != "time" and not k.startswith("speed/")}

    assert [*map(facts, metrics(one))] == [*map(facts, metrics(other))]


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and directory, when it was changed and what it holds."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [directory, *directory.rglob("*")]
    }


def answer(capsys: pytest.CaptureFixture[str], experiment: type[Tiny], *words: str) -> Any:
    """What a command line printed: one JSON object and no other word."""
    capsys.readouterr()
    main(experiment, argv=["--device", DEVICE, *words])
    return json.loads(capsys.readouterr().out)
