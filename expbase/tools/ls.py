"""A table of runs: their states, their iterations, and what differs in their configs.

Below them stand means: a row for the runs that differ in training.seed alone and have ended by
themselves, with the sample's standard deviation (n - 1).

Changes nothing, so other people's runs can be listed, too. A run that ended without a record of it
in its ledger is lost (kill -9, power).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size  # a Chinese character is two columns wide

from expbase.base.did_you_mean import did_you_mean
from expbase.base.errors import ValueMistake
from expbase.base.json_lines import json_value
from expbase.base.terminal import shown
from expbase.tools import add_tool, seeds
from expbase.tools.newest_metrics import search
from expbase.tools.runs import RunFacts, find, find_differences, printable, read_run

_WIDTH = 70  # the most columns of a cell in the terminal; --json has the whole text
_SILENT_SECONDS = 2.0  # longer, and a line on stderr says what is being done
_COLUMNS = [*"run experiment state iteration best test loss age commit".split(), "differs in"]


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0 listed, 1 an error", "[DIR] [options]").add_argument
    add("dir", type=Path, nargs="?", default=Path(), metavar="DIR",
        help="a directory with runs in it, or a run (default: this one)")  # fmt: skip
    add("--columns", nargs="+", metavar="NAME",
        help="these alone; a metric or a config value, too: valid/accuracy optim.lr")  # fmt: skip
    add("--sort", metavar="NAME", help="by this column, metric or config value, smallest first")
    add("--reverse", action="store_true", help="with --sort, the largest first")
    add("--seeds", action="store_true",
        help="the means alone, over runs that differ in training.seed alone")  # fmt: skip
    add("--json", action="store_true",
        help="one JSON object per line, for scripts: runs, or with --seeds means")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    names = [*(args.columns or []), *([args.sort] if args.sort else [])]
    if args.reverse and not args.sort:
        raise ValueMistake("--reverse: given without --sort; expected --sort NAME, too.")
    runs = _read(args.dir, names)
    find_differences(runs)
    groups = seeds.groups(runs)
    singles = [] if args.seeds else [Row([run]) for run in runs]
    means = [Row(group.runs, group) for group in groups]
    if args.sort:
        _check_columns("--sort", [args.sort], runs)
        for rows in (singles, means):
            rows.sort(key=lambda row: _sort_key(row, args.sort), reverse=args.reverse)
            rows.sort(key=lambda row: not any(_sort_key(row, args.sort)))  # without a value: last
    if args.json:
        for row in means if args.seeds else singles:
            print(json.dumps({name: json_value(value) for name, value in row.facts().items()}))
    elif singles or means:
        _check_columns("--columns", args.columns or [], runs)
        print_table([singles, means], args.columns or _usual_columns(runs))
    else:
        what = "finished runs that differ in training.seed alone" if runs else "runs"
        print(f"no {what} in {printable(str(args.dir))}")
    return 0


def _read(folder: Path, names: Sequence[str]) -> list[RunFacts]:
    """Reads the runs at and below a folder, and of each the metrics of these names."""
    until = time.monotonic() + _SILENT_SECONDS
    paths = find(folder)
    runs: list[RunFacts] = []
    for path in paths:
        runs.append(read_run(path, str(path.relative_to(folder))))
        if time.monotonic() > until:
            print(f"reading {len(paths)} runs in {printable(str(folder))} …", file=sys.stderr)
            until = math.inf
    known = {*_COLUMNS}.union(*(run.config for run in runs))
    for path, run in zip(paths, runs, strict=True):
        for name in names:
            if name not in known and name not in _values(run):
                with contextlib.suppress(OSError):  # its note says so
                    run.metrics |= search(path, name)
    return runs


@dataclass
class Row:
    """A row of the table: a run, or the mean over a group of them."""

    runs: Sequence[RunFacts]
    group: seeds.Group | None = None  # None: of one run

    def value(self, name: str) -> Any:
        """Returns the value of a column: the mean of numbers, of others the one that all have."""
        values = [_values(run).get(name) for run in self.runs]
        same = all(value == values[0] for value in values)
        return values[0] if same else json_value(seeds.mean(values))

    def facts(self) -> dict[str, Any]:
        """Returns the JSON values of the row: those of the run, or the means and deviations."""
        if self.group is None:
            run = self.runs[0]
            return {**vars(run), "sessions": [vars(session) for session in run.sessions]}
        values = [{"iteration": run.iteration, "best": run.best} | run.metrics for run in self.runs]
        means = {name: seeds.mean([one.get(name) for one in values]) for name in values[0]}
        found = {name: mean for name, mean in means.items() if mean is not None}
        spreads = {name: seeds.deviation([one[name] for one in values]) for name in found}
        return {
            "name": self.group.name,
            "runs": [run.name for run in self.runs],
            "unfinished": self.group.num_unfinished,
            "experiment": self.runs[0].experiment,
            "differs": self.group.setting,
            "mean": {name: json_value(mean) for name, mean in found.items()},
            "deviation": spreads,
        }

    def cells(self) -> dict[str, str]:
        """Returns the texts of all columns."""
        first = self.runs[0]
        columns = [_values(run) for run in self.runs]
        cells = {key: seeds.mean_text([one.get(key) for one in columns]) for key in columns[0]}
        limit = f"/{first.max_iteration}" if first.max_iteration else ""
        losses = {n: text for n, text in self._metrics("train").items() if n.endswith("loss")}
        same_code = len({(run.commit, run.dirty) for run in self.runs}) == 1
        cells |= {
            "iteration": f"{cells['iteration']}{limit}",
            "test": _joined(self._metrics("test")),
            "loss": losses.get("loss", _joined(losses)),
            "commit": f"{(first.commit or '')[:7]}{'*' * first.dirty}" if same_code else "",
        }
        if self.group is None:
            age = str(datetime.timedelta(seconds=round(first.age)))
            return cells | {"age": age, "differs in": first.note or _joined(first.differs)}
        differs = _joined(self.group.setting)
        name = self.group.name
        return cells | {"run": name, "age": "", seeds.SEED: "", "differs in": differs}

    def _metrics(self, word: str) -> dict[str, str]:
        """Returns the texts of the metrics of a word, `test/accuracy` as `accuracy`."""
        return {
            name.partition("/")[2]: seeds.mean_text([run.metrics.get(name) for run in self.runs])
            for name in self.runs[0].metrics
            if name.startswith(f"{word}/")
        }


def _usual_columns(runs: Sequence[RunFacts]) -> list[str]:
    has_test = any(name.startswith("test/") for run in runs for name in run.metrics)
    return [name for name in _COLUMNS if name != "test" or has_test]


def print_table(blocks: Iterable[Sequence[Row]], columns: Sequence[str]) -> None:
    """Prints blocks of rows, with an empty line between them; a column may be a config value."""
    lines = [[_row(row, columns) for row in block] for block in blocks if block]
    widths = [
        max(map(cell_len, column)) for column in zip(columns, *itertools.chain(*lines), strict=True)
    ]
    for number, block in enumerate(lines):
        for row in [columns, *block] if number == 0 else [[], *block]:
            cells = [set_cell_size(cell, width) for cell, width in zip(row, widths, strict=False)]
            print("  ".join(cells).rstrip())


def _row(row: Row, columns: Sequence[str]) -> list[str]:
    cells = row.cells()
    texts = [printable(cells.get(name, "")) for name in columns]
    return [
        text if cell_len(text) <= _WIDTH else shown(f"{set_cell_size(text, _WIDTH)}…")
        for text in texts
    ]


def _check_columns(option: str, names: Sequence[str], runs: Sequence[RunFacts]) -> None:
    """Raises a ValueError if no run has a column, a metric or a config value of a name."""
    known = {*_COLUMNS}.union(*map(_values, runs))
    for name in names:
        if name not in known:
            hint = f" Expected {', '.join(_COLUMNS)}, a metric or a config value."
            hint = did_you_mean(name, sorted(known), otherwise=hint)
            if "," in name:
                hint = f" Expected spaces between the names: {name.replace(',', ' ')}."
            raise ValueMistake(f"{option}: unknown column {name!r}.{hint}")


def _values(run: RunFacts) -> dict[str, Any]:
    """Returns the values of all columns; `accuracy` is that of `valid`, else of `train`."""
    short = {name.partition("/")[2]: value for name, value in sorted(run.metrics.items())}
    columns = {name: vars(run).get(name) for name in _COLUMNS}
    # `run` is called `name` in --json; a metric or a key of this name comes first.
    named = {"name": run.name, **short, **run.metrics, **run.config}
    return {**named, **columns, "run": run.name}


def _sort_key(row: Row, name: str) -> tuple[int, Any]:
    """Sorts numbers before texts; what is missing is (0, 0)."""
    value = row.value(name)
    if isinstance(value, (bool, int, float)):
        return 1, value
    return (0, 0) if value in (None, "") else (2, str(value))


def _joined(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
