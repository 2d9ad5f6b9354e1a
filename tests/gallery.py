"""The pictures of docs/gallery.md, from the runs that the proof of experiments leaves.

    python tests/proofs/experiments.py --rows --keep runs
    python tests/gallery.py runs [digits …]

What an experiment has put on the board is the last picture of that name in VisualDL's records; for
the others `python -m expbase plot` draws their curves. Look at each of them afterwards.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

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
CURVES = {
    "digits": "loss lr valid/accuracy",
    "charlm": "loss valid/bits_per_character valid/trigram_bits_per_character",
    "multitask": "tags_loss valid/tags_accuracy valid/kinds_accuracy",
    "ctr": "loss valid/auc valid/bayes_auc",
    "gan": "d_loss valid/modes valid/quality",
}
WIDTH = 1000  # pixels at most


def on_the_board(run: Path, name: str) -> Image.Image:
    """Returns the last picture of a name in a run's records."""
    from visualdl import LogReader  # here: it takes a second

    found = [
        record
        for path in sorted(run.glob("vdlrecords.*"))
        for record in LogReader(file_path=str(path)).get_data("image", name)
    ]
    last = max(found, key=lambda record: record.id)
    return Image.open(io.BytesIO(last.image.encoded_image_string)).convert("RGB")


def curves(run: Path, metrics: str) -> Image.Image:
    """Returns the curves of a run."""
    path = FOLDER / "curves.png"
    words = ["plot", run.name, "--output", str(path), "--metrics", *metrics.split()]
    subprocess.run([sys.executable, "-m", "expbase", *words], cwd=run.parent, check=True)
    picture = Image.open(path).convert("RGB")
    path.unlink()
    return picture


def main(runs: Path, names: Iterable[str]) -> None:
    """Makes the pictures of these experiments."""
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        run = runs / name
        shown = ON_THE_BOARD.get(name)
        picture = curves(run, CURVES[name]) if shown is None else on_the_board(run, shown)
        picture.thumbnail((WIDTH, WIDTH))
        path = FOLDER / f"{name.replace(', ', '_')}.png"
        picture.quantize(64).save(path, optimize=True)
        print(f"{path.name}: {picture.size[0]} x {picture.size[1]}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*ON_THE_BOARD, *CURVES])
