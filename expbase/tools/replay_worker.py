"""Runs a user's script on a copy of its run, up to an iteration. A script for `replay`.

Each rank writes how it ended to ended_RANK.json beside the copy: the error, nothing if the
iteration passed, else what happened instead.

    python replay_worker.py SPEC.json train.py --output …        # or -m expbase run FILE …
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pdb
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import expbase
from expbase import distributed
from expbase.cli import put_in_front
from expbase.experiment import ExperimentBase
from expbase.meter import NonFiniteError
from expbase.tools.process import run_program


class Repeated(ExperimentBase):
    """Goes in front of an experiment class: works on the copy, and ends after the iteration."""

    replay_spec: ClassVar[dict[str, Any]]  # as `replay.main` wrote it
    was_made: ClassVar[bool] = False
    finished = False  # training is broken off

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        spec = self.replay_spec
        if Path(args.output).resolve() != Path(spec["run"]):
            raise ValueError(f"a run in {args.output} was made; expected the one in {spec['run']}.")
        # As with --smoke the directory is gone in a moment: nobody is told to look into it.
        changed = {"output": spec["copy"], "fresh": False, "smoke": True}
        super().__init__(config, argparse.Namespace(**{**vars(args), **changed}))
        Repeated.was_made = True

    def train_batch(self) -> None:
        """One update; the last one is that of the failure, with all that is due after it."""
        super().train_batch()
        if self.iteration >= self.replay_spec["iteration"]:
            self.stop("the iteration of the failure passed", on_all_ranks=True)

    def log(self, mapping: Mapping[str, Any] | None = None, /, **scalars: Any) -> None:
        """Logs; for a debugger it raises here what a run finds out when it writes a line."""
        super().log(mapping, **scalars)
        spec = self.replay_spec
        is_wanted = spec["pdb"] and spec["error"].startswith("NonFiniteError")
        if not is_wanted or self.phase != "train":
            return
        for name, value in {**(mapping or {}), **scalars}.items():
            if not math.isfinite(number := distributed.number(value)):
                raise NonFiniteError(f"{name}={number} at iteration {self.iteration}", "?")

    def run(self) -> None:
        """Runs, and ends the process: what the script does after its training is not repeated."""
        super().run()
        passed = self.iteration >= self.replay_spec["iteration"]
        leave("" if passed else "training ended", code=0)


def leave(ended: str, code: int) -> None:
    """Writes how it ended, and ends the process; with another code than 0 its launcher, too."""
    copy = Path(Repeated.replay_spec["copy"])
    copy.with_name(f"ended_{distributed.rank()}.json").write_text(json.dumps(ended))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with whatever the script left running


def in_user_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback up to the last line that is the user's, where the debugger should be."""
    ours = (os.path.dirname(expbase.__file__), sysconfig.get_path("stdlib"))
    last = entry = trace
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        # Installed packages, paddle above all, are not the user's either.
        if not file.startswith(ours) and "-packages" + os.sep not in file:
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    return trace


def main() -> None:
    """Runs what the command line names."""
    Repeated.replay_spec = spec = json.loads(Path(sys.argv[1]).read_bytes())
    try:
        with put_in_front(Repeated):
            run_program(sys.argv[2:])
        ended = "the script ended"
    except SystemExit as error:
        ended = f"the script ended with {error.code!r}"
    except BaseException as error:
        traceback.print_exception(error)
        ended = f"{type(error).__name__}: {error}"
        if spec["pdb"] and isinstance(error, Exception):
            pdb.post_mortem(in_user_code(error.__traceback__))
    if not Repeated.was_made:
        ended = f"no run was made by main(Experiment), which replay needs ({ended})"
    leave(ended, code=1)


if __name__ == "__main__":
    main()
