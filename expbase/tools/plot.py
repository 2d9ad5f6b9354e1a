"""Curves of runs as a picture, from metrics.jsonl: several runs in one picture, no browser.

Each metric has its axes; runs have colours, and ten of them the same dashes. The thin line of a
training metric has its numbers; the thick one is smoothed: at each point it is the line that fits
the points around it best, whose weights fall by --smooth from one to the next. Learning rates and
validations are as they are.

Runs that differ in training.seed alone, and have ended by themselves, become one line: their mean,
at the iterations that all of them have, in a band of one standard deviation (n - 1) to each side.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expbase.base.errors import ValueMistake
from expbase.record.metrics import METRICS, metric_lines
from expbase.tools import add_tool, seeds
from expbase.tools.runs import RunFacts, find, find_differences, printable, read_run

Curve = dict[int, float]  # value by iteration
Series = Sequence[Mapping[str, Curve]]  # of one run its curves by metric; of several the mean
_FORMATS = (".png", ".svg", ".pdf")
_DASHES = ("-", "--", ":", "-.")  # each for ten runs: matplotlib has ten colours


def curves(run: Path) -> dict[str, Curve]:
    """Returns the curves of a run by the names of the metrics; their points are finite.

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
        raise ValueMistake(
            f"{path}: no metrics; expected the output directory of a run that has logged something."
        )
    return found


def chosen(found: Iterable[Mapping[str, Curve]], wanted: Sequence[str]) -> list[str]:
    """Returns the full names of the metrics that end in a wanted name, else the usual ones.

    Raises:
        ValueError: No run has a metric of such a name.
    """
    names = dict.fromkeys(name for run in found for name in run)
    if not wanted:
        return [name for name in names if not name.startswith("speed/")] or [*names]
    picked: list[str] = []
    for word in wanted:
        fitting = [name for name in names if f"/{name}".endswith(f"/{word}")]
        if not fitting:
            raise ValueMistake(f"--metrics: {word!r} given; expected some of {', '.join(names)}.")
        picked += fitting
    return list(dict.fromkeys(picked))


def smoothed(values: Sequence[float], weight: float) -> Any:
    """Returns a smooth line through values: at each of them the fit of a line to those around it.

    A mean would lie above all values at the end of a curve that falls.

    Args:
        values: At equal distances.
        weight: By which that of a value is multiplied at each step of distance; 0: not smoothed.
    """
    if len(values) < 3 or not weight:
        return values
    reach = min(len(values) - 1, math.ceil(math.log(1e-4, weight)))
    offsets = np.arange(reach, -reach - 1, -1)

    def around(numbers: Any, power: int) -> Any:
        """Returns, at each place, the sum of the numbers around it by weight and distance."""
        kernel = weight ** abs(offsets) * offsets**power
        return np.convolve(numbers, kernel)[reach : reach + len(values)]

    ones = np.ones(len(values))
    total, first, second = (around(ones, power) for power in range(3))
    heights = second * around(values, 0) - first * around(values, 1)
    return heights / (second * total - first**2)


