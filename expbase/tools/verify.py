"""Proves that your own experiment survives being killed.

It runs your script straight through, then again with kill -9 at random moments, inside a save and
inside a validation too, and compares every tensor, counter, random state and logged number. The
script must take expbase's options (`main(Experiment)`, or `default_argument_parser()`). What
stands after -- goes to it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from expbase.cli import Paragraphs
from expbase.logs import METRICS, json_lines
from expbase.processes import python
from expbase.state import checkpoint
from expbase.state.arrays import Array, parse
from expbase.state.checkpointer import STATE_FILE
from expbase.tools.process import ended_by_signals, kill

_POLL_SECONDS = 0.0005
_KINDS = ("at a random moment", "inside a save", "inside a validation")
# Fields of a note, with the cause that a first difference there points at.
_CAUSES = {
    "before": "state that does not come back: {names} differ before the update",
    "indices": "data order: other samples. A sampler with a generator of its own? Give it "
    "state_dict and set_state_dict, or draw from np.random",
    "batches": "augmentation: the data set made something else of the same samples. A generator "
    "of its own? Draw from random, np.random or paddle inside __getitem__",
    "random": "random states: something drew from them that does not draw after a resume",
    "rates": "schedule: another learning rate. Put the schedule on self, or step it from "
    "self.iteration",
    "after": "dropout, or another draw from a generator that is not on self; or a value on self "
    "that register_stateful does not name: {names} differ after the update",
}


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "verify",
        help="prove that an experiment continues to the same bits after kill -9",
        description=__doc__,
        formatter_class=Paragraphs,
        usage="%(prog)s [options] script --output DIR [-- WORDS]",
        epilog="exit codes: 0 identical, 1 not, or an error, 130 Ctrl-C, 143 SIGTERM",
    )
    add = parser.add_argument
    add("script", type=Path, help="your train.py")
    add("--config", metavar="FILE", help="its config file")
    add("--output", type=Path, required=True, metavar="DIR", help="a new directory for both runs")
    add(
        "--iterations",
        type=int,
        default=40,
        metavar="N",
        help="of each run, training.max_iteration for it (default: 40)",
    )
    add("--kills", type=int, default=6, metavar="K", help="how often to kill (default: 6)")
    add("--nprocs", type=int, default=1, metavar="P", help="processes of each run (default: 1)")
    add("--device", default="cpu", metavar="NAME", help="default: cpu")
    add("--seed", type=int, default=0, metavar="N", help="of the moments (default: 0)")
    add("--tolerance", type=float, default=0.0, metavar="T", help="absolute; 0: the same bits")
    parser.set_defaults(run=run, user_errors=(OSError, ValueError, RuntimeError))


def run(args: argparse.Namespace) -> int:
    """Runs the tool; gives its exit code.

    Raises:
        ValueError: The arguments cannot be used.
        RuntimeError: The script fails by itself.
    """
    _check(args)
    straight, killed = Side(args, "straight"), Side(args, "killed")
    with ended_by_signals():
        print(f"straight through: {args.iterations} iterations", flush=True)
        straight.finish()
        print(f"again, with {args.kills} times kill -9", flush=True)
        counts = killed.finish_with_kills(random.Random(args.seed), args.kills)
    for kind, count in counts.items():
        print(f"  killed {count} times {kind}")
    difference = first_difference(straight, killed, args.tolerance)
    if difference:
        print(f"NOT IDENTICAL: {difference}")
        return 1
    if straight.values().get("values.counters.epoch", 2) < 2:
        print("note: within one pass over the data; more --iterations would prove more")
    compared = f"{len(straight.tensors())} tensors, {len(straight.logged())} logged numbers"
    print(f"identical: {args.iterations} iterations, {sum(counts.values())} kills, {compared}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments, and makes the output directory."""
    if not args.script.is_file():
        wrong = "is a directory" if args.script.is_dir() else "no such file"
        raise ValueError(f"{args.script}: {wrong}; expected a training script.")
    for name, least in (("iterations", 10), ("kills", 1), ("nprocs", 1), ("tolerance", 0)):
        value = getattr(args, name)
        if not value >= least:  # nor nan
            raise ValueError(f"--{name}: {value} given; expected --{name} of {least} or more.")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        is_empty = not any(args.output.iterdir())
    except OSError as error:
        raise ValueError(
            f"--output: {args.output} cannot be a directory: {error.strerror}; expected a new one."
        ) from error
    if not is_empty:
        raise ValueError(f"--output: {args.output} is not empty; remove it, or name a new one.")


