"""Which versions of Python, of Paddle and of what else is needed work: an environment for each.

In each environment the wheel is installed and used without a clone, as packages.py does it: digits
is trained, killed twice and continued (`verify`). Then tests run: in the corners all of the core,
those of two processes among them, and in the cells between those where versions have differed so
far; CI runs all there are with the newest of both. A row of the table is printed when its
environment is done: the table of docs/versions.md. It needs the package index, the extra `package`,
and interpreters named python3.10 and so on, on the path or in pyenv; three to ten minutes for each.

    python tests/proofs/versions.py [--only "3.12 3.3.1"] [--keep DIR]
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import packages

TOP = Path(__file__).parents[2]
# Folders, which no name of a file leaves behind; and the runs of earlier versions, to their bits.
_SHORT = ["tests/data", "tests/state", "tests/test_runs.py"]  # where versions have differed
_TESTS = [f"tests/{name}" for name in ("base", "checkpoint", "engine", "ranks", "record")]
_SECONDS = 1800.0  # for one command
NEEDED = ("numpy", "protobuf", "PyYAML", "rich", "visualdl", "yacs")
_VERSIONS = f"""
from importlib.metadata import version
print(", ".join(f"{{name}} {{version(name)}}" for name in {NEEDED}))
"""
HEADER = """\
| Python | Paddle | with | used from the wheel | tests |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class Cell:
    """One environment."""

    python: str
    paddle: str
    oldest: bool = False  # the oldest dependencies that setup.cfg allows, not the newest
    refused: bool = False  # by an error that names this version of paddle
    corner: bool = False  # all tests of the core, and not those of _SHORT alone

    def __str__(self) -> str:
        return f"{self.python} {self.paddle} {'oldest' if self.oldest else 'newest'}"


CELLS = (
    Cell("3.11", "2.6.2", refused=True),
    Cell("3.11", "3.0.0", corner=True),
    *(Cell("3.11", paddle) for paddle in ("3.1.1", "3.2.2", "3.3.0", "3.3.1")),
    *(Cell(python, "3.3.1") for python in ("3.10", "3.12")),
    Cell("3.13", "3.3.1", corner=True),
    # Pairs that something may fall between: the oldest with the newest, and all that is oldest.
    Cell("3.13", "3.0.0"),
    Cell("3.13", "3.1.0"),
    Cell("3.12", "3.2.0"),
    Cell("3.10", "3.0.0", oldest=True, corner=True),
    Cell("3.10", "3.3.1", oldest=True),
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


def ranges() -> dict[str, str]:
    """What setup.cfg allows of each package that a row has: `>=1.26,<3` by name."""
    parser = configparser.ConfigParser()
    parser.read(TOP / "setup.cfg")
    extras = parser["options.extras_require"]
    texts = (parser["options"]["install_requires"], extras["cpu"], extras["test"])
    pairs = [re.match(r"([\w-]+)(>=[\d.]+.*)", line) for text in texts for line in text.split("\n")]
    return {pair[1]: pair[2] for pair in pairs if pair}


def oldest() -> dict[str, str]:
    """The lowest version of each that setup.cfg allows."""
    return {name: allowed[2:].partition(",")[0] for name, allowed in ranges().items()}


def run(log: Path, *command: str) -> str | None:
    """What a command printed; None if it failed. The log has it, too."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONWARNINGS"] = "ignore"
    with log.open("a+") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        begin = file.tell()
        ended = subprocess.run(
            command, cwd=TOP, env=environment, stdout=file, stderr=file, timeout=_SECONDS
        )
        file.seek(begin)
        return None if ended.returncode else file.read()


def install(cell: Cell, folder: Path, wheel: Path) -> str | None:
    """Makes the environment, or completes one that was kept; what it has; None: it failed."""
    log, python = folder / "log.txt", str(folder / "venv/bin/python")
    wanted = [f"paddlepaddle=={cell.paddle}"]
    if cell.oldest:
        wanted += [f"{name}=={v}" for name, v in oldest().items() if name != "paddlepaddle"]
    extras = "experiments" if cell.refused else "cpu"  # which asks for one that works
    pip = [python, "-m", "pip", "install", "-q", *wanted, f"{wheel}[{extras}]"]
    if not Path(python).exists():
        run(log, interpreter(cell.python), "-m", "venv", str(folder / "venv"))
    run(log, python, "-m", "pip", "uninstall", "-q", "-y", "paddle-expbase")  # of one that was kept
    return run(log, *pip) is not None and run(log, python, "-c", _VERSIONS) or None


def used(cell: Cell, folder: Path) -> str:
    """What became of the wheel without a clone: "11 of 11", "refused", or "FAILED"."""
    log, python = folder / "log.txt", folder / "venv/bin/python"
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        proof = packages.Proof(Path(empty))
        with log.open("a") as file, contextlib.redirect_stdout(file):
            if not cell.refused:
                packages.used(proof, python)
                is_well = all(proof.held)
                return f"{len(proof.held)} of {len(proof.held)}" if is_well else "FAILED"
            proof.run("new y", python, "-m", "expbase", "new", "y", "--from", "digits")
            proof.run("refused", python, "y/train.py")
    is_named = f"error: paddle {cell.paddle}: " in log.read_text()
    return "refused" if proof.held == [True, False] and is_named else "FAILED"


def tested(cell: Cell, folder: Path) -> str:
    """How many tests passed, with the code of the clone; "FAILED" if not all of them."""
    log, python = folder / "log.txt", str(folder / "venv/bin/python")
    if run(log, python, "-m", "pip", "install", "-q", "-e", ".[test]") is None:
        return "FAILED"
    tests = _SHORT + _TESTS if cell.corner else _SHORT
    printed = run(log, python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *tests)
    return printed.strip().splitlines()[-1].partition(" in ")[0] if printed else "FAILED"


def row(cell: Cell, folder: Path, wheel: Path) -> tuple[str, bool]:
    """A row of the table, and whether all is well."""
    (folder / "log.txt").write_text("")
    versions = install(cell, folder, wheel)
    results = [used(cell, folder), "" if cell.refused else tested(cell, folder)] if versions else []
    texts = [cell.python, cell.paddle, (versions or "FAILED to install").strip(), *results]
    return f"| {' | '.join(texts)} |", bool(versions) and "FAILED" not in results


def main() -> int:
    """Tries the cells; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="cells with these words")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the environments stay")
    args = parser.parse_args()
    top = args.keep or Path(tempfile.mkdtemp(prefix="expbase-versions-"))
    cells = [cell for cell in CELLS if args.only in str(cell)]
    failed = 0
    shutil.rmtree(top / "build", ignore_errors=True)
    (top / "build").mkdir(parents=True)
    wheel = packages.built(packages.Proof(top / "build"))
    print(HEADER, flush=True)
    for cell in cells:
        folder = top / str(cell).replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        text, is_well = row(cell, folder, wheel)
        failed += not is_well
        print(text if is_well else f"{text} see {folder / 'log.txt'}", flush=True)
        if is_well and not args.keep:
            shutil.rmtree(folder)
    print(f"{len(cells) - failed} of {len(cells)}")
    return int(failed > 0 or not cells)


if __name__ == "__main__":
    sys.exit(main())
