"""Trains a part of a run again, for `reproduce`, in a process of the run's own command.

    python train_again.py train.py --output runs/a …
    python train_again.py -m package.train --output runs/a …

What it is to do is in the environment (PLAN), as JSON: `output` is the directory in the place of
the command's; `last` is the iteration after which it ends, and writes into the file `done` why it
has not come there, or nothing; `kept` are iterations whose checkpoints are looked at; `sources` are
the checksums that the code must have, or null; `updates` asks for a line about each update;
`experiment` is the class of the run, and `config` its flat config.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expbase.base.arrays import number
from expbase.checkpoint import layout
from expbase.cli import adopt_aloud
from expbase.config import Config, ConfigError
from expbase.engine.compare_runs import what_is_saved
from expbase.experiment import ExperimentBase
from expbase.ranks import collectives
from expbase.record.sources import Code
from expbase.tools.child_processes import run_script

PLAN = "EXPBASE_REPRODUCE"


class UpdateNotes:
    """What one update has read and logged."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.samples: list[Any] = []  # of each batch: indices in the data set; None: unknown
        self.logged: dict[str, list[float]] = {}  # each number, by its name


# What one process trains; on the experiment these would be part of its state.
_under_way: list[UpdateNotes] = []  # at most one
_begun: list[str] = []  # the experiments of the script
_turns: deque[int] = deque(maxlen=2)  # of the loop: with the second one an update is done


class Reproduced(ExperimentBase):
    """Trains into another directory, and ends all ranks when an iteration is done."""

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        plan = _plan()
        name = type(self).__name__
        if _begun:  # the one that is made again has ended
            sys.exit()
        if name != plan["experiment"]:
            raise ConfigError(
                f"reproduce: the script makes {name} before {plan['experiment']}, the run's; "
                "expected a script that makes one experiment. The words after -- may choose it."
            )
        _begun.append(name)
        # Forced: of another config the numbers differ, and which keys do is said beside them.
        options = {"output": plan["output"], "fresh": False, "force": True}
        super().__init__(config, argparse.Namespace(**{**vars(args), **options}))

    @classmethod
    def default_config(cls) -> Config:
        """Has the keys of the run that have left, since the code of now may be another one."""
        config = super().default_config()
        adopt_aloud(config, _plan()["config"], "the run")
        return config

    def on_train_begin(self) -> None:
        """Ends before the first batch if the code is not the run's."""
        now = Code.of(type(self)).files  # with the files that were imported in setup
        sources = _plan()["sources"] or {}
        if any(now.get(name) != code for name, code in sources.items()):
            self._leave("this is not the code of the run")
        super().on_train_begin()

    def going_on(self) -> bool:
        """Ends when the work after the last iteration is done; the end of the run is as always."""
        plan = _plan()
        self._write_update()
        _turns.append(self.iteration)
        if len(_turns) > 1:
            begun_path(plan["output"]).touch()
        if self.iteration in plan["kept"] and self.internals.saved_at < self.iteration:
            self.save()  # the run's may be of a stop, or by the clock
        is_going_on = super().going_on()
        if is_going_on and self.iteration > plan["last"]:
            self.internals.wait_for_checkpoint()
            self._leave()
        if is_going_on and plan["updates"]:
            _under_way.append(UpdateNotes(self.iteration))
        return is_going_on

    def on_checkpoint_written(self, path: Path) -> None:
        """Notes what is in a checkpoint that the run has kept; this one may be deleted soon."""
        plan = _plan()
        if layout.iteration_of(path) in plan["kept"]:
            with saved_path(plan["output"]).open("a") as file:
                file.write(f"{json.dumps({path.name: what_is_saved(path)})}\n")
        super().on_checkpoint_written(path)

    def _leave(self, problem: str = "") -> None:
        if self.rank == 0:
            Path(_plan()["done"]).write_text(problem)
        collectives.barrier("the end of what is reproduced")
        os._exit(0)  # no event tells the experiment that it had finished

    # --- a line about each update ------------------------------------------------------------

    def _write_update(self) -> None:
        while _under_way:
            line = vars(_under_way.pop())
            with updates_path(_plan()["output"], self.rank).open("a") as file:
                file.write(f"{json.dumps(line, default=repr)}\n")

    def read_batch(self) -> Any:
        """Notes which samples an update has read."""
        batch = super().read_batch()
        for update in _under_way:
            update.samples.append(self.internals.batch_indices)
        return batch

    def log(self, mapping: Any = None, /, *misplaced: Any, **scalars: Any) -> None:
        """Notes what an update has logged."""
        super().log(mapping, *misplaced, **scalars)
        for update in _under_way if self.internals.phase == "train" else ():
            for name, value in {**(mapping or {}), **scalars}.items():
                update.logged.setdefault(name, []).append(number(value))


def saved_path(output: str | Path) -> Path:
    """Returns where is noted what was saved, beside the output directory."""
    return Path(f"{output}.saved.jsonl")


def begun_path(output: str | Path) -> Path:
    """Returns the file that is there if an update was made, beside the output directory."""
    return Path(f"{output}.begun")


def updates_path(output: str | Path, rank: int | str) -> Path:
    """Returns where a rank's lines about updates are, beside the output directory; "*": all."""
    return Path(f"{output}.updates.rank_{rank}.jsonl")


@functools.cache  # each iteration asks
def _plan() -> dict[str, Any]:
    return dict(json.loads(os.environ[PLAN]))


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    module = importlib.import_module("expbase.tools.train_again")
    run_script(module.Reproduced, sys.argv[1:])
