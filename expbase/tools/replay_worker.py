"""Runs a user's script on a copy of its run, up to an iteration. A script for `replay`.

The experiment is not changed: its output directory is another one, and it is ended when it passes
the iteration. Each rank writes how it ended.

    python replay_worker.py SPEC.json train.py --output …        # or -m expbase run FILE …
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pdb
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import paddle

import expbase
from expbase import distributed
from expbase.experiment import ExperimentBase
from expbase.extras import runner
from expbase.metrics import NonFiniteError
from expbase.record import crash


class Passed(BaseException):
    """The iteration is over; no `except Exception` of the user's may hold it."""


def redirect(spec: Mapping[str, Any]) -> None:
    """Has the experiment of the run work on the copy.

    Args:
        spec: `run` and `copy`: directories; `iteration`: the last one; `pdb`: whether a debugger
            will look at the failure.
    """
    init, setup, execute = ExperimentBase.__init__, ExperimentBase.setup, runner.execute

    def is_meant(args: argparse.Namespace) -> bool:
        return Path(args.output).resolve() == Path(spec["run"])

    def init_on_copy(self: ExperimentBase, config: Any, args: argparse.Namespace) -> None:
        if not is_meant(args):
            raise ValueError(
                f"the script makes a run in {args.output}; expected the one in {spec['run']}."
            )
        init(self, config, argparse.Namespace(**{**vars(args), "output": spec["copy"]}))
        self.args.fresh = False

    def setup_with_end(self: ExperimentBase) -> None:
        setup(self)
        _end_after(self, spec["iteration"])
        if spec["pdb"]:
            _stop_at_nonfinite(self)

    ExperimentBase.__init__ = init_on_copy  # type: ignore[method-assign]
    ExperimentBase.setup = setup_with_end  # type: ignore[method-assign]
    crash.leave = lambda exp, error: None  # the run itself has it
    runner.execute = lambda runs: execute([run for run in runs if is_meant(run.args)])


def _end_after(exp: Any, iteration: int) -> None:
    train_batch = exp.train_batch

    def train_batch_or_end() -> None:
        if exp.iteration > iteration:
            exp._failure = Passed()  # known, so that the log does not tell it as a failure
            raise exp._failure
        train_batch()

    exp.train_batch = train_batch_or_end


def _stop_at_nonfinite(exp: Any) -> None:
    """Raises where the value is logged, which a run finds out later."""
    log = exp.log

    def log_and_look(mapping: Mapping[str, Any] | None = None, /, **scalars: Any) -> None:
        log(mapping, **scalars)
        for name, value in {**(mapping or {}), **scalars}.items():
            number = float(value.item() if isinstance(value, paddle.Tensor) else value)
            if not math.isfinite(number) and exp.phase == "train":
                raise NonFiniteError(f"not finite: {name}={number} at iteration {exp.iteration}.")

    exp.log = log_and_look


def start(program: list[str]) -> None:
    """Runs a script, or a module after `-m`, as python would."""
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


def in_user_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback up to the last line that is the user's: where a debugger should stand."""
    ours = (os.path.dirname(os.path.abspath(expbase.__file__)), sysconfig.get_path("stdlib"))
    entry, last = trace, None
    while entry is not None:
        file = os.path.abspath(entry.tb_frame.f_code.co_filename)
        # Installed packages, paddle above all, are not the user's either.
        if not file.startswith(ours) and "-packages" + os.sep not in file:
            last = entry
        entry = entry.tb_next
    if last is not None and last.tb_next is not None:
        last.tb_next = None
    return trace


def main() -> None:
    """Runs what the command line names."""
    spec = json.loads(Path(sys.argv[1]).read_bytes())
    redirect(spec)
    ended = "training ended"
    try:
        start(sys.argv[2:])
    except Passed:
        ended = ""
    except SystemExit as error:
        ended = f"the script ended with {error.code!r}"
    except BaseException as error:
        traceback.print_exception(error)
        ended = f"{type(error).__name__}: {error}"
        if spec["pdb"] and isinstance(error, Exception):
            pdb.post_mortem(in_user_code(error.__traceback__))
    result = ended.encode("utf-8", "surrogatepass")  # as json has it in the run
    Path(f"{spec['result']}_{distributed.rank()}").write_bytes(result)
    sys.stderr.flush()
    os._exit(1)  # other ranks are told by it; and what the script left running ends


if __name__ == "__main__":
    main()
