"""Changes something between two starts of a run: each continues exactly, is refused, or is told.

The first start trains 4 iterations of 8 in epochs of 10. The second has one thing changed: the
model, the optimizer, the schedule, the data, the config, what is state, or a file of the run. It
is exact if it ends with the bits of a run that had neither a break nor a change, refused if it
raises an error, told if a line of its log says so: what was changed, or that the source file was.
Other bits without a word are a failure, and so is another answer than the table expects.

    python tests/proofs/matrix.py [--only WORD]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import paddle
from paddle import nn
from paddle.io import BatchSampler, DataLoader, Dataset, IterableDataset
from paddle.optimizer import SGD, Adam, AdamW, lr
from tiny import make

from expbase import ExperimentBase, on

EXACT, REFUSED, TOLD = "exact", "refused", "told"
# Lines that say what is not as it was.
_TELLING = re.compile(
    r"not exact: |config: .* at the first start|WARNING: |begins anew|damaged|by the code, "
)
_END = 8


class Points(Dataset):
    """Noisy points; `own` draws the noise from a generator that nothing saves."""

    def __init__(self, size: int = 40, *, own: bool = False) -> None:
        self.points = np.random.RandomState(7).randn(size, 4).astype("float32")
        self.noise: Any = np.random.RandomState(1) if own else np.random

    def __getitem__(self, index: int) -> np.ndarray:
        return self.points[index] + self.noise.randn(4).astype("float32") / 10

    def __len__(self) -> int:
        return len(self.points)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[np.ndarray]:
        yield from (np.full(4, i / 40, "float32") + np.float32(np.random.rand()) for i in range(40))


class OwnOrder(BatchSampler):
    """Draws its order from a generator of its own, with or without telling its state."""

    def __init__(self, draws: int = 0) -> None:
        super().__init__(Points(), batch_size=4)
        self.generator = np.random.RandomState(3)
        self.generator.randn(draws)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.generator.permutation(40).reshape([-1, 4]).tolist())


class Remembering(OwnOrder):
    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Tally:
    """An object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def net(width: int = 8, *extra: Any, norm: Any = nn.BatchNorm1D) -> Any:
    parts = [nn.Linear(4, width), norm(width), nn.Dropout(0.2), nn.Linear(width, 2)]
    return nn.Sequential(*parts, *extra)


def dropping(rate: float) -> Any:
    model = net()
    model[2].p = rate
    return model


def adam(model: Any, rate: Any = None, kind: Any = Adam, **options: Any) -> Any:
    rate = lr.CosineAnnealingDecay(0.01, T_max=30) if rate is None else rate
    return kind(rate, parameters=model.parameters(), **options)


def shuffled(dataset: Any = None, **options: Any) -> Any:
    dataset = Points() if dataset is None else dataset
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})


def noisy() -> Any:
    return shuffled(Points(own=True))


