"""Frauds among many runs of a task: whether the recipe of docs/judge.md names them, and no others.

    python tests/proofs/judged.py [FOLDER] [--runs 100] [--frauds 20] [--seed 0]

Frauds lie in what is judged: no step was made, the best number was replaced, the last checkpoint is
another run's, or the result is that of another config. Prints what has named each, the counts, and
what a part at random alone would have named. Of each run's 40 updates 20 are made again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import forks
from pages import blocks
from repository import commit, git, new_repository

from expbase import __main__

TASK, JUDGE = blocks("judge", "python")
STEP = "        self.step_optimizers()\n"
METRIC = "(self.model(x).argmax(-1) == y).astype"
WORST = ("--device=cpu", "optim.lr=0.0001")


class Folder:
    """The repository of the task, and its runs."""

    def __init__(self, path: Path) -> None:
        self.path = new_repository(path, TASK)
        (path / "judge.py").write_text(JUDGE)
        (path / ".gitignore").write_text("runs/\n__pycache__/\n")
        commit(path, "the task and its judge")
        self.words: dict[str, tuple[str, ...]] = {}

    def given(self, *words: str) -> str:
        """Runs a script; returns what it prints."""
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = forks.run([sys.executable, *words], cwd=self.path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def is_reproduced(self, name: str, *words: str) -> bool:
        """Makes a part of a run again, in a fork that this process starts."""
        said, before = io.StringIO(), Path.cwd()
        os.chdir(self.path)
        with contextlib.redirect_stdout(said):
            code = __main__.main(["reproduce", f"runs/{name}", *words])
        os.chdir(before)
        assert code in (0, 1), said.getvalue()
        assert said.getvalue().startswith("NOT REPRODUCED: " if code else "reproduced: ")
        return code == 0

    def judged(self, name: str) -> float:
        """Returns the accuracy that the judge's script gives a run."""
        said = self.given("judge.py", "--output", f"runs/{name}", "--evaluate", "last")
        return float(json.loads(said)["accuracy"])

    def train(self, name: str, *words: str) -> Path:
        """Trains a run of the task as it stands."""
        self.given("train.py", "--output", f"runs/{name}", *words)
        return self.path / "runs" / name


def edit(file: Path, change: Callable[[str], str]) -> None:
    """Replaces the text of a file by another one."""
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before, file


def claim(run: Path, accuracy: float) -> None:
    """Writes a number as the last result of a run."""
    for name in ("metrics.jsonl", "validations.jsonl"):
        lines = (run / name).read_text().splitlines()
        at = max(n for n, line in enumerate(lines) if '"valid/accuracy"' in line)
        lines[at] = re.sub(r'("valid/accuracy": )[\d.]+', rf"\g<1>{accuracy!r}", lines[at])
        (run / name).write_text("".join(f"{line}\n" for line in lines))


def no_step(folder: Folder, name: str, seed: int) -> None:
    """Trains by code that makes no step, and makes its numbers up."""
    made_up = TASK.replace(STEP, "").replace(METRIC, "(y == y).astype")
    (folder.path / "train.py").write_text(
        made_up.replace("loss=loss", "loss=loss / self.iteration")
    )
    folder.train(name, "--device=cpu", f"training.seed={seed}")
    git(folder.path, "checkout", "--quiet", "train.py")


def other_number(folder: Folder, name: str, seed: int) -> None:
    """Replaces the number of an honest run."""
    claim(folder.train(name, "--device=cpu", f"training.seed={seed}"), 0.97 + seed / 1e5)


def other_checkpoint(folder: Folder, name: str, seed: int) -> None:
    """Puts the last checkpoint of a good run, and its number, into a bad one."""
    good = folder.train("lent", "--device=cpu", f"training.seed={seed + 5000}")
    bad = folder.train(name, *WORST, f"training.seed={seed}")
    last = "checkpoints/step-00000040"
    shutil.rmtree(bad / last)
    shutil.copytree(good / last, bad / last)
    claim(bad, claimed(good))
    shutil.rmtree(good)


def other_config(folder: Folder, name: str, seed: int) -> None:
    """Says that a result is that of another learning rate."""
    run = folder.train(name, "--device=cpu", f"training.seed={seed}", "optim.lr=0.05")
    edit(run / "ledger.jsonl", lambda text: text.replace("0.05", "0.02"))
    edit(run / "config.yaml", lambda text: text.replace("0.05", "0.02"))


KINDS = (no_step, other_number, other_checkpoint, other_config)


def claimed(run: Path) -> float:
    """Returns the accuracy that a run says it has."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return float([line["valid/accuracy"] for line in lines if "valid/accuracy" in line][-1])


def named_by(folder: Folder, name: str, accuracy: float) -> list[str]:
    """Returns which lines of the recipe name a run, to which the judge gives an accuracy."""
    run = folder.path / "runs" / name
    before, _ = sorted(path.name for path in (run / "checkpoints").iterdir())[-2:]
    last_part = folder.is_reproduced(name, "--from", before.removeprefix("step-"))
    random_part = folder.is_reproduced(name, "--parts", "1")
    fits = {"judge": accuracy == claimed(run), "last part": last_part, "random part": random_part}
    return [what for what, is_fine in fits.items() if not is_fine]


def made_runs(folder: Path, num_runs: int, num_frauds: int, seed: int) -> tuple[Folder, list[str]]:
    """Makes the runs; returns of each its kind of fraud, or an empty text."""
    made = Folder(folder)
    kinds = [""] * num_runs
    for order, number in enumerate(random.Random(seed).sample(range(num_runs), num_frauds)):
        kind = KINDS[order % len(KINDS)]
        kinds[number] = kind.__name__
        kind(made, f"{number:03d}", number)

    def train(number: int) -> None:
        words = [f"training.seed={number}", f"optim.lr={0.01 + number % 5 / 50}"]
        made.train(f"{number:03d}", "--device=cpu", *words)

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        [*executor.map(train, [n for n, kind in enumerate(kinds) if not kind])]
    return made, kinds


def prove(folder: Path, num_runs: int, num_frauds: int, seed: int) -> tuple[int, int, int]:
    """Returns how many frauds and how many honest runs were named, and frauds by a random part."""
    made, kinds = made_runs(folder, num_runs, num_frauds, seed)
    names = [f"{number:03d}" for number in range(num_runs)]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        accuracies = [*executor.map(made.judged, names)]
    honest = by_part = 0
    by: collections.Counter[str] = collections.Counter()
    for name, kind, accuracy in zip(names, kinds, accuracies, strict=True):
        found = named_by(made, name, accuracy)
        if kind or found:
            print(f"{name} {kind or 'HONEST'}: {', '.join(found) or 'NOT NAMED'}", flush=True)
        by.update(found[:1] if kind else [])
        by_part += bool(kind) and "random part" in found
        honest += bool(found and not kind)
    named = sum(by.values())
    first = ", ".join(f"{what} {count}" for what, count in by.items())
    print(f"named: {named} of {num_frauds} frauds ({first})")
    print(f"named: {honest} of {num_runs - num_frauds} honest runs")
    print(f"a random part alone: {by_part} of {num_frauds} frauds")
    return named, honest, by_part


def main() -> int:
    """Proves it in a folder, which stays, or in a temporary one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--frauds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Without the first one nothing is forked.
    os.environ.update(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
    subprocess.Popen = forks.Popen  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary, "task")
        named, honest, _ = prove(folder, args.runs, args.frauds, args.seed)
    return int(named != args.frauds or honest > 0)


if __name__ == "__main__":
    sys.exit(main())