def draw(series: Mapping[str, Series], names: Sequence[str], smooth: float) -> Any:
    """Draws curves of runs, and of groups of runs the mean in a band.

    Args:
        series: Runs and groups, by their texts in the legend.
        names: Of the metrics; each has its axes.
        smooth: The weight for metrics of training; see `smoothed`.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure  # here: it takes a second, and no other tool needs it

    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")
    drawn: dict[str, Any] = {}  # a line of each, for the legend
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, number)
        weight = smooth if _is_noisy(name) else 0.0
        for index, (label, runs) in enumerate(series.items()):
            found = [run[name] for run in runs if name in run]
            # Where a run has no such numbers there is no mean of all: the others are drawn singly.
            is_whole = len(found) == len(runs) and any(_shared(found))
            for curves in [found] if is_whole else [[curve] for curve in found]:
                style = f"C{index % 10}", _DASHES[index // 10 % len(_DASHES)]
                drawn[label] = _draw_line(axes, curves, style, weight)
        axes.set_title(name, loc="left", fontsize=10)
        if weight:
            axes.set_title(f"thick: smoothed by {smooth:g}", loc="right", fontsize=8, color="0.4")
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    # Lines and names are passed: of itself matplotlib leaves out a name that begins with _.
    longest = max(map(len, drawn), default=0)
    beside = max(72 * columns // (longest + 6), 1)  # of 12 characters an inch, and a line each
    place: Any = {"loc": "outside upper center", "ncols": min(len(drawn), 4, beside)}
    figure.legend([*drawn.values()], [*drawn], **place)
    return figure


def _draw_line(axes: Any, curves: Sequence[Curve], style: tuple[str, str], weight: float) -> Any:
    """Draws the mean of curves, and of several a band; returns the line."""
    colour, dashes = style
    at = _shared(curves)
    numbers = np.array([[curve[iteration] for iteration in at] for curve in curves])
    middle = numbers.mean(axis=0)
    if weight:
        axes.plot(at, middle, color=colour, alpha=0.25, linewidth=0.8)
        middle = smoothed(middle, weight)
    marker = "o" if len(at) == 1 else None
    (line,) = axes.plot(at, middle, color=colour, linestyle=dashes, marker=marker)
    if len(curves) > 1:
        # A fit to falling numbers may end below 0.
        spread = np.maximum(smoothed(numbers.std(axis=0, ddof=1), weight), 0.0)
        if len(at) == 1:
            axes.errorbar(at, middle, spread, fmt="none", ecolor=colour, capsize=4)
        else:
            low, high = middle - spread, middle + spread
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    return line


def _shared(curves: Sequence[Curve]) -> list[int]:
    """Returns the iterations that all curves have."""
    return [at for at in curves[0] if all(at in curve for curve in curves)] if curves else []


@contextlib.contextmanager
def fonts_for(text: str) -> Iterator[None]:
    """Draws in the block also with the installed font that has most of the text's letters.

    What no font has becomes a box, without a warning for each letter.
    """
    import matplotlib  # here: it takes a second, and no other tool needs it
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    families = [*matplotlib.rcParams["font.family"]]
    if letters := {ord(letter) for letter in text if not letter.isascii()}:
        most = 0
        for font in font_manager.fontManager.ttflist:
            with contextlib.suppress(OSError, RuntimeError):  # it is gone, or damaged
                count = len(letters & FT2Font(font.fname).get_charmap().keys())
                # A "last resort" has a box for each letter there is.
                if count > most and "Last Resort" not in font.name:
                    most = count
                    families[1:] = [font.name]
    with matplotlib.rc_context({"font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        yield


def _is_noisy(name: str) -> bool:
    """Returns whether a metric is one of training, and no learning rate."""
    return name.startswith("train/") and not f"{name}/".startswith("train/lr/")


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0 drawn, 1 an error", "RUN [RUN ...] [options]").add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs, or above them")
    add("--output", type=Path, default=Path("curves.png"), metavar="FILE",
        help="the picture: .png, .svg or .pdf (default: curves.png)")  # fmt: skip
    add("--metrics", nargs="+", default=[], metavar="NAME",
        help="loss, valid/accuracy … (default: all but speeds)")  # fmt: skip
    add("--smooth", type=float, default=0.6, metavar="WEIGHT",
        help="from 0, not at all, to less than 1 (default: 0.6)")  # fmt: skip
    add("--single", action="store_true",
        help="each run by itself, also those that differ in training.seed alone")  # fmt: skip


def _runs_at(path: Path) -> list[Path]:
    """Returns the runs at and below a path that have logged a line; if there is none, the path."""
    return [run for run in find(path) if (run / METRICS).is_file()] or [path]


def _grouped(
    found: Mapping[str, Mapping[str, Curve]], runs: Sequence[RunFacts]
) -> dict[str, Series]:
    """Returns the runs and the groups over seeds that are drawn, by the texts of the legend."""
    find_differences(runs)
    groups = {run.name: group for group in seeds.groups(runs) for run in group.runs}
    several = len({run.experiment for run in runs}) > 1
    series: dict[str, Series] = {}
    for run in runs:
        group = groups.get(run.name)
        if group is None:
            series[run.name] = [found[run.name]]
        elif run is group.runs[0]:  # its place in the order is that of its first run
            words = [f"{key}={value}" for key, value in group.setting.items()]
            words = [run.experiment, *words] if several or not words else words
            label = f"mean ± deviation of {len(group.runs)} seeds: {' '.join(words)}"
            # An older config may lack the key by which two groups differ.
            label += f", {run.name} …" if label in series else ""
            series[label] = [found[member.name] for member in group.runs]
    return series


def main(args: argparse.Namespace) -> int:
    if not 0 <= args.smooth < 1:
        raise ValueMistake(f"--smooth: {args.smooth:g} given; expected 0 or more, and less than 1.")
    if args.output.suffix.lower() not in _FORMATS:
        raise ValueMistake(f"--output: {args.output} given; expected {', '.join(_FORMATS)}.")
    paths = [run for path in args.runs for run in _runs_at(path)]
    named = {str(path) if path.name else path.resolve().name: path for path in paths}
    found = {name: curves(path) for name, path in named.items()}
    names = chosen(found.values(), args.metrics)
    series: dict[str, Series] = {name: [run] for name, run in found.items()}
    if not args.single:
        series = _grouped(found, [read_run(path, name) for name, path in named.items()])
    output = args.output.absolute()
    how = "replaced" if output.exists() else "written"
    with fonts_for("".join([*series, *names])):
        draw(series, names, args.smooth).savefig(output, dpi=120)
    print(printable(f"{how}: {output}"))
    return 0
