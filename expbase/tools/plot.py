"""Curves of runs as a picture, from metrics.jsonl: several runs in one picture, no browser.

Each metric has its axes; runs have colours. The thin line of a training metric has its numbers; the
thick one is smoothed: at each point it is the line that fits the points around it best, whose
weights fall by --smooth from one to the next. Learning rates and validations are as they are.
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

from expbase.record.meter import METRICS
from expbase.tools import add_tool
from expbase.tools.runs import find, metric_lines, printable

Curve = dict[int, float]  # value by iteration
_FORMATS = (".png", ".svg", ".pdf")


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
        raise ValueError(
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
            raise ValueError(f"--metrics: {word!r} given; expected some of {', '.join(names)}.")
        picked += fitting
    return list(dict.fromkeys(picked))


def smoothed(values: Sequence[float], weight: float) -> Any:
    """Returns a line through the values: at each of them the fit to the ones around it.

    A mean of them would lie above all of them at an end of a curve that falls.
    """
    if len(values) < 3 or not weight:
        return values
    reach = min(len(values) - 1, math.ceil(math.log(1e-4, weight)))
    offsets = np.arange(reach, -reach - 1, -1)

    def around(numbers: Any, power: int) -> Any:
        """Sums the numbers round each place, by their weights and distances."""
        kernel = weight ** abs(offsets) * offsets**power
        return np.convolve(numbers, kernel)[reach : reach + len(values)]

    ones = np.ones(len(values))
    total, first, second = (around(ones, power) for power in range(3))
    heights = second * around(values, 0) - first * around(values, 1)
    return heights / (second * total - first**2)


def draw(runs: Mapping[str, Mapping[str, Curve]], names: Sequence[str], smooth: float) -> Any:
    """Draws metrics, by their names, of runs, by theirs; returns a matplotlib figure."""
    from matplotlib.figure import Figure  # here: it takes a second, and no other tool needs it

    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")
    drawn: dict[str, Any] = {}  # a line of each run, for the legend
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, number)
        is_smoothed = smooth > 0 and _is_noisy(name)
        for index, run in enumerate(runs):
            curve = runs[run].get(name, {})
            values: Any = [*curve.values()]
            colour = f"C{index % 10}"
            if is_smoothed:
                axes.plot([*curve], values, color=colour, alpha=0.25, linewidth=0.8)
                values = smoothed(values, smooth)
            if len(curve):
                marker = "o" if len(curve) == 1 else None
                (drawn[run],) = axes.plot([*curve], values, color=colour, marker=marker)
        axes.set_title(name, loc="left", fontsize=10)
        if is_smoothed:
            axes.set_title(f"thick: smoothed by {smooth:g}", loc="right", fontsize=8, color="0.4")
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    # Lines and names are passed: of itself matplotlib leaves out a name that begins with _.
    place: Any = {"loc": "outside upper center", "ncols": min(len(drawn), 4)}
    figure.legend([*drawn.values()], [*drawn], **place)
    return figure


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
    """Returns whether it is a metric of training, and no learning rate."""
    return name.startswith("train/") and not f"{name}/".startswith("train/lr/")


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if a run has no such curve").add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs, or above them")
    add("--output", type=Path, default=Path("curves.png"), metavar="FILE",
        help="the picture: .png, .svg or .pdf (default: curves.png)")  # fmt: skip
    add("--metrics", nargs="+", default=[], metavar="NAME",
        help="loss, valid/accuracy … (default: all but speeds)")  # fmt: skip
    add("--smooth", type=float, default=0.6, metavar="WEIGHT",
        help="from 0, not at all, to less than 1 (default: 0.6)")  # fmt: skip


def _runs_at(path: Path) -> list[Path]:
    """Returns the path itself, if it is a run's; else all below it that have logged a line."""
    below = find(path) if path.is_dir() else []
    return [run for run in below if (run / METRICS).is_file()] or [path]


def main(args: argparse.Namespace) -> int:
    if not 0 <= args.smooth < 1:
        raise ValueError(f"--smooth: {args.smooth:g} given; expected 0 or more, and less than 1.")
    if args.output.suffix.lower() not in _FORMATS:
        raise ValueError(f"--output: {args.output} given; expected {', '.join(_FORMATS)}.")
    paths = [run for path in args.runs for run in _runs_at(path)]
    found = {str(run) if run.name else run.resolve().name: curves(run) for run in paths}
    names = chosen(found.values(), args.metrics)
    output = args.output.absolute()
    how = "replaced" if output.exists() else "written"
    with fonts_for("".join([*found, *names])):
        draw(found, names, args.smooth).savefig(output, dpi=120)
    print(printable(f"{how}: {output}"))
    return 0
