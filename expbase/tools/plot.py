"""Curves of runs as a picture, from metrics.jsonl: several runs in one picture, no browser.

Each metric has its axes; runs have colours. The thick line of a training metric is its
average, with weights that fall by --smooth from point to point.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.record.meter import METRICS
from expbase.tools import add_tool
from expbase.tools.runs import find, metric_lines, printable

Curve = dict[int, float]  # value by iteration


def curves(run: Path) -> dict[str, Curve]:
    """The curves of a run by the names of the metrics; only finite numbers are points.

    Raises:
        ValueError: It has no metrics.jsonl, or no numbers in it.
    """
    path = run / METRICS
    found: dict[str, Curve] = {}
    for line in metric_lines(run):
        for name, value in line.items():
            if "/" in name and not isinstance(value, str):  # "nan", "inf"
                found.setdefault(name, {})[line["iteration"]] = value
    if not found:
        raise ValueError(
            f"{path}: no metrics; expected the output directory of a run that has logged something."
        )
    return found


def chosen(found: Iterable[Mapping[str, Curve]], wanted: Sequence[str]) -> list[str]:
    """The full names of the metrics to draw: those that end in a wanted name, else the usual.

    Raises:
        ValueError: No run has a metric of such a name.
    """
    names = dict.fromkeys(name for run in found for name in run)
    if not wanted:
        return [n for n in names if not n.startswith(("speed/", "train/lr"))] or [*names]
    picked: list[str] = []
    for word in wanted:
        fitting = [name for name in names if f"/{name}".endswith(f"/{word}")]
        if not fitting:
            raise ValueError(f"--metrics: {word!r} given; expected some of {', '.join(names)}.")
        picked += fitting
    return list(dict.fromkeys(picked))


def draw(runs: Mapping[str, Mapping[str, Curve]], names: Sequence[str], smooth: float) -> Any:
    """A matplotlib figure of metrics, by their names, of runs, by theirs."""
    # Here, and not at the top: these two take a second, and no other tool needs them.
    from matplotlib.figure import Figure
    from pandas import Series

    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")
    drawn: dict[str, Any] = {}  # a line of each run, for the legend
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, number)
        for index, run in enumerate(runs):
            curve = Series(runs[run].get(name, {}), dtype=float)
            colour = f"C{index % 10}"
            if name.startswith("train/") and smooth:
                axes.plot(curve, color=colour, alpha=0.25, linewidth=0.8)
                curve = curve.ewm(alpha=1 - smooth).mean()
            if len(curve):
                marker = "o" if len(curve) == 1 else None
                (drawn[run],) = axes.plot(curve, color=colour, marker=marker)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        # Lines and names are passed: of itself matplotlib leaves out a name that begins with _.
        place: Any = {"loc": "outside upper center", "ncols": min(len(drawn), 4)}
        figure.legend([*drawn.values()], [*drawn], **place)
    return figure


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if a run has no such curve").add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs, or above them")
    add("--output", type=Path, default=Path("curves.png"), metavar="FILE",
        help="the picture: .png, .svg or .pdf (default: curves.png)")  # fmt: skip
    add("--metrics", nargs="+", default=[], metavar="NAME",
        help="loss, valid/accuracy … (default: all but speeds and rates)")  # fmt: skip
    add("--smooth", type=float, default=0.6, metavar="WEIGHT", help="0: not at all (default: 0.6)")


def _runs_at(path: Path) -> list[Path]:
    """The path itself, if it is a run's; else all below it that have logged something."""
    below = find(path) if path.is_dir() else []
    return [run for run in below if (run / METRICS).is_file()] or [path]


def main(args: argparse.Namespace) -> int:
    found = {str(run): curves(run) for path in args.runs for run in _runs_at(path)}
    figure = draw(found, chosen(found.values(), args.metrics), args.smooth)
    figure.savefig(args.output, dpi=120)
    print(printable(str(args.output)))
    return 0
