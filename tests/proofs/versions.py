"""Which versions of Python and of Paddle work: an environment for each, and a table.

Each environment gets this checkout with its dependencies, or with the oldest of them that setup.cfg
allows. In it digits is trained, killed and continued (`verify`), and the tests of the core run. The
table says for each what failed first. It needs the package index, and interpreters named python3.10
and so on, on the path or in pyenv.

    python tests/proofs/versions.py [--only 3.12] [--keep DIR]
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
_CORE = (
    "arrays background checkpoint checkpointer config data encoding evaluation events experiment "
    "loop meter metrics objects optimizers pdparams rng run_dir safe_first schedule stopping "
    "training validations visualizer weights"
).split()
_SECONDS = 1800.0  # for one command


@dataclass(frozen=True)
class Cell:
    """One environment."""

    python: str
    paddle: str
    oldest: bool = False  # the oldest dependencies that setup.cfg allows, not the newest

    def __str__(self) -> str:
        oldest = ", oldest dependencies" if self.oldest else ""
        return f"python {self.python}, paddle {self.paddle}{oldest}"


CELLS = (
    *(Cell("3.11", paddle) for paddle in ("3.0.0", "3.1.1", "3.2.2", "3.3.0", "3.3.1")),
    *(Cell(python, "3.3.1") for python in ("3.10", "3.12", "3.13")),
    Cell("3.10", "3.3.0", oldest=True),
)


def interpreter(version: str) -> str:
    """The python of a version, on the path or in pyenv."""
    names = [shutil.which(f"python{version}") or ""]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        names += [str(path / "bin/python") for path in Path(root).glob(f"versions/{version}.*")]
    for name in filter(None, names):
        check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
        if subprocess.run([name, "-c", check], capture_output=True).returncode == 0:
            return name
    raise SystemExit(f"python{version}: not found on the path nor in pyenv")


def oldest_requirements() -> list[str]:
    """The lowest versions that setup.cfg allows, as pip takes them."""
    parser = configparser.ConfigParser()
    parser.read(TOP / "setup.cfg")
    lines = parser["options"]["install_requires"].splitlines()
    pairs = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines]
    return [f"{pair[1]}=={pair[2]}" for pair in pairs if pair]


def run(log: Path, *command: str) -> bool:
    """Whether a command succeeds; what it prints is in the log."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONWARNINGS"] = "ignore"
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        ended = subprocess.run(
            command, cwd=TOP, env=environment, stdout=file, stderr=file, timeout=_SECONDS
        )
    return ended.returncode == 0


def tried(cell: Cell, folder: Path) -> str:
    """What failed first in an environment; "" if nothing did."""
    log, python = folder / "log.txt", str(folder / "venv/bin/python")
    install = [python, "-m", "pip", "install", "-q"]
    wanted = [f"paddlepaddle=={cell.paddle}", *(oldest_requirements() if cell.oldest else [])]
    tests = [f"tests/test_{name}.py" for name in _CORE if (TOP / f"tests/test_{name}.py").exists()]
    digits = ["experiments/digits/train.py", "--output", str(folder / "digits"), "--kills", "2"]
    steps = {
        "venv": [interpreter(cell.python), "-m", "venv", str(folder / "venv")],
        "install": [*install, *wanted, "-e", ".[test,experiments]"],
        "digits": [python, "-m", "expbase", "verify", *digits, "--", "training.max_iteration=60"],
        "tests": [python, "-m", "pytest", "-p", "no:cacheprovider", *tests],
    }
    for name, command in steps.items():
        if not run(log, *command):
            return f"{name} ({log})"
    return ""


def main() -> int:
    """Tries the cells; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="cells with these words")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the environments stay")
    args = parser.parse_args()
    top = args.keep or Path(tempfile.mkdtemp(prefix="expbase-versions-"))
    failed = 0
    cells = [cell for cell in CELLS if args.only in str(cell)]
    for number, cell in enumerate(cells):
        folder = top / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        wrong = tried(cell, folder)
        failed += bool(wrong)
        print(f"{cell}: {'FAILED: ' + wrong if wrong else 'all is well'}", flush=True)
        if not wrong and not args.keep:
            shutil.rmtree(folder)
    print(f"{len(cells) - failed} of {len(cells)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
