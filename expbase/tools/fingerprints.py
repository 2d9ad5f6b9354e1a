"""Runs a user's script for `verify`: short, killed at a given moment, and with notes.

The notes are fingerprints of what went into each update: the first one that differs between two
runs tells what the cause is likely to be.

    python fingerprints.py train.py --output runs/a …      # writes runs/a.notes.rank_0.jsonl

What it is to do is in the environment (PLAN), as JSON: `training` has config values; `kill` says
how the run is killed, "" for not at all, `at` from which iteration on, and `delay` how many seconds
later.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase.config import fill
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.front import put_in_front
from expbase.state import checkpoint
from expbase.state.arrays import LABELS, Array
from expbase.tools.process import run_program

PLAN = "EXPBASE_VERIFY"
KINDS = ("inside a save", "inside a validation", "at a random moment")  # of kills
_AT_THE_END = "at the end"  # what was too fast for the moment that was meant


@dataclass
class Work:
    """What there is to do; an object, since plain values on an experiment are its state."""

    kill: str  # the one that is still to come
    at: int
    delay: float
    note: dict[str, Any] = field(default_factory=dict)  # of the update under way


class Verified(ExperimentBase):
    """Shortens a run, ends it as by kill -9, and writes a JSON line for each update.

    `verify._CAUSES` says what a difference in a line tells.
    """

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        plan = json.loads(os.environ[PLAN])
        config = fill({**fill(type(self).default_config()), **config})
        config.training.update(plan["training"])
        if super().valid.__func__ is ExperimentBase.valid:  # type: ignore[attr-defined]
            config.training.valid_interval = 0
        super().__init__(config, argparse.Namespace(**{**vars(args), "device": "cpu"}))
        # Rank 0 is killed here, and the tool ends the others.
        kill = plan["kill"] if self.rank == 0 else ""
        self.verifying = Work(kill, plan["at"], plan["delay"])

    def _is_time(self, kind: str) -> bool:
        return self.verifying.kill == kind and self.iteration >= self.verifying.at

    def _kill_by(self, function: Callable[[], None]) -> None:
        self.verifying.kill = _AT_THE_END
        threading.Thread(target=function, daemon=True).start()

    def _die_later(self) -> None:
        time.sleep(self.verifying.delay)
        self._die()

    def _die(self) -> None:
        killed_path(self.output_dir).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    @on("on_train_batch_begin")
    def note_batch(self, batch: Any, indices: Sequence[int] | None) -> None:
        """Notes a batch as train_batch will see it: the experiment's own listeners came before."""
        arrays: dict[str, Array] = {}
        text = json.dumps(described(batch, "", arrays))
        note = self.verifying.note
        note.setdefault("indices", []).append(indices)
        note.setdefault("batches", []).append(_checksum(arrays, text))

    def train_batch(self) -> None:
        """Makes an update and writes its line."""
        if self._is_time("at a random moment"):
            self._kill_by(self._die_later)
        note: dict[str, Any] = {"iteration": self.iteration, "indices": [], "batches": []}
        self.verifying.note = note
        before = self._sums()
        rates = self.learning_rates()
        super().train_batch()
        note |= {"before": before, "after": self._sums(), "rates": [rates, self.learning_rates()]}
        with notes_path(self.output_dir, self.rank).open("a") as file:
            # On a line of its own: a kill may have torn the one before.
            file.write(f"\n{json.dumps(note, default=repr)}\n")

    def valid(self) -> Any:
        """Validates; a kill comes before anybody knows the results."""
        results = super().valid()
        if self._is_time("inside a validation"):
            self._die()
        return results

    def on_save_checkpoint(self) -> Mapping[str, Any] | None:
        """Waits for the thread that writes what is captured now, and kills it."""
        if self._is_time("inside a save"):
            self._kill_by(functools.partial(self._die_in_save, self.iteration))
        return super().on_save_checkpoint()

    def _die_in_save(self, iteration: int) -> None:
        path = self.checkpoint_dir / checkpoint.name_of(iteration)
        while not path.exists() and not [*path.parent.glob(f".writing-{path.name}")]:
            time.sleep(0)
        self._die()

    @on("on_train_end")
    def die_at_the_end(self) -> None:
        """Kills what was too fast for the moment that was meant."""
        if self._is_time(_AT_THE_END):
            self._die()

    def _sums(self) -> dict[str, int]:
        # Excluded objects, too: that one is not saved is a likely cause.
        tensors, _ = self.stateful_objects().state_dict()
        return {name: _checksum(arrays) for name, arrays in tensors.items()}


def notes_path(output: Path, rank: int) -> Path:
    """Where the notes of a rank are: beside the output directory, which a fresh run needs empty."""
    return output.with_name(f"{output.name}.notes.rank_{rank}.jsonl")


def killed_path(output: Path) -> Path:
    """A file that is made right before the kill."""
    return output.with_name(f"{output.name}.killed")


def described(value: Any, place: str, arrays: dict[str, Array]) -> Any:
    """A batch as JSON values, in which an array is its type and shape; the arrays go by place."""
    if isinstance(value, Mapping):
        return {str(k): described(v, f"{place}.{k}", arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(v, f"{place}.{i}", arrays) for i, v in enumerate(value)]
    if isinstance(value, np.ndarray) and value.dtype.name in LABELS:
        value = paddle.to_tensor(value, place=paddle.CPUPlace())
    if isinstance(value, paddle.Tensor):
        arrays[place] = Array.of(value)
        return str(arrays[place])
    if isinstance(value, (str, int, float, type(None))):
        return value
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))  # an address is another in each run


def _checksum(arrays: Mapping[str, Any], text: str = "") -> int:
    value = zlib.crc32(text.encode())
    for key, array in arrays.items():
        value = zlib.crc32(array.data, zlib.crc32(key.encode(), value))
    return value


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    module = importlib.import_module("expbase.tools.fingerprints")
    with put_in_front(module.Verified):
        run_program(sys.argv[1:])
