"""Runs a user's script and notes, for each iteration, fingerprints of what went into the update.

A script for `verify`, which compares the notes of two runs: the first fingerprint that differs
tells what the cause is likely to be.

    python fingerprints.py train.py --output runs/a …      # writes runs/a.notes.rank_0.jsonl
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.cli import put_in_front
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.record.crash import describe_batch
from expbase.state import rng
from expbase.tools.process import run_program


class Fingerprints(ExperimentBase):
    """Writes a JSON line for each update; `verify._CAUSES` says what a difference in it tells."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._verify_note: dict[str, Any] = {"indices": [], "batches": []}

    @on("on_train_batch_begin")
    def note_batch(self, batch: Any, indices: Sequence[int] | None) -> None:
        """Notes a batch as train_batch will see it: the experiment's own listeners came before."""
        described, arrays = describe_batch(batch)
        self._verify_note["indices"].append(indices)
        self._verify_note["batches"].append(_checksum(arrays, json.dumps(described)))

    def train_batch(self) -> None:
        """Makes an update and writes its line."""
        self._verify_note = note = {"iteration": self.iteration, "indices": [], "batches": []}
        note["random"] = zlib.crc32(json.dumps(rng.RandomStates().state_dict()).encode())
        before, rates = self._sums(), self.learning_rates()
        super().train_batch()
        note |= {"before": before, "after": self._sums(), "rates": [rates, self.learning_rates()]}
        with notes_path(self.output_dir, self.rank).open("a") as file:
            # On a line of its own: a kill may have torn the one before.
            file.write(f"\n{json.dumps(note, default=repr)}\n")
        time.sleep(0.01)  # so that a kill finds even a toy at work

    def _sums(self) -> dict[str, int]:
        # Excluded objects, too: that one is not saved is a likely cause.
        tensors, _ = self.stateful_objects().state_dict()
        return {name: _checksum(arrays) for name, arrays in tensors.items()}


def notes_path(output: Path, rank: int) -> Path:
    """Where the notes of a rank are: beside the output directory, which a fresh run needs empty."""
    return output.with_name(f"{output.name}.notes.rank_{rank}.jsonl")


def _checksum(arrays: Mapping[str, Any], text: str = "") -> int:
    value = zlib.crc32(text.encode())
    for key, array in arrays.items():
        value = zlib.crc32(array.data, zlib.crc32(key.encode(), value))
    return value


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    module = importlib.import_module("expbase.tools.fingerprints")
    with put_in_front(module.Fingerprints):
        run_program(sys.argv[1:])
