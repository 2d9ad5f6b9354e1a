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
from expbase.state import encoding, rng
from expbase.tools.process import run_program

_PAUSE_SECONDS = 0.01  # after each update, so that a kill finds even a toy at work


class Fingerprints(ExperimentBase):
    """Goes in front of an experiment class and writes a JSON line for each update.

    `verify._CAUSES` says what a difference in each field tells.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._verify_indices: list[Any] = []
        self._verify_batches: list[int] = []

    @on("on_train_batch_begin")
    def note_fingerprint(self, batch: Any, indices: Sequence[int] | None) -> None:
        """Notes a batch as train_batch will see it: the experiment's own listeners came before."""
        arrays: dict[str, Any] = {}
        encoded = json.dumps(encoding.encode(_encodable(batch), "batch", arrays), default=repr)
        self._verify_indices.append(indices)
        self._verify_batches.append(_checksum(encoded, arrays))

    def train_batch(self) -> None:
        """Makes an update and writes its line."""
        self._verify_indices, self._verify_batches = [], []
        states = zlib.crc32(json.dumps(rng.RandomStates().state_dict()).encode())
        iteration, before, rates = self.iteration, self._sums(), self.learning_rates()
        super().train_batch()
        line = {"iteration": iteration, "before": before, "random": states, "after": self._sums()}
        line |= {"indices": self._verify_indices, "batches": self._verify_batches}
        line |= {"rates": [rates, self.learning_rates()]}
        with notes_path(self.output_dir, self.rank).open("a") as file:
            # On a line of its own: a kill may have torn the one before.
            file.write(f"\n{json.dumps(line, default=repr)}\n")
        time.sleep(_PAUSE_SECONDS)

    def _sums(self) -> dict[str, int]:
        # Excluded objects, too: that one is not saved is a likely cause.
        tensors, _ = self.stateful_objects().state_dict()
        return {name: _checksum("", arrays) for name, arrays in tensors.items()}


def notes_path(output: Path, rank: int) -> Path:
    """Where the notes of a rank are: beside the output directory, which a fresh run needs empty."""
    return output.with_name(f"{output.name}.notes.rank_{rank}.jsonl")


def _encodable(batch: Any) -> Any:
    """The batch; what cannot be encoded in it is replaced by the name of its type."""
    if isinstance(batch, (list, tuple)):
        return [*map(_encodable, batch)]
    if isinstance(batch, Mapping):
        return {str(key): _encodable(value) for key, value in batch.items()}
    try:
        encoding.encode(batch, "", {})
    except TypeError:
        return type(batch).__qualname__  # not by its repr, which may hold an address
    return batch


def _checksum(text: str, arrays: Mapping[str, Any]) -> int:
    value = zlib.crc32(text.encode())
    for key, array in arrays.items():
        value = zlib.crc32(array.data, zlib.crc32(key.encode(), value))
    return value


def main() -> None:
    """Runs the script that the command line names, with notes."""
    with put_in_front(Fingerprints):
        run_program(sys.argv[1:])


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    importlib.import_module("expbase.tools.fingerprints").main()
