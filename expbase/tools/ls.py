"""A table of runs: what state they are in, how far they are, what differs in their configs.

Changes nothing, so other people's runs can be listed, too. A run that ended without a record of it
in its ledger is lost (kill -9, power).
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expbase.base.json_lines import json_value
from expbase.base.streams import shown
from expbase.config import nearest
from expbase.tools import add_tool
from expbase.tools.runs import Run, find, printable, read_run

_WIDTH = 70  # characters of a cell; --json has all of it
_COLUMNS = [*"run experiment state iteration best test loss age commit".split(), "differs in"]


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if there is no such directory").add_argument
    add("dir", type=Path, nargs="?", default=Path(), help="default: this one")
    add("--columns", nargs="+", metavar="NAME",
        help="these alone; a metric or a config value, too: valid/accuracy optim.lr")  # fmt: skip
    add("--sort", metavar="NAME", help="by this column, metric or config value, smallest first")
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
        print_table(runs, args.columns or _usual_columns(runs))
    else:
        print(f"no runs in {printable(str(args.dir))}")
    return 0


def _usual_columns(runs: Sequence[Run]) -> list[str]:
    has_test = any(name.startswith("test/") for run in runs for name in run.metrics)
    return [name for name in _COLUMNS if name != "test" or has_test]


def print_table(runs: Sequence[Run], columns: Sequence[str]) -> None:
    """Prints a row for each run; a column may be a config value."""
    rows = [columns, *(_row(run, columns) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _check_columns(option: str, names: Sequence[str], runs: Sequence[Run]) -> None:
    """Raises a ValueError if no run has a column, a metric or a config value of a name."""
    known = {*_COLUMNS}.union(*map(_values, runs))
    for name in names:
        if name not in known:
            near = [f"Did you mean {one!r}?" for one in nearest(name, sorted(known), 0.5)]
            [hint] = near or [f"Expected {', '.join(_COLUMNS)}, a metric or a config value."]
            raise ValueError(f"{option}: unknown column {name!r}. {hint}")


def _values(run: Run) -> dict[str, Any]:
    """Returns what a column may show of a run: `accuracy` is that of `valid`, else of `train`."""
    short = {name.partition("/")[2]: value for name, value in sorted(run.metrics.items())}
    columns = {name: vars(run).get(name) for name in _COLUMNS}
    return {**short, **run.metrics, **run.config, **columns, "run": run.name}


def _sort_key(run: Run, name: str) -> tuple[int, Any]:
    """Sorts numbers before texts; what is missing is (0, 0)."""
    value = _values(run).get(name)
    if isinstance(value, (bool, int, float)):
        return 1, value
    return (0, 0) if value in (None, "") else (2, str(value))


def find_differences(runs: Sequence[Run]) -> None:
    """Notes of each run the config values that are others in another run of its experiment.

    Those of the training section come last: the others are more often what one has tried.
    """
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        for key, value in run.config.items():
            values[run.experiment, key].add(repr(value))
    for run in runs:
        for key in sorted(run.config, key=lambda key: key.startswith("training.")):
            if len(values[run.experiment, key]) > 1:
                run.differs[key] = run.config[key]


def _row(run: Run, columns: Sequence[str]) -> list[str]:
    limit = f"/{run.max_iteration}" if run.max_iteration else ""
    losses = [name for name in run.metrics if name.startswith("train/") and name.endswith("loss")]
    named = {name.partition("/")[2]: _number(run.metrics[name]) for name in losses}
    cells = {key: _number(value) for key, value in _values(run).items()} | {
        "iteration": f"{run.iteration}{limit}",
        "test": _joined(_group(run, "test")),
        "loss": named.get("loss", _joined(named)),
        "age": str(datetime.timedelta(seconds=round(run.age))),
        "commit": (run.commit or "")[:7] + "*" * run.dirty,
        "differs in": run.note or _joined(run.differs),
    }
    texts = [printable(cells.get(name, "")) for name in columns]
    return [text if len(text) <= _WIDTH else shown(f"{text[:_WIDTH]}…") for text in texts]


def _group(run: Run, word: str) -> dict[str, str]:
    """Returns the metrics of a word, `test/accuracy` as `accuracy`."""
    named = {name.partition("/")[2]: name for name in run.metrics if name.startswith(f"{word}/")}
    return {short: _number(run.metrics[name]) for short, name in named.items()}


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _joined(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
