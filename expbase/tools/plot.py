"""Curves of runs as a picture, from metrics.jsonl: several runs in one picture, no browser.

Each metric has axes of its own; runs have colours. Validations are drawn as they are. For what is
logged in training the thin line is what was logged, the thick one its average over the points so
far, whose weights fall by the factor --smooth from point to point.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs
from expbase.meter import METRICS, json_lines
from expbase.run_dir import CONFIG
from expbase.tools.runs import printable

Curve = dict[int, float]  # value by iteration
_LARGEST = 1e300
_ENDINGS = (".png", ".svg", ".pdf")


def curves(run: Path) -> dict[str, Curve]:
    """The curves of a run by the names of the metrics; only finite numbers are points.

    Args:
        run: The output directory.

    Raises:
        ValueError: It has no metrics.jsonl, or nothing in it.
    """
    path = run / METRICS
    if run.is_file():
        raise ValueError(f"{run}: is a file; expected the output directory of a run.")
    if not path.exists() and (run / CONFIG).exists():
        raise ValueError(f"{path}: does not exist yet: the run has logged nothing so far.")
    if not path.exists():
        raise ValueError(f"{path}: does not exist; expected the output directory of a run.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from error
    found: dict[str, Curve] = {}
    for line in json_lines(data):  # without the torn line of a run that is writing
        iteration: Any = line.get("iteration")
        for name, value in line.items() if _is_number(iteration) else ():
            if "/" in name and _is_number(value):
                found.setdefault(name, {})[iteration] = value
    if not found:
        raise ValueError(
            f"{path}: holds no metrics{' that can be read' if data.strip() else ' yet'}; expected "
            "lines of JSON, as a run logs them."
        )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _LARGEST  # neither infinite nor nan


def chosen(found: Sequence[Mapping[str, Curve]], wanted: Sequence[str]) -> list[str]:
    """The full names of the metrics to draw: those that end in a wanted name, else the usual.

    Raises:
        ValueError: No run has a metric of such a name.
    """
    names = list(dict.fromkeys(name for run in found for name in run))
    if not wanted:
        return [n for n in names if not n.startswith(("speed/", "train/lr"))]
    picked = []
    for word in wanted:
        fitting = [name for name in names if name == word or name.endswith(f"/{word}")]
        if not fitting:
            raise ValueError(f"--metrics: {word!r} given; expected some of {', '.join(names)}.")
        picked += fitting
    return list(dict.fromkeys(picked))


def draw(runs: Mapping[str, Mapping[str, Curve]], names: Sequence[str], smooth: float) -> Any:
    """A matplotlib figure of metrics of runs.

    Args:
        runs: Their curves, by the names of the runs.
        names: The metrics, in the order of their axes.
        smooth: From 0, not at all, to below 1.
    """
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
            curve, colour = Series(runs[run].get(name, {}), dtype=float), f"C{index % 10}"
            if name.startswith("train/") and smooth and len(curve) > 2:
                axes.plot(curve, color=colour, alpha=0.25, linewidth=0.8)
                curve = curve.ewm(alpha=1 - smooth).mean()
            if len(curve):
                marker = "o" if len(curve) == 1 else None
                (drawn[run],) = axes.plot(curve, color=colour, marker=marker)
        axes.set_title(name, loc="left", fontsize=10, parse_math=False)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        # Lines and names are passed: of itself matplotlib leaves out a name that begins with _.
        place: Any = {"loc": "outside upper center", "ncols": min(len(drawn), 4)}
        for text in figure.legend([*drawn.values()], [*drawn], **place).get_texts():
            text.set_parse_math(False)  # a name may hold a $
    return figure


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "plot",
        help="the curves of runs as a picture",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0, or 1 if a run has no such curve",
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="output directories of runs")
    add("--output", type=Path, default=Path("curves.png"), metavar="FILE",
        help="the picture: .png, .svg or .pdf (default: curves.png)")  # fmt: skip
    add("--metrics", nargs="+", default=[], metavar="NAME",
        help="loss, valid/accuracy … (default: all but speeds and rates)")  # fmt: skip
    add("--smooth", type=float, default=0.6, metavar="WEIGHT", help="0: not at all (default: 0.6)")
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; returns its exit code."""
    if not 0 <= args.smooth < 1:
        raise ValueError(f"--smooth: {args.smooth} given; expected 0 or more, and below 1.")
    if args.output.suffix.lower() not in _ENDINGS:
        raise ValueError(
            f"--output: {str(args.output)!r} given; expected a name in {', '.join(_ENDINGS)}."
        )
    found = {str(run): curves(run) for run in args.runs}
    names = chosen(list(found.values()), args.metrics)
    if not names:
        raise ValueError("only speeds and rates were logged; expected --metrics to name some.")
    for run, own in found.items():
        if own.keys().isdisjoint(names):
            print(f"{run}: has none of these metrics; not drawn.", file=sys.stderr)
    figure = draw(found, names, args.smooth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that its font does not have, say
        try:
            figure.savefig(args.output, dpi=120)
        except OSError as error:
            raise ValueError(f"--output: {args.output}: {error.strerror}.") from error
    print(printable(str(args.output)))
    return 0
