"""Proves that your own experiment survives being killed.

It runs your script straight through, then again with kill -9 at random moments, inside a save and
inside a validation too, and compares every tensor, counter, random state and logged number. The
script must take expbase's options (`main(Experiment)`, or `default_argument_parser()`); the likely
cause of a difference is named only if it calls `main`. The words after -- are for the script.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs, count
from expbase.meter import METRICS, json_lines
from expbase.processes import python
from expbase.state import checkpoint
from expbase.state.arrays import parse
from expbase.state.checkpointer import STATE_FILE
from expbase.tools.fingerprints import notes_path
from expbase.tools.process import ended_by_signals, kill

_LEAST = 10  # iterations
_POLL_SECONDS = 0.0005
_TAIL_BYTES = 1 << 14  # of metrics.jsonl: what tells where the run is
_KINDS = ("inside a save", "inside a validation", "at a random moment")
# Fields of a note, with the cause that a first difference there points at.
_CAUSES = {
    "before": "state that is not restored: {names} differ before the update",
    "indices": "data order: other samples. A sampler with a generator of its own? Give it "
    "state_dict and set_state_dict, or draw from np.random",
    "batches": "augmentation: the data set made something else of the same samples. A generator "
    "of its own? Draw from random, np.random or paddle inside __getitem__",
    "random": "random states: something drew from them that does not draw after a resume",
    "rates": "schedule: another learning rate. Make the schedule an attribute of the experiment, "
    "or step it from self.iteration",
    "after": "dropout, or another draw from a generator that is not an attribute of the "
    "experiment; or a value on self that register_stateful does not name: {names} differ after "
    "the update",
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
    add("--iterations", type=int, default=40, metavar="N", help="of each run (default: 40)")
    add("--kills", type=count, default=6, metavar="K", help="how often to kill (default: 6)")
    add("--nprocs", type=count, default=1, metavar="P", help="processes of each run (default: 1)")
    add("--device", default="cpu", metavar="NAME", help="default: cpu")
    add("--seed", type=int, default=0, metavar="N", help="of the moments (default: 0)")
    parser.set_defaults(run=run, user_errors=(OSError, ValueError, RuntimeError))


def run(args: argparse.Namespace) -> int:
    """Runs the tool; returns its exit code."""
    _check(args)
    straight, killed = Side(args, "straight"), Side(args, "killed")
    with ended_by_signals():
        print(f"straight through: {args.iterations} iterations", flush=True)
        straight.finish()
        if not straight.notes(0):
            print("note: the script does not call main(), so causes of differences are not noted")
        print(f"again, with {args.kills} times kill -9", flush=True)
        counts = killed.finish_with_kills(random.Random(args.seed), args.kills)
    for kind, times in counts.items():
        print(f"  killed {times} times {kind}")
    if difference := first_difference(straight, killed):
        print(f"NOT IDENTICAL: {difference}")
        return 1
    if straight.values()["counters"]["epoch"] < 2:
        print("note: within one epoch; more --iterations would prove more")
    compared = f"{len(straight.tensors())} tensors, {len(straight.logged())} logged numbers"
    print(f"identical: {args.iterations} iterations, {args.kills} kills, {compared}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments, and makes the output directory."""
    if not args.script.is_file():
        raise ValueError(f"{args.script}: no such file; expected a training script.")
    if args.iterations < _LEAST:
        raise ValueError(
            f"--iterations: {args.iterations} given; expected {_LEAST} or more, so that there is "
            "time for kills between the first checkpoint and the end."
        )
    args.output.mkdir(parents=True, exist_ok=True)
    if any(args.output.iterdir()):
        raise ValueError(f"--output: {args.output} is not empty; remove it, or name a new one.")


# --- the two runs ----------------------------------------------------------------------------


