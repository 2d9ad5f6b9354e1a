"""A table of runs: what state they are in, how far they are, what differs in their configs.

Changes nothing, so other people's runs can be listed, too. A run that ended without a record of it
in its ledger is lost (kill -9, power).
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expbase.record.meter import json_value
from expbase.tools import add_tool
from expbase.tools.runs import Run, find, printable, read_run

_WIDTH = 70  # characters of a cell; --json has all of it


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if there is no such directory").add_argument
    add("dir", type=Path, nargs="?", default=Path(), help="default: this one")
    add("--json", action="store_true", help="one JSON object per line, for scripts")


def main(args: argparse.Namespace) -> int:
    runs = [read_run(path, str(path.relative_to(args.dir))) for path in find(args.dir)]
    find_differences(runs)
    if args.json:
        for run in runs:
            print(json.dumps({name: json_value(value) for name, value in asdict(run).items()}))
    elif runs:
        head = ["run", "experiment", "state", "iteration", "best", "loss", "age", "commit"]
        rows = [[*head, "differs in"], *map(_row, runs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            print("  ".join(cells).rstrip())
    else:
        print(f"no runs in {printable(str(args.dir))}")
    return 0


def find_differences(runs: Sequence[Run]) -> None:
    """Notes of each run the config values that are others in another run of its experiment."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        for key, value in run.config.items():
            values[run.experiment, key].add(repr(value))
    for run in runs:
        for key, value in run.config.items():
            if len(values[run.experiment, key]) > 1:
                run.differs[key] = value


def _row(run: Run) -> list[str]:
    cells = [
        run.name,
        run.experiment,
        run.state,
        f"{run.iteration}/{run.max_iteration}" if run.max_iteration else str(run.iteration),
        _number(run.best),
        _number(run.loss),
        str(datetime.timedelta(seconds=round(run.age))),
        (run.commit or "")[:7] + "*" * run.dirty,
        run.note or " ".join(f"{key}={value}" for key, value in run.differs.items()),
    ]
    return [text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…" for text in map(printable, cells)]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value or "")
