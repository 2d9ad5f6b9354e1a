"""Scripts as other people write them: killed twice and continued, and nothing is to be said.

Each of tests/proofs/manners runs straight, and again in three starts, of which two are killed. It
must end with the same weights, accumulators and logged numbers, and no start may have a warning.

    python tests/proofs/manners.py [--only WORD]
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from compare import last_checkpoint, logged
from kinds import TELLING, fork, redirect

from expbase import ExperimentBase

SCRIPTS = sorted((Path(__file__).parent / "manners").glob("*.py"))
KILLS = (7, 16)  # the iterations of two starts
SETTINGS = {"max_iteration": 20, "save_interval": 4, "valid_interval": 5, "log_interval": 1}
_LONG_SECONDS = 120  # that no start takes


def start(script: Path, output: Path, dies_in: int = 0) -> int:
    """One start in a fork, maybe killed in an iteration; how it ended, as os.waitpid has it."""
    return os.waitpid(fork(lambda: _run(script, output, dies_in)), 0)[1]


def _run(script: Path, output: Path, dies_in: int) -> None:
    signal.alarm(_LONG_SECONDS)
    redirect(output.with_suffix(".said"))
    for name in ("log", "read_batch"):  # of which each of them calls one in an update
        setattr(ExperimentBase, name, _deadly(getattr(ExperimentBase, name), dies_in))
    words = [f"training.{name}={value}" for name, value in SETTINGS.items()]
    sys.argv = [str(script), "--output", str(output), "--device", "cpu", *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)


def _deadly(method: Any, dies_in: int) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.iteration == dies_in and self.internals.phase == "train":
            saved_at = (dies_in - 1) // SETTINGS["save_interval"] * SETTINGS["save_interval"]
            saved = Path(self.checkpoint_dir) / f"step-{saved_at:08d}"
            deadline = time.monotonic() + _LONG_SECONDS / 2
            while not saved.exists() and time.monotonic() < deadline:
                time.sleep(0.002)  # it is written in the background
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **options)

    return call


def problems(script: Path, folder: Path) -> list[str]:
    """What is wrong with a script; nothing, most likely."""
    straight, run = folder / "straight", folder / "run"
    found = []
    codes = [start(script, straight), *(start(script, run, dies) for dies in KILLS)]
    codes.append(start(script, run))
    if codes != [0, signal.SIGKILL, signal.SIGKILL, 0]:
        said = [(folder / f"{name}.said").read_text().strip() for name in ("straight", "run")]
        return [f"ended with {codes}", *(line for text in said for line in text.splitlines()[-3:])]
    for output in (straight, run):
        lines = (output / "worker_0.log").read_text().splitlines()
        found += [f"alarm: {line}" for line in lines if TELLING.search(line)]
    if logged(run) != logged(straight):
        pairs = zip(logged(run), logged(straight), strict=False)
        found.append(
            f"logged {next((pair for pair in pairs if pair[0] != pair[1]), 'other lines')}"
        )
    one, other = (_tensors(last_checkpoint(output)) for output in (run, straight))
    return found + [f"{name} differs" for name in other if one.get(name) != other[name]]


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    """The files of layers and optimizers; other values may be times."""
    files = checkpoint.glob("*.safetensors")
    return {path.name: path.read_bytes() for path in files if not path.name.startswith("@")}


def main() -> int:
    """Prints what is wrong and the counts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="scripts with this word")
    args = parser.parse_args()
    scripts = [script for script in SCRIPTS if args.only in script.stem]
    exact = 0
    for script in scripts:
        folder = Path(tempfile.mkdtemp(prefix="expbase-manners-"))
        try:
            wrong = problems(script, folder)
        finally:
            shutil.rmtree(folder)
        exact += not wrong
        print(f"{'FAILED' if wrong else 'exact'}  {script.stem}", flush=True)
        for text in wrong:
            print(f"        {text}", flush=True)
    print(f"{exact} of {len(scripts)} scripts continue exactly, without a warning")
    return int(exact < len(scripts) or not scripts)


if __name__ == "__main__":
    sys.exit(main())