@dataclass
class Side:
    """One of the two runs that are compared."""

    args: argparse.Namespace
    name: str
    process: Any = field(default=None, init=False)

    @property
    def directory(self) -> Path:
        """Its output directory."""
        return Path(self.args.output).absolute() / self.name

    @property
    def save_interval(self) -> int:
        """Small enough for many saves."""
        return max(int(self.args.iterations) // 8, 1)

    @property
    def valid_interval(self) -> int:
        """Small enough for some validations, and not always with a save."""
        return max(int(self.args.iterations) // 5, 1)

    def command(self) -> list[str]:
        """The words that start it."""
        args, count = self.args, self.args.iterations
        words = ["--config", args.config] if args.config else []
        words += ["--output", str(self.directory), "--device", args.device, *args.words]
        words += [
            f"training.max_iteration={count}",
            "training.max_epoch=0",
            "training.log_interval=1",
            f"training.save_interval={self.save_interval}",
            f"training.valid_interval={self.valid_interval}",
            "training.keep_last=0",
        ]
        tracer = [str(Path(__file__).with_name("fingerprints.py")), f"{self.directory}.notes"]
        started = python(args.nprocs, Path(f"{self.directory}.launch_log"))
        return [*started, *tracer, str(self.args.script.absolute()), *words]

    def start(self) -> None:
        """Starts it, in a session of its own."""
        with open(f"{self.directory}.stderr", "ab") as stderr:
            self.process = subprocess.Popen(
                self.command(), stdout=stderr, stderr=stderr, start_new_session=True
            )

    def finish(self) -> None:
        """Runs it to its end.

        Raises:
            RuntimeError: It failed.
        """
        self.start()
        try:
            code = self.process.wait()
        finally:
            self.kill()
        if code:
            text = Path(f"{self.directory}.stderr").read_text(errors="replace")
            tail = "\n".join(text.splitlines()[-15:])
            raise RuntimeError(f"the run {self.name!r} ended with code {code}:\n{tail}")
        if not checkpoint.listed(self.directory / checkpoint.FOLDER):
            raise RuntimeError(
                f"{self.args.script}: made no checkpoint in {self.directory}; expected a script "
                "that ends in main(Experiment), and trains with the options that it is given."
            )

    def finish_with_kills(self, source: random.Random, kills: int) -> dict[str, int]:
        """Kills it at random moments, continues it each time, and at last runs it to its end.

        Returns:
            How often it was killed, by the kind of moment.

        Raises:
            RuntimeError: It ended before it was killed as often as it should be.
        """
        counts = dict.fromkeys(_KINDS, 0)
        # After the first checkpoint: a run that begins anew proves nothing.
        first, last = self.save_interval + 1, self.args.iterations - self.valid_interval
        moments = sorted(source.choices(range(first, last), k=kills))
        for number, moment in enumerate(moments):
            kind = _KINDS[number % len(_KINDS)]
            self.start()
            delay = source.uniform(0, 0.02) if kind == _KINDS[0] else 0.0
            try:
                if self._wait_for(kind, moment):
                    time.sleep(delay)
                    counts[kind] += self.process.poll() is None
            finally:
                self.kill()
        if sum(counts.values()) < kills:
            raise RuntimeError(
                f"killed {sum(counts.values())} times instead of {kills}: the runs ended before. "
                f"Look into {self.directory}.stderr, or give more --iterations."
            )
        self.finish()
        return counts

    def _wait_for(self, kind: str, moment: int) -> bool:
        """Waits until the run has passed an iteration and is in such a place; false if it ended."""
        lines = _Tail(self.directory / METRICS)
        trained = validated = 0
        while self.process.poll() is None:
            for line in lines.new():
                if any(name.startswith("speed/") for name in line):
                    trained = line["iteration"]
                if any(name.startswith("valid/") for name in line):
                    validated = line["iteration"]
            if trained >= moment and self._is_in(kind, trained, validated):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _is_in(self, kind: str, trained: int, validated: int) -> bool:
        if kind == "inside a save":
            return any(self.directory.glob("checkpoints/.writing-*"))
        if kind == "inside a validation":
            return trained % self.valid_interval == 0 and validated < trained
        return True

    def kill(self) -> None:
        """Kills whatever of it still runs, with all its processes."""
        kill(self.process)

    # What it left

    def checkpoint(self) -> Path:
        """Its last checkpoint."""
        return checkpoint.find(self.directory)

    def tensors(self) -> dict[str, Array]:
        """All tensors of the last checkpoint, by file and name."""
        contents = checkpoint.read(self.checkpoint())
        return {
            f"{file}: {name}": array
            for file, data in contents.items()
            if file != STATE_FILE
            for name, array in parse(data).items()
        }

    def values(self) -> dict[str, Any]:
        """All values of the last checkpoint's state.json, by their place in it."""
        text = (self.checkpoint() / STATE_FILE).read_text()
        return dict(_flat(json.loads(text), ""))

    def logged(self) -> dict[tuple[int, str], Any]:
        """All logged numbers but times and speeds, by iteration and name."""
        lines = _Tail(self.directory / METRICS).new()
        return {
            (line["iteration"], name): value
            for line in lines
            for name, value in line.items()
            if name not in ("iteration", "time") and not name.startswith("speed/")
        }

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """What the tracer wrote for a rank, in the order in which it happened."""
        return list(_Tail(Path(f"{self.directory}.notes.rank_{rank}.jsonl")).new())


def first_difference(straight: Side, killed: Side, tolerance: float) -> str:
    """What differs first, at which iteration, and the likely cause; empty if nothing does."""
    noted = _difference_in_notes(straight, killed) if not tolerance else ""
    one, other = straight.logged(), killed.logged()
    for key in sorted({*one, *other}, key=str):
        if not _close(one.get(key), other.get(key), tolerance):
            iteration, name = key
            return noted or (
                f"{name} at iteration {iteration}: {one.get(key)} straight through, "
                f"{other.get(key)} after the kills."
            )
    left, right = straight.tensors(), killed.tensors()
    for name in sorted({*left, *right}):
        if name not in left or name not in right:
            return noted or f"{name} is only in one of the two."
        if not _same_array(left[name], right[name], tolerance):
            return noted or f"{name} differs at the end."
    if tolerance:
        return ""
    before, after = straight.values(), killed.values()
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            return noted or (
                f"{name} differs at the end: {before.get(name)!r} straight through, "
                f"{after.get(name)!r} after the kills."
            )
    return noted


def _difference_in_notes(straight: Side, killed: Side) -> str:
    found: list[tuple[int, int, str]] = []
    for rank in range(straight.args.nprocs):
        expected = {note["iteration"]: note for note in straight.notes(rank)}
        for note in killed.notes(rank):
            reference = expected.get(note["iteration"], {})
            for order, (name, cause) in enumerate(_CAUSES.items()):
                if note.get(name) != reference.get(name):
                    text = cause.format(names=_differing(note[name], reference.get(name)))
                    found.append((note["iteration"], order, text))
                    break
    if not found:
        return ""
    iteration, _, text = min(found)
    return f"first at iteration {iteration}. Likely cause: {text}."


def _differing(one: Any, other: Any) -> str:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    return ", ".join(name for name in {**one, **other} if one.get(name) != other.get(name))


def _close(one: Any, other: Any, tolerance: float) -> bool:
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return one == other or (numbers and abs(one - other) <= tolerance)


def _same_array(one: Array, other: Array, tolerance: float) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.data.tobytes() == other.data.tobytes():
        return True
    if not tolerance:
        return False
    left, right = (array.tensor().astype("float64").numpy() for array in (one, other))
    return bool(np.allclose(left, right, rtol=0, atol=tolerance))


def _flat(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = enumerate(value)
    else:
        yield place, value
    for key, item in items:
        yield from _flat(item, f"{place}.{key}" if place else str(key))


class _Tail:
    """The JSON lines of a file that is being written; torn ones are passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines since the last call."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._position:  # cut back by a resume
            self._position = 0
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        yield from json_lines(complete)
