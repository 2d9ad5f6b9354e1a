"""Proves that a digest binds what a run is, and not how it came about.

Each experiment makes twelve updates in short: once straight; in another directory, killed by kill
-9 twice, at random moments after its first checkpoint; and, if its numbers are logged in the loop
over micro_batches, with training.shares on one process and on two. The digests must be the same.
Then a key that changes no bits, another seed, and a comment in its code must each give another one,
and what is planted in a copy of its files must be named.

    python tests/proofs/digests.py [--only charlm digits] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from small import ROOT, SMALL, given_to
from watched import Watched

from expbase.checkpoint import layout
from expbase.engine import run_digest

WITH_SHARES = ("cifar", "charlm", "digits")
LAST = "training.max_iteration=12"
LONG_SECONDS = 300.0  # that nothing here takes


class Proof:
    """The runs in a folder, outside of any repository, and what came of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.counts: Counter[tuple[str, bool]] = Counter()

    def start(self, name: str, place: str, *words: str, kill: bool = False) -> Path:
        """Starts an experiment in a folder of its own, from a copy of its code there."""
        code = self.folder / place / name
        if not code.exists():
            shutil.copytree(ROOT / "experiments" / name, code)
        output = self.folder / place / f"{name}-run"
        given = [word.replace(str(ROOT / "experiments"), str(code.parent))
                 for word in given_to(name, self.folder / "data")]  # fmt: skip
        command = [sys.executable, str(code / "train.py"), "--device", "cpu"]
        command += ["--output", str(output), *given, LAST, *words]
        watched = Watched(command, output.with_suffix(".txt"))
        before = layout.newest_iteration(output)
        deadline = time.monotonic() + LONG_SECONDS
        with watched.started() as process:
            while kill and process.poll() is None and time.monotonic() < deadline:
                if layout.newest_iteration(output) > before:
                    time.sleep(self.random.uniform(0, 0.1))
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.002)
            code_of_end = process.wait(timeout=LONG_SECONDS)
        if code_of_end not in (0, -signal.SIGKILL):
            raise RuntimeError(f"exit code {code_of_end}: {output.with_suffix('.txt')}")
        return output

    def expect(self, what: str, name: str, *, right: bool) -> None:
        """Counts, and tells what is wrong."""
        self.counts[what, right] += 1
        if not right:
            print(f"FAILED: {name}: {what}", flush=True)

    def prove(self, name: str) -> None:
        """Proves all of one experiment."""
        straight = self.start(name, "straight")
        digest = run_digest.read(straight).digest
        for _ in range(2):
            self.start(name, "killed/twice", kill=True)
        killed = self.start(name, "killed/twice")
        same = run_digest.read(killed).digest == digest
        self.expect("the same after kills, in another directory", name, right=same)
        if name in WITH_SHARES:
            ends = [
                run_digest.read(self.start(name, place, "training.shares=2", *words)).digest
                for place, words in (("one", ()), ("two", ("--nprocs", "2")))
            ]
            self.expect("the same on 1 and 2 ranks", name, right=ends[0] == ends[1])
        others = {"seed": ["training.seed=5"], "key": ["training.hang_seconds=700"], "comment": []}
        for place, words in others.items():
            if not words:
                shutil.copytree(straight.with_name(name), self.folder / place / name)
                with (self.folder / place / name / "train.py").open("a") as file:
                    file.write("# a comment\n")
            other = run_digest.read(self.start(name, place, *words)).digest
            self.expect("another one for a change", name, right=other != digest)
        self.plant(name, straight, digest)

    def plant(self, name: str, straight: Path, digest: str) -> None:
        """Changes a copy of the run in each way, and looks whether that is named."""
        for number, (change, named) in enumerate(PLANTED):
            run = shutil.copytree(straight, self.folder / f"planted-{name}-{number}")
            change(run)
            found = run_digest.problems(run, digest)
            right = any(named in problem for problem in found)
            self.expect("named, of what is planted", f"{name}, {named}: {found}", right=right)
            shutil.rmtree(run)


def step(run: Path, iteration: int) -> Path:
    return run / layout.FOLDER / layout.name_of(iteration)


def swapped(run: Path) -> None:
    """Puts the checkpoint before the last in its place."""
    shutil.rmtree(step(run, 12))
    shutil.copytree(step(run, 8), step(run, 12))


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replaces the first of a text in a file."""

    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text, (name, old)
        (run / name).write_text(text.replace(old, new, 1))

    return change


def flipped(run: Path) -> None:
    """Flips the last bit of the weights."""
    file = max(step(run, 12).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def with_source(run: Path) -> None:
    """Changes a file of the code."""
    source = next((run / "sources").rglob("*.py"))
    source.write_text(f"{source.read_text()}\n")


PLANTED: list[tuple[Callable[[Path], None], str]] = [
    (swapped, "step-00000012"),
    (flipped, ".safetensors: another one"),
    (edited("metrics.jsonl", '"train/', '"train/other_'), "metrics.jsonl train/other_"),
    (edited("validations.jsonl", '"valid/', '"valid/other_'), "validations.jsonl valid/other_"),
    (edited("ledger.jsonl", '"training.seed": 0', '"training.seed": 1'), "config: another one"),
    (with_source, " source "),
    (edited("ledger.jsonl", '"event": "start"', '"event": "other"'), ": not here"),
]


def main() -> int:
    """Prints the counts; 1 if one is not full."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SMALL, default=[*SMALL])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="digests-") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        shapes = runpy.run_path(str(ROOT / "experiments/cifar/shapes.py"))
        shapes["write_archive"](data / "shapes.tar.gz", 120)
        proof = Proof(Path(folder), args.seed)
        for name in args.only:
            proof.prove(name)
            print(name, flush=True)
    for what in dict.fromkeys(what for what, _ in proof.counts):
        right = proof.counts[what, True]
        print(f"{right} of {right + proof.counts[what, False]}: {what}")
    return int(any(not right for _, right in proof.counts))


if __name__ == "__main__":
    sys.exit(main())
