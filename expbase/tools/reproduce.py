"""Makes a run again from its records, and tells whether the bits are the same.

Give it in the git repository of the run's code, or in a clone. The code is that of the run's commit
with its changes, in a work tree of its own; what git does not know is linked or copied into it.
Without git the files of the working directory are taken, if they are the run's. The run's command
is given once more, with the variables that the run has noted and another output, and ends at an
iteration: by default at that of the oldest checkpoint that is kept. Compared are each file of its
checkpoint and every number logged until then but times and speeds. A run that was continued with
other code, config or number of processes is made again up to there. The words after -- are added to
the command: -- --nprocs 1, say, for a run with training.shares.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expbase.base.files import write_single_file
from expbase.checkpoint import layout, storage
from expbase.cli import count, report_user_errors
from expbase.config import ConfigError, differences
from expbase.experiment import ExperimentBase
from expbase.ranks import collectives
from expbase.record.git import top_of
from expbase.record.sources import SOURCES, Code
from expbase.tools import add_tool
from expbase.tools.compare import files, logged, values
from expbase.tools.process import ended_by_signals, kill, run_script
from expbase.tools.runs import sessions

PLAN = "EXPBASE_REPRODUCE"
# The facts of a start that may explain a difference, likely causes first.
_FACTS = (
    *("experiment", "config", "sources", "loaders", "model", "began_from", "first_batch", "ranks"),
    *("device", "environment", "python", "packages"),
)


@dataclass
class Recorded:
    """The records of a run up to an iteration."""

    numbers: dict[str, Any]  # logged ones, by name and iteration
    saved: dict[str, Any]  # checksums and values of the iteration's checkpoint; empty: none is kept
    facts: dict[str, Any]  # that may explain a difference


def add_parser(tools: Any) -> None:
    codes = "0 reproduced, 1 not, 78 a mistake in what was given, 130 Ctrl-C, 143 SIGTERM"
    add = add_tool(tools, main, codes).add_argument
    add("run_dir", type=Path, metavar="RUN", help="the output directory of a run")
    add("--iterations", type=count, metavar="N", help="how far (default: the oldest checkpoint)")
    add("--python", default=sys.executable, metavar="PATH", help="the interpreter")
    add("--record", type=Path, metavar="FILE", help="write a receipt, as JSON")


def main(args: argparse.Namespace) -> int:
    run: Path = args.run_dir
    with (
        report_user_errors("python -m expbase reproduce"),
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="expbase-reproduce-") as folder,
    ):
        start, last, limit = _part(run, args.iterations)
        # What follows a checkpoint is done by the start that continues it.
        last_line = last - bool(limit)
        then = _recorded(run, start, last, last_line)
        if not (then.numbers or then.saved):
            raise ConfigError(f"{run}: has no number and no checkpoint until iteration {last}.")
        again = Path(folder, "run")
        code = _train(args, start, last, again)
        new_start = next((session.start for session in sessions(again)), start)
        now = _recorded(again, new_start, last, last_line)
    problem = _problem(then, now, code)
    name = layout.name_of(last) if then.saved else "no checkpoint of it is kept"
    result = f"{last} iterations, the same bits ({name}, {len(then.numbers)} logged numbers)"
    result = f"NOT REPRODUCED: {problem}" if problem else f"reproduced: {result}"
    known = [name for name in then.facts if name in now.facts]  # few if it did not begin
    changed = differences(*({name: one.facts[name] for name in known} for one in (then, now)))
    if changed:
        words = ", ".join(f"{key}: {before} → {after}" for key, (before, after) in changed.items())
        result += f". Not as it was: {textwrap.shorten(words, 600)}"
    result += limit
    if args.record:
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        receipt = {"result": result, "reproduced": not problem, "date": date, "run": str(run)}
        receipt |= {"command": start["command"], "git": start["git"], "not as it was": changed}
        receipt |= {"then": asdict(then), "now": asdict(now)}
        write_single_file(args.record, [json.dumps(receipt, indent=1).encode()])
    print(result)
    return int(bool(problem))


def _part(run: Path, iterations: int | None) -> tuple[dict[str, Any], int, str]:
    """Returns the start of a run, the iteration up to which it is made again, and why no further.

    Raises:
        ConfigError: It cannot be made again.
    """
    starts = [session.start for session in sessions(run) if session.start]
    if not starts or not starts[0]["command"] or "script" not in starts[0]:
        raise ConfigError(f"{run}: holds no run of a script, made by this version of expbase.")
    # If several starts began at the beginning, the last one: the others had left no checkpoint.
    start = min(reversed(starts), key=lambda one: one["iteration"])
    saved = layout.listed(run / layout.FOLDER)
    last = iterations or (saved and layout.iteration_of(saved[0])) or 0
    made_by = ["config", "sources", "git"]
    if not start["config"]["training.shares"]:
        made_by.append("ranks")
    for later in starts[starts.index(start) :]:
        changed = differences(*({name: one[name] for name in made_by} for one in (start, later)))
        if changed and later["iteration"] < last:
            last = later["iteration"]
            return start, last, f". From there on it was continued with other {', '.join(changed)}"
    if last <= start["iteration"]:
        raise ConfigError(f"{run}: holds no checkpoint; expected --iterations N, the last one.")
    return start, last, ""


def _recorded(run: Path, start: Mapping[str, Any], last: int, last_line: int) -> Recorded:
    facts = {name: start[name] for name in _FACTS if name in start}
    checkpoint = run / layout.FOLDER / layout.name_of(last)
    saved: dict[str, Any] = {}
    if checkpoint.exists():
        facts["versions"] = storage.verify(checkpoint)["info"]["versions"]
        saved = files(checkpoint) | values(checkpoint)
        facts["checkpoint"] = saved.pop("environment")
        # A checkpoint of a stop has none: the to-do list was done before.
        del saved["loop"]["todo"]
    return Recorded(logged(run, last_line), saved, facts)


def _problem(then: Recorded, now: Recorded, code: int) -> str:
    """Returns why a run is not reproduced; empty if it is."""
    if then.facts["sources"] != now.facts["sources"]:
        return "this is not the code of the run"
    if code:
        return f"the command ended with code {code}"
    found = differences(then.numbers, now.numbers)
    if then.saved:
        found |= differences(then.saved, now.saved)
    for key, (before, after) in found.items():
        return f"{key} differs: {before} then, {after} now"
    return ""


# --- the code and the command ---------------------------------------------------------------


def _git(folder: Path, *words: str) -> str:
    """Returns the output of a git command; a ConfigError if it fails, with its errors above."""
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", *words]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise ConfigError(f"{folder}: `git {' '.join(words)}` failed, as git says above.")
    return result.stdout


@contextlib.contextmanager
def _code(run: Path, git: Mapping[str, Any], copy: Path) -> Iterator[Path]:
    """Checks out the code of a run, with its changes, from the repository of the working directory.

    Args:
        run: The output directory of the run.
        git: The record of its commit and changes.
        copy: Where the code is put.

    Yields:
        The top of the work tree of now; if the run has no commit, the working directory.
    """
    here = Path.cwd()
    top = top_of(here)
    if not git.get("commit"):
        yield here
        return
    if top is None:
        raise ConfigError(f"{here}: in no git repository; expected one with {git['commit']}.")
    try:
        _git(top, "worktree", "add", "--detach", str(copy), git["commit"])
        if state := git.get("state"):
            _git(copy, "apply", str((run / SOURCES / f"{state}.diff").absolute()))
        for name in _git(top, "ls-files", "-zox", "__pycache__", "--directory").split("\0"):
            if not os.path.lexists(target := copy / name):
                target.parent.mkdir(parents=True, exist_ok=True)
                # Beside the file that a link leads to, a module would look for others.
                (shutil.copy if target.suffix == ".py" else os.symlink)(top / name, target)
        yield top
    finally:
        with contextlib.suppress(ConfigError):  # git says why
            _git(top, "worktree", "remove", "-ff", str(copy))


def _train(args: argparse.Namespace, start: Mapping[str, Any], last: int, output: Path) -> int:
    """Runs the command again; returns its exit code, 0 if it has come to the last iteration."""
    copy = output.with_name("code")
    with _code(args.run_dir, start["git"], copy) as top:
        words = [word.replace(f"{top}/", f"{copy}/") for word in start["command"]]
        place = start["script"]
        is_module = words[place - 1 : place] == ["-m"]
        words.insert(place - is_module, __file__)
        done = output.with_name("done")
        plan = {"output": str(output), "last": last, "done": str(done), "sources": start["sources"]}
        variables = {**start["environment"]}
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # of another machine, perhaps
        process = subprocess.Popen(
            [args.python, *words, *args.words],
            cwd=Path.cwd() if start["directory"] is None else copy / start["directory"],
            env={**os.environ, **variables, PLAN: json.dumps(plan)},
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            kill(process)
        return 0 if done.exists() else code


# --- in the process that trains -------------------------------------------------------------


class Reproduced(ExperimentBase):
    """Trains into another directory, and ends all ranks when an iteration is done."""

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        super().__init__(config, argparse.Namespace(**{**vars(args), "output": _plan()["output"]}))

    def on_train_begin(self) -> None:
        """Ends before the first batch if the code is not the run's."""
        now = Code.of(type(self)).files  # with the files that were imported in setup
        if any(now.get(name) != code for name, code in _plan()["sources"].items()):
            self._leave()
        super().on_train_begin()

    def going_on(self) -> bool:
        """Ends when the work after the last iteration is done; the end of the run is as always."""
        last = _plan()["last"]
        if self.iteration == last:
            self.save()
        is_going_on = super().going_on()
        if is_going_on and self.iteration > last:
            self.internals.wait_for_checkpoint()
            self._leave()
        return is_going_on

    def _leave(self) -> None:
        if self.rank == 0:
            Path(_plan()["done"]).touch()
        collectives.barrier("the end of what is reproduced")
        os._exit(0)  # no event tells the experiment that it had finished


def _plan() -> dict[str, Any]:
    return dict(json.loads(os.environ[PLAN]))


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    module = importlib.import_module("expbase.tools.reproduce")
    run_script(module.Reproduced, sys.argv[1:])
