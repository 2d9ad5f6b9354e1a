"""Runs a user's script for `verify`: short, killed at a given moment, and with notes.

The notes are fingerprints of what went into each update: the first one that differs between two
runs points at the likely cause.

    python verified_run.py train.py --output runs/a …      # writes runs/a.notes.rank_0.jsonl
    python verified_run.py -m package.train --output runs/a …

What it is to do is in the environment (PLAN), as JSON: `training` has config values; `device` is
what it runs on, by default the CPU; `kill` says how the run is killed, "" for not at all, `at` from
which iteration on, and `delay` how many seconds later.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.base.files import checksum_of, write_single_file
from expbase.base.json_values import checksum
from expbase.checkpoint import layout
from expbase.config import fill
from expbase.experiment import ExperimentBase
from expbase.mixins_in_front import users_class
from expbase.tools.child_processes import run_script

PLAN = "EXPBASE_VERIFY"
KINDS = ("inside a save", "inside a validation", "at a random moment")  # when to kill


@dataclass
class Work:
    """The task of a run; an object, since plain values on an experiment are its state."""

    kill: str  # one of KINDS; "": none
    at: float  # from which iteration on
    delay: float  # seconds
    note: dict[str, Any] = field(default_factory=dict)  # about the update under way


class Verified(ExperimentBase):
    """Shortens a run, ends it as by kill -9, and writes a JSON line for each update.

    `verify._CAUSES` says what a difference in a line points at.
    """

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        plan = json.loads(os.environ[PLAN])
        config = fill(config)
        training = config.training
        training.update(plan.pop("training"))
        if training.max_epoch:  # so many are enough, and a schedule may count on some
            batches = training.accumulation_steps * max(training.shares, 1)
            training.max_epoch = training.max_iteration * batches
        if users_class(type(self)).valid is ExperimentBase.valid:
            training.valid_interval = training.valid_every_epoch = 0
            if plan["kill"] == "inside a validation":
                plan["kill"] = "at a random moment"
        device = plan.pop("device", "cpu")
        super().__init__(config, argparse.Namespace(**{**vars(args), "device": device}))
        self.verifying = Work(**plan)

    def _is_time(self, kind: str) -> bool:
        """Returns whether to begin a kill: on rank 0, for the tool ends the others."""
        work = self.verifying
        is_time = self.rank == 0 and work.kill == kind and self.iteration >= work.at
        if is_time:
            work.at = math.inf  # once
        return is_time

    def _die(self) -> None:
        kind = self.verifying.kill.encode()
        write_single_file(killed_path(self.output_dir), [kind])
        os.kill(os.getpid(), signal.SIGKILL)

    def read_batch(self) -> Any:
        """Notes a batch as train_batch will see it: what the experiment does to it came before."""
        batch = super().read_batch()
        note = self.verifying.note
        indices = self.internals.batch_indices
        share = str(self.internals.share)
        note["indices"].setdefault(share, []).append(indices)
        note["batches"].setdefault(share, []).append(checksum(batch))
        return batch

    def train_batch(self) -> None:
        """Makes an update and writes its line."""
        if self._is_time("at a random moment"):
            # A run that ends before waits for this thread, and is killed then.
            threading.Timer(self.verifying.delay, self._die).start()
        note: dict[str, Any] = {"iteration": self.iteration, "indices": {}, "batches": {}}
        self.verifying.note = note
        before = self._sums()
        rates = self.internals.learning_rates()
        super().train_batch()
        note |= {"before": before, "after": self._sums()}
        note["rates"] = {"before": rates, "after": self.internals.learning_rates()}
        with notes_path(self.output_dir, self.rank).open("a") as file:
            # Begins a new line: a kill may have torn the one before.
            file.write(f"\n{json.dumps(note, default=repr)}\n")

    def valid(self) -> Any:
        """Validates; a kill comes before anybody knows the results."""
        results = super().valid()
        if self._is_time("inside a validation"):
            self._die()
        return results

    def on_save_checkpoint(self) -> Mapping[str, Any] | None:
        """Starts a thread that kills the run while its next checkpoint is written.

        What is captured now may be none: a copy from before a validation can be let go.
        """
        if self._is_time("inside a save"):
            threading.Thread(target=self._die_in_save, args=[self.iteration]).start()
        return super().on_save_checkpoint()

    def _die_in_save(self, iteration: int) -> None:
        folder = self.checkpoint_dir
        while layout.newest_iteration(self.output_dir) < iteration:
            if [*folder.glob(".writing-*")]:
                break
            time.sleep(0)
        self._die()

    def _sums(self) -> dict[str, int]:
        # Excluded objects, too: that one is not saved is a likely cause.
        tensors, _ = self.internals.stateful_objects().state_dict()
        return {name: _checksum(arrays) for name, arrays in tensors.items()}


def notes_path(output: Path, rank: int) -> Path:
    """Returns where a rank's notes are: beside the output directory, empty for a fresh run."""
    return output.with_name(f"{output.name}.notes.rank_{rank}.jsonl")


def killed_path(output: Path) -> Path:
    """Returns the path of a file with the kind of the kill, which is made right before it."""
    return output.with_name(f"{output.name}.killed")


def _checksum(arrays: Mapping[str, Any]) -> int:
    in_order = sorted(arrays.items())  # a resumed optimizer may have them in another order
    return checksum_of(part for key, array in in_order for part in (key.encode(), array.data))


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    module = importlib.import_module("expbase.tools.verified_run")
    run_script(module.Verified, sys.argv[1:])