class Base(ExperimentBase):
    """What a case changes: how its parts are made, and what it does beside."""

    parts: dict[str, Callable[..., Any]] = {}  # noqa: RUF012

    def setup_dataloader(self) -> None:
        self.train_loader = self.parts.get("loader", shuffled)()
        self.valid_loader = self.parts.get("valid_loader", lambda: DataLoader(Points(10)))()

    def setup_model(self) -> None:
        self.model = self.parts.get("model", net)()
        self.optimizer = self.parts.get("optimizer", adam)(self.model)
        self.parts.get("more", lambda self: None)(self)

    def train_batch(self) -> None:
        loss = self.model(self.read_batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        if isinstance(self.optimizer._learning_rate, lr.LRScheduler):
            self.optimizer._learning_rate.step()
        self.log(loss=loss)
        self.parts.get("each", lambda self: None)(self)

    def valid(self) -> dict[str, float]:
        values = [float(self.model(points).mean()) for points in self.valid_batches()]
        return self.average({"mean": float(np.mean(values))}, weight=len(values))

    def on_save_checkpoint(self) -> dict[str, Any] | None:
        return self.parts.get("own", lambda: None)()


class Listening(Base):
    @on("on_train_batch_end", every=3)
    def count(self) -> None:
        self.logger.info("listened")


@dataclass
class Start:
    """One start: its parts, its config, and what happens to the files before it."""

    parts: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    base: type[Base] = Base
    files: Callable[[Path], object] = lambda run: None
    args: dict[str, Any] = field(default_factory=dict)


def with_(**parts: Any) -> Start:
    return Start(parts)


def config(**training: Any) -> Start:
    return Start(training=training)


def files(change: Callable[[Path], object]) -> Start:
    return Start(files=change)


def thawed(self: Any) -> None:
    """Freezes the first layer at setup; a later iteration thaws it."""
    self.model[0].weight.stop_gradient = True


def thaw(self: Any) -> None:
    if self.iteration == 3:
        self.model[0].weight.stop_gradient = False
        self.model[2].eval()


def named(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda self: setattr(self, name, value())


def registered(self: Any) -> None:
    self.best_ever = 1.5
    self.register_stateful("best_ever")


def newest(run: Path, name: str) -> Path:
    return max((run / "checkpoints").glob("step-*")) / name


def spoil(name: str) -> Callable[[Path], object]:
    return lambda run: newest(run, name).write_bytes(b"spoiled")


def spoil_all(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        (path / "state.json").write_bytes(b"spoiled")


def lose(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).unlink()


def grow(self: Any) -> None:
    if self.iteration == 3:
        self.model.add_sublayer("adapter", nn.Linear(2, 2))


SAME = Start()
step_decay, warm = lr.StepDecay, lr.LinearWarmup
# What it is called: the first start, the second one, and what must come of it.
CASES: dict[str, tuple[Start, Start, str]] = {
    "nothing": (SAME, SAME, EXACT),
    # the model
    "a wider layer": (SAME, with_(model=lambda: net(9)), REFUSED),
    "one more layer": (SAME, with_(model=lambda: net(8, nn.Linear(2, 2))), REFUSED),
    "one layer less": (with_(model=lambda: net(8, nn.Linear(2, 2))), SAME, REFUSED),
    "another type": (SAME, with_(model=lambda: net().to(dtype="float64")), REFUSED),
    "layer norm for batch norm": (SAME, with_(model=lambda: net(norm=nn.LayerNorm)), REFUSED),
    "a second model": (SAME, with_(more=named("judge", net)), REFUSED),
    "a second model less": (with_(more=named("judge", net)), SAME, REFUSED),
    "thawed by a listener": (with_(more=thawed, each=thaw), with_(more=thawed, each=thaw), EXACT),
    "a layer that grows": (with_(each=grow), with_(each=grow), REFUSED),
    "another activation": (
        with_(model=lambda: net(8, nn.ReLU())),
        with_(model=lambda: net(8, nn.GELU())),
        TOLD,
    ),
    "another dropout": (SAME, with_(model=lambda: dropping(0.5)), TOLD),
    "another epsilon": (
        SAME,
        with_(model=lambda: net(norm=lambda n: nn.BatchNorm1D(n, epsilon=0.1))),
        TOLD,
    ),
    # the optimizer
    "another optimizer": (SAME, with_(optimizer=lambda m: adam(m, kind=SGD)), REFUSED),
    "AdamW for Adam": (SAME, with_(optimizer=lambda m: adam(m, kind=AdamW)), REFUSED),
    "another beta": (SAME, with_(optimizer=lambda m: adam(m, beta1=0.5)), TOLD),
    "another decay": (SAME, with_(optimizer=lambda m: adam(m, weight_decay=0.1)), TOLD),
    "clipping": (
        SAME,
        with_(optimizer=lambda m: adam(m, grad_clip=nn.ClipGradByGlobalNorm(0.01))),
        TOLD,
    ),
    "fewer parameters": (SAME, with_(optimizer=lambda m: adam(m[3])), REFUSED),
    "a rate that is a number": (
        with_(optimizer=lambda m: adam(m, 0.01)),
        with_(optimizer=lambda m: adam(m, 0.01)),
        EXACT,
    ),
    "another optimizer's name": (SAME, with_(more=lambda s: vars(s).pop("optimizer")), REFUSED),
    # the schedule
    "another schedule": (
        with_(optimizer=lambda m: adam(m, step_decay(0.01, 3))),
        with_(optimizer=lambda m: adam(m, lr.ExponentialDecay(0.01, 0.9))),
        REFUSED,
    ),
    "another T_max": (
        SAME,
        with_(optimizer=lambda m: adam(m, lr.CosineAnnealingDecay(0.01, T_max=60))),
        TOLD,
    ),
    "another rate to begin from": (
        SAME,
        with_(optimizer=lambda m: adam(m, lr.CosineAnnealingDecay(0.1, T_max=30))),
        TOLD,
    ),
    "another kind of warm-up": (
        with_(optimizer=lambda m: adam(m, warm(step_decay(0.01, 3), 2, 0.0, 0.01))),
        with_(optimizer=lambda m: adam(m, warm(lr.NoamDecay(64, 10), 2, 0.0, 0.01))),
        REFUSED,
    ),
    "a longer warm-up": (
        with_(optimizer=lambda m: adam(m, warm(step_decay(0.01, 3), 2, 0.0, 0.01))),
        with_(optimizer=lambda m: adam(m, warm(step_decay(0.01, 3), 5, 0.0, 0.01))),
        TOLD,
    ),
    "a number for a schedule": (SAME, with_(optimizer=lambda m: adam(m, 0.01)), REFUSED),
    "a schedule for a number": (with_(optimizer=lambda m: adam(m, 0.01)), SAME, REFUSED),
    # the data
    "another collate_fn": (
        SAME,
        with_(loader=lambda: shuffled(collate_fn=lambda b: np.stack(b) * 2)),
        TOLD,
    ),
    "more data": (SAME, with_(loader=lambda: shuffled(Points(60))), REFUSED),
    "less data": (SAME, with_(loader=lambda: shuffled(Points(30))), REFUSED),
    "larger batches": (SAME, with_(loader=lambda: shuffled(batch_size=8)), TOLD),
    "not shuffled any more": (SAME, with_(loader=lambda: shuffled(shuffle=False)), REFUSED),
    "workers": (SAME, with_(loader=lambda: shuffled(num_workers=2)), EXACT),
    "noise of its own": (
        with_(loader=noisy),
        with_(loader=noisy),
        EXACT,
    ),
    "a stream": (
        with_(loader=lambda: shuffled(Stream(), shuffle=False)),
        with_(loader=lambda: shuffled(Stream(), shuffle=False)),
        TOLD,
    ),
    "a stream for a data set": (
        SAME,
        with_(loader=lambda: shuffled(Stream(), shuffle=False)),
        REFUSED,
    ),
    "an order of its own": (
        with_(loader=lambda: DataLoader(Points(), batch_sampler=OwnOrder())),
        with_(loader=lambda: DataLoader(Points(), batch_sampler=OwnOrder(draws=3))),
        EXACT,
    ),
    "an order that remembers": (
        with_(loader=lambda: DataLoader(Points(), batch_sampler=Remembering())),
        with_(loader=lambda: DataLoader(Points(), batch_sampler=Remembering(draws=3))),
        EXACT,
    ),
    "a list of batches": (
        with_(loader=lambda: [paddle.full([4, 4], i / 8) for i in range(8)]),
        with_(loader=lambda: [paddle.full([4, 4], i / 8) for i in range(8)]),
        EXACT,
    ),
    "other validation data": (SAME, with_(valid_loader=lambda: DataLoader(Points(8))), EXACT),
    # the config
    "another seed": (SAME, config(seed=1), REFUSED),
    "accumulation": (SAME, config(accumulation_steps=2), REFUSED),
    "other intervals": (SAME, config(valid_interval=2, save_interval=3), TOLD),
    # what is state
    "an object with a state": (SAME, with_(more=named("tally", Tally)), REFUSED),
    "an object with a state less": (with_(more=named("tally", Tally)), SAME, REFUSED),
    "a generator": (SAME, with_(more=named("generator", np.random.RandomState)), EXACT),
    "a registered value": (SAME, with_(more=registered), REFUSED),
    "a registered value less": (with_(more=registered), SAME, EXACT),
    "own states": (with_(own=lambda: {"a": 1}), with_(own=lambda: {"b": 2}), EXACT),
    "a listener": (SAME, Start(base=Listening), EXACT),
    "a listener less": (Start(base=Listening), SAME, EXACT),
    "excluded": (
        with_(more=named("judge", net)),
        with_(more=lambda s: (named("judge", net)(s), s.exclude_from_state("judge"))),
        REFUSED,
    ),
    # the files
    "the newest checkpoint is damaged": (SAME, files(spoil("model.safetensors")), TOLD),
    "its manifest is lost": (SAME, files(lambda run: newest(run, "manifest.json").unlink()), TOLD),
    "all checkpoints are damaged": (SAME, files(spoil_all), REFUSED),
    "no metrics": (SAME, files(lose("metrics.jsonl")), TOLD),
    "no curves": (SAME, files(lose("vdlrecords.run.log")), TOLD),
    "no ledger": (SAME, files(lose("ledger.jsonl")), EXACT),
    "no config": (SAME, files(lose("config.yaml")), EXACT),
    "a torn line": (SAME, files(lambda run: (run / "metrics.jsonl").open("ab").write(b"{")), EXACT),
}


def train(start: Start, run: Path, iterations: int) -> Any:
    start.files(run)
    # As if the parts stood in the experiment's own file.
    module = types.ModuleType("case")
    module.__file__ = str(run.with_name("train.py"))
    code = {name: id(part) for name, part in start.parts.items()}
    Path(module.__file__).write_text(f"{start.base.__name__} {code}")
    os.utime(module.__file__, (0, 0))  # else it would be told that it is younger than the process
    sys.modules["case"] = module
    cls = type("Case", (start.base,), {"parts": start.parts, "__module__": "case"})
    training = {"save_interval": 2, "valid_interval": 4, **start.training}
    exp = make(cls, run, start.args, max_iteration=iterations, **training)
    exp.setup()
    exp.run()
    return exp


def bits(exp: Any) -> list[bytes]:
    return [parameter.numpy().tobytes() for parameter in exp.model.parameters()]


def outcome(first: Start, second: Start, folder: Path) -> tuple[str, str]:
    """What came of it, and the words that the run has for it."""
    run = folder / "run"
    try:
        straight = train(Start(first.parts, first.training, first.base), folder / "straight", _END)
        train(first, run, 4)
        before = (run / "worker_0.log").stat().st_size
        exp = train(second, run, _END)
    except Exception as error:  # whatever it is, it is loud
        return REFUSED, f"{type(error).__name__}: {error}"
    log = (run / "worker_0.log").read_bytes()[before:].decode()
    told = [line for line in log.splitlines() if _TELLING.search(line)]
    told = [line for line in told if "training.max_iteration" not in line]  # every case raises it
    of_code = [line for line in told if "train.py: changed since" in line]
    if special := [line for line in told if line not in of_code]:
        return TOLD, special[0]
    if len(bits(exp)) == len(bits(straight)) and bits(exp) == bits(straight):
        return EXACT, ""
    return (TOLD, of_code[0]) if of_code else ("SILENT", "")


def main() -> int:
    """Goes through the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this word")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong = 0
    for name, (first, second, expected) in CASES.items():
        if args.only not in name:
            continue
        folder = Path(tempfile.mkdtemp(prefix="expbase-matrix-"))
        devnull, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(2)
        try:
            os.dup2(devnull, 2)
            found, words = outcome(first, second, folder)
        finally:
            os.dup2(stderr, 2)
            os.close(devnull)
            os.close(stderr)
            shutil.rmtree(folder)
        counts[found] += 1
        wrong += found != expected
        mark = "" if found == expected else f"  FAILED: expected {expected}"
        print(f"{found:8} {name}{mark}  {words.splitlines()[0][:90] if words else ''}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"; {wrong} wrong")
    return int(wrong > 0 or not counts)


if __name__ == "__main__":
    sys.exit(main())