class Side:
    """One of the two runs that are compared.

    Args:
        args: Of the tool.
        name: "straight" or "killed".
    """

    process: subprocess.Popen[bytes]  # that runs, or ran last

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.directory = Path(args.output).absolute() / name
        self._args = args
        self._stderr = Path(f"{self.directory}.stderr")
        # Small enough for many saves and some validations, which do not always go with a save.
        self._save_interval = max(args.iterations // 8, 1)
        self._valid_interval = max(args.iterations // 5, 1)

    def command(self) -> list[str]:
        """The words that start it."""
        args = self._args
        words = ["--config", args.config] if args.config else []
        words += ["--output", str(self.directory), "--device", args.device, *args.words]
        training = {"max_iteration": args.iterations, "max_epoch": 0, "log_interval": 1}
        training |= {"save_interval": self._save_interval, "keep_last": 0}
        training |= {"valid_interval": self._valid_interval}
        words += [f"training.{name}={value}" for name, value in training.items()]
        started = python(args.nprocs, Path(f"{self.directory}.launch_log"))
        tracer = str(Path(__file__).with_name("fingerprints.py"))
        return [*started, tracer, str(args.script.absolute()), *words]

    def start(self) -> None:
        """Starts it, in a session of its own: a Ctrl-C is for the tool alone."""
        with self._stderr.open("ab") as stderr:
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
            kill(self.process)
        if code:
            tail = "\n".join(self._stderr.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"the run {self.directory.name!r} ended with code {code}:\n{tail}")
        if not checkpoint.listed(self.directory / checkpoint.FOLDER):
            raise RuntimeError(
                f"{self._args.script}: made no checkpoint in {self.directory}; expected a script "
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
        first, last = self._save_interval + 1, self._args.iterations - self._valid_interval
        moments = sorted(source.choices(range(first, last), k=kills))
        for kind, moment in zip(itertools.cycle(_KINDS), moments, strict=False):
            self.start()
            try:
                if self._wait_for(kind, moment):
                    # Anywhere within an iteration, not only just after a line was written.
                    time.sleep(source.uniform(0, 0.02) if kind == _KINDS[-1] else 0.0)
                    counts[kind] += self.process.poll() is None
            finally:
                kill(self.process)
        if sum(counts.values()) < kills:
            raise RuntimeError(
                f"killed {sum(counts.values())} times instead of {kills}: the runs ended before. "
                f"Look into {self._stderr}, or give more --iterations."
            )
        self.finish()
        return counts

    def _wait_for(self, kind: str, moment: int) -> bool:
        """Waits until the run has passed an iteration and is in such a place; false if it ended."""
        while self.process.poll() is None:
            last = dict.fromkeys(("speed/", "valid/"), 0)  # iterations: trained, and validated
            for line in _lines(self.directory / METRICS, _TAIL_BYTES):
                for prefix in last:
                    if any(name.startswith(prefix) for name in line):
                        last[prefix] = line["iteration"]
            trained, validated = last.values()
            if trained >= moment and self._is_in(kind, trained, validated):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _is_in(self, kind: str, trained: int, validated: int) -> bool:
        if kind == "inside a save":
            return any(self.directory.glob("checkpoints/.writing-*"))
        if kind == "inside a validation":
            return trained % self._valid_interval == 0 and validated < trained
        return True

    def tensors(self) -> dict[str, Any]:
        """The type, shape and checksum of each tensor of the last checkpoint, by file and name."""
        contents = checkpoint.read(checkpoint.find(self.directory))
        return {
            f"{file}: {name}": f"{array}, sha256 {hashlib.sha256(array.data.tobytes()).hexdigest()}"
            for file, data in contents.items()
            if file != STATE_FILE
            for name, array in parse(data).items()
        }

    def values(self) -> dict[str, Any]:
        """All values of the last checkpoint's state.json, by the name of their section."""
        state = json.loads((checkpoint.find(self.directory) / STATE_FILE).read_bytes())
        return {**state, **state.pop("values")}

    def logged(self) -> dict[str, Any]:
        """All logged numbers but times and speeds, by name and iteration, in their order."""
        return {
            f"{name} at iteration {line['iteration']}": value
            for line in _lines(self.directory / METRICS)
            for name, value in line.items()
            if name not in ("iteration", "time") and not name.startswith("speed/")
        }

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """What `fingerprints` wrote for a rank, in the order in which it happened."""
        return list(_lines(notes_path(self.directory, rank)))


def _lines(path: Path, last_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file that is being written, or of its last bytes, if it is there."""
    if path.exists():
        yield from json_lines(path.read_bytes()[-last_bytes:])


# --- the comparison --------------------------------------------------------------------------


def first_difference(straight: Side, killed: Side) -> str:
    """What differs first, at which iteration, and the likely cause; empty if nothing does."""
    if noted := _difference_in_notes(straight, killed):
        return noted
    for one, other in (
        (straight.logged(), killed.logged()),
        (straight.tensors(), killed.tensors()),
        (straight.values(), killed.values()),
    ):
        for name in {**one, **other}:
            left, right = one.get(name), other.get(name)
            if left != right:
                return f"{name} differs: {left} straight through, {right} after the kills."
    return ""


def _difference_in_notes(straight: Side, killed: Side) -> str:
    """The first fingerprint of an update that differs, over all ranks; empty if none does."""
    found: list[tuple[int, int, str]] = []
    for rank in itertools.count():
        if not (notes := straight.notes(rank)):
            break  # there are no more ranks
        expected = {note["iteration"]: note for note in notes}
        for note in killed.notes(rank):
            reference = expected.get(note["iteration"], {})
            for order, (name, cause) in enumerate(_CAUSES.items()):
                if note[name] != reference.get(name):
                    text = cause.format(names=_differing(note[name], reference.get(name)))
                    found.append((note["iteration"], order, text))
    if not found:
        return ""
    iteration, _, text = min(found)
    return f"first at iteration {iteration}. Likely cause: {text}."


def _differing(one: Any, other: Any) -> str:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    return ", ".join(name for name in {**one, **other} if one.get(name) != other.get(name))
