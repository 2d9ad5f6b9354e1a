"""Removes runs that failed before training began, after it has asked.

Below a directory, or the one that is named. What has a checkpoint, a logged line, a running process
or such a run below it stays.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from expbase.base.files import remove
from expbase.base.terminal import say
from expbase.checkpoint.layout import FOLDER
from expbase.engine.run_dir import LOCK
from expbase.tools import add_tool
from expbase.tools.ls import Row, print_table
from expbase.tools.runs import RunFacts, find, printable, read_run


def add_parser(tools: Any) -> None:
    add = add_tool(
        tools, main, "0 removed, 1 after a no, or if anything cannot be removed"
    ).add_argument
    add("dir", type=Path, metavar="DIR", help="a directory with runs in it, or a run")
    add("--yes", action="store_true", help="without the question, for scripts")


def main(args: argparse.Namespace) -> int:
    below = find(args.dir)
    runs = {path: read_run(path, str(path.relative_to(args.dir))) for path in below}
    staying = [path for path, run in runs.items() if not _is_nothing(path, run)]
    failed = {
        path: run
        for path, run in runs.items()
        if not any(one.is_relative_to(path) for one in staying)
    }
    if not failed:
        print(f"no failed starts in {printable(str(args.dir))}")
        return 0
    print_table(
        [[Row([run]) for run in failed.values()]],
        ["run", "experiment", "state", "age", "differs in"],
    )
    if not args.yes and not _is_wanted(len(failed)):
        print("nothing was removed")
        return 1
    refused = 0
    for path in sorted(failed, reverse=True):  # a run below another one comes first
        try:
            with (path / LOCK.format(rank=0)).open("a") as file:
                os.lockf(file.fileno(), os.F_TLOCK, 0)  # an OSError if it was started meanwhile
                if error := remove(path):
                    raise error
        except OSError as error:
            refused += 1
            say(f"cannot be removed: {printable(str(path))}: {error.strerror or error}")
    print(f"removed: {len(failed) - refused}")
    return 1 if refused else 0


def _is_nothing(path: Path, run: RunFacts) -> bool:
    """Returns whether nobody trains there, and nobody ever has."""
    has_begun = run.iteration > 0 or any(session.start for session in run.sessions)
    return run.state == "failed" and not has_begun and not [*path.glob(f"{FOLDER}/*")]


def _is_wanted(count: int) -> bool:
    """Asks the user. No answer, as from a script, is a no."""
    try:
        return input(f"remove these {count}, with all that is in them? [y/N] ").lower() == "y"
    except EOFError:
        print()
        return False
