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

from expbase.config import did_you_mean
from expbase.record.metrics import json_value
from expbase.tools import add_tool
from expbase.tools.runs import Run, find, printable, read_run

_WIDTH = 70  # characters of a cell; --json has all of it
_COLUMNS = [*"run experiment state iteration best loss age commit".split(), "differs in"]


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if there is no such directory").add_argument
    add("dir", type=Path, nargs="?", default=Path(), help="default: this one")
    add("--columns", nargs="+", metavar="NAME", help="these alone; a config value, too: optim.lr")
    add("--sort", metavar="NAME", help="by this column or config value, the smallest first")
    add("--reverse", action="store_true", help="with --sort, the largest first")
    add("--json", action="store_true", help="one JSON object per line, for scripts")


def main(args: argparse.Namespace) -> int:
    runs = [read_run(path, str(path.relative_to(args.dir))) for path in find(args.dir)]
    find_differences(runs)
    if args.sort:
        _check_columns("--sort", [args.sort], runs)
        runs.sort(key=lambda run: _sort_key(run, args.sort), reverse=args.reverse)
        runs.sort(key=lambda run: not any(_sort_key(run, args.sort)))  # what has no value: last
    if args.json:
        for run in runs:
            print(json.dumps({name: json_value(value) for name, value in asdict(run).items()}))
    elif runs:
        _check_columns("--columns", args.columns or [], runs)
        print_table(runs, args.columns or _COLUMNS)
    else:
        print(f"no runs in {printable(str(args.dir))}")
    return 0


def print_table(runs: Sequence[Run], columns: Sequence[str]) -> None:
    """Prints a row for each run; a column may be a config value."""
    rows = [columns, *(_row(run, columns) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _check_columns(option: str, names: Sequence[str], runs: Sequence[Run]) -> None:
    """Raises a ValueError if there is no column and no config value of a name."""
    known = dict.fromkeys([*_COLUMNS, *(key for run in runs for key in run.config)])
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: unknown column {name!r}.{did_you_mean(name, known)}")


def _sort_key(run: Run, name: str) -> tuple[int, Any]:
    """Numbers before texts; what is missing is (0, 0)."""
    value = {**run.config, **vars(run), "run": run.name}.get(name)
    if isinstance(value, (bool, int, float)):
        return 1, value
    return (0, 0) if value in (None, "") else (2, str(value))


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


def _row(run: Run, columns: Sequence[str]) -> list[str]:
    limit = f"/{run.max_iteration}" if run.max_iteration else ""
    cells = {key: str(value) for key, value in run.config.items()} | {
        "run": run.name,
        "experiment": run.experiment,
        "state": run.state,
        "iteration": f"{run.iteration}{limit}",
        "best": _number(run.best),
        "loss": _number(run.loss),
        "age": str(datetime.timedelta(seconds=round(run.age))),
        "commit": (run.commit or "")[:7] + "*" * run.dirty,
        "differs in": run.note or " ".join(f"{key}={value}" for key, value in run.differs.items()),
    }
    texts = [printable(cells.get(name, "")) for name in columns]
    return [text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…" for text in texts]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value or "")
