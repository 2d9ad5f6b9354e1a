"""The pictures of docs/gallery.md, from the runs that the proof of experiments leaves.

    python tests/proofs/experiments.py --rows --keep runs [--only digits]
    python tests/gallery.py runs [digits …]

What an experiment has put on the board is the last picture of that name in VisualDL's records; for
the others it is their curves there, and the last text. Look at each of them afterwards.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

FOLDER = Path(__file__).parents[1] / "docs" / "gallery"
# By the run: what the picture is named on the board.
ON_THE_BOARD = {
    "cifar": "mistakes",
    "flow": "galaxy",
    "cartpole": "episode",
    "pinn": "solution",
    "pinn, inverse": "solution",
}
# The curves of each panel; `text` is a panel with the text of that name.
CURVES: dict[str, Sequence[str]] = {
    "line": ("train/loss", "valid/error"),
    "digits": ("train/loss", "valid/accuracy"),
    "charlm": ("valid/bits_per_character valid/trigram_bits_per_character", "text"),
    "multitask": ("train/tags_loss train/kinds_loss", "valid/tags_accuracy valid/kinds_accuracy"),
    "ctr": ("train/loss", "valid/auc valid/bayes_auc"),
    "gan": ("train/d_loss train/g_loss", "valid/modes", "valid/quality"),
}
LOGARITHMIC = ("line",)
WIDTH = 1000  # pixels at most
NUM_COLOURS = 200


def file_of(name: str) -> str:
    """Returns the name of the picture of a run."""
    return f"{name.replace(', ', '_')}.png"


def records(run: Path, kind: str, tag: str) -> list[Any]:
    """Returns what a run has put on the board under a name, oldest first."""
    from visualdl import LogReader  # here: it takes a second

    found = [
        record
        for path in sorted(run.glob("vdlrecords.*"))
        for record in LogReader(file_path=str(path)).get_data(kind, tag)
    ]
    return sorted(found, key=lambda record: record.id)


def on_the_board(run: Path, name: str) -> Image.Image:
    """Returns the last picture of a name."""
    return opened(records(run, "image", name)[-1].image.encoded_image_string)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def curves(run: Path, panels: Sequence[str]) -> Image.Image:
    """Returns the curves of a run; those that are compared lie in one panel."""
    figure = Figure(figsize=(8, 2.6), layout="constrained", dpi=WIDTH / 8)
    for axes, tags in zip(figure.subplots(1, len(panels)), panels, strict=True):
        if tags == "text":
            write(axes, records(run, "text", tags)[-1])
            continue
        for tag in tags.split():
            points = [(record.id, record.value) for record in records(run, "scalar", tag)]
            axes.plot(*zip(*points, strict=True), marker=".", label=tag.partition("/")[2])
        axes.set(xlabel="iteration", title=" " if " " in tags else tags)
        axes.grid(alpha=0.3)
        if run.name in LOGARITHMIC:
            axes.set_yscale("log")
        if " " in tags:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    file = io.BytesIO()
    figure.savefig(file)
    return opened(file.getvalue())


def write(axes: Any, record: Any) -> None:
    """Writes a text where curves would be."""
    lines = record.text.encoded_text_string.strip("\n").splitlines()
    wrapped = [textwrap.fill(line, 52, drop_whitespace=False) for line in lines]
    axes.set(title=f"text, after iteration {record.id}", xticks=(), yticks=())
    place = {"transform": axes.transAxes, "va": "top", "family": "monospace", "fontsize": 8}
    axes.text(0.02, 0.96, "\n".join(wrapped), parse_math=False, **place)


def main(runs: Path, names: Iterable[str]) -> None:
    """Makes the pictures of these experiments."""
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        shown = ON_THE_BOARD.get(name)
        run = runs / name
        picture = on_the_board(run, shown) if shown else curves(run, CURVES[name])
        picture.thumbnail((WIDTH, WIDTH))
        path = FOLDER / file_of(name)
        picture.quantize(NUM_COLOURS).save(path, optimize=True)
        print(f"{path.name}: {picture.size[0]} x {picture.size[1]}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*ON_THE_BOARD, *CURVES])
