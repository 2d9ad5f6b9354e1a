"""Runs a user's script and notes, for each iteration, fingerprints of what went into the update.

A script for `verify`, which compares the notes of a run that was killed with those of one that
was not: the first fingerprint that differs says what the cause is likely to be. The experiment is
not changed; only two of its methods are wrapped.

    python fingerprints.py NOTES_PREFIX train.py --output …      # writes NOTES_PREFIX.rank_0.jsonl
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from expbase.experiment import ExperimentBase
from expbase.state import encoding, objects, rng

_PAUSE_SECONDS = 0.01  # after each update, so that a kill finds even a toy at work


class Notes:
    """The fingerprints of one experiment, a JSON line for each iteration.

    The fields, in the order in which `verify` asks for causes: `indices` of the batches that were
    read, `batches` themselves, `random` states before the update, learning `rates`, `before` and
    `after`: the checksum of each model and optimizer.
    """

    def __init__(self, experiment: Any, path: Path) -> None:
        self._exp = experiment
        self._path = path
        self._indices: list[Any] = []
        self._batches: list[int] = []
        self._read_batch = experiment.read_batch
        self._train_batch = experiment.train_batch
        experiment.read_batch = self.read_batch
        experiment.train_batch = self.train_batch
        with path.open("a") as file:
            file.write("\n")  # a kill may have torn the line before

    def read_batch(self) -> Any:
        """Reads a batch and notes it."""
        batch = self._read_batch()
        self._indices.append(self._exp._cursor.batches.indices)
        with rng.isolated():
            arrays: dict[str, Any] = {}
            encoded = json.dumps(encoding.encode(_plain(batch), "batch", arrays), default=repr)
        self._batches.append(_checksum(encoded, arrays))
        return batch

    def train_batch(self) -> None:
        """Makes an update and writes its line."""
        self._indices, self._batches = [], []
        line = {
            "iteration": self._exp.iteration,
            "random": zlib.crc32(json.dumps(rng.capture()).encode()),
            "before": self._sums(),
        }
        rates = self._exp._journal.learning_rates()
        self._train_batch()
        line |= {"indices": self._indices, "batches": self._batches, "after": self._sums()}
        line["rates"] = [rates, self._exp._journal.learning_rates()]
        with self._path.open("a") as file:
            file.write(json.dumps(line, default=repr) + "\n")
        time.sleep(_PAUSE_SECONDS)

    def _sums(self) -> dict[str, int]:
        # With what the user excluded from the state: its loss is a likely cause.
        found = objects.find(self._exp._user_attributes())
        tensors, _ = found.state_dict()
        return {name: _checksum("", arrays) for name, arrays in tensors.items()}


def _plain(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return [_plain(value) for value in batch]
    if isinstance(batch, dict):
        return {str(key): _plain(value) for key, value in batch.items()}
    return batch if _is_known(batch) else repr(batch)


def _is_known(value: Any) -> bool:
    try:
        encoding.encode(value, "", {})
    except TypeError:
        return False
    return True


def _checksum(text: str, arrays: dict[str, Any]) -> int:
    value = zlib.crc32(text.encode())
    for key, array in arrays.items():
        value = zlib.crc32(array.data, zlib.crc32(key.encode(), value))
    return value


def main() -> None:
    """Runs the script that the command line names, with notes."""
    prefix, script, *words = sys.argv[1:]
    setup = ExperimentBase.setup

    def setup_with_notes(self: ExperimentBase) -> None:
        setup(self)
        Notes(self, Path(f"{prefix}.rank_{self.rank}.jsonl"))

    ExperimentBase.setup = setup_with_notes  # type: ignore[method-assign]
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
