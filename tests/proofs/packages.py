"""Proves that the wheel and the sdist are whole, and that the wheel works where nothing else is.

Both are built from the files that git knows, and hold what belongs there and nothing else. Then the
wheel is installed into an empty environment, in which experiments are begun, tried, trained,
killed, continued, listed and shown. It needs the package index, and the extra `package`.

    python tests/proofs/packages.py [--built]      # --built: without the environment, for CI
"""

from __future__ import annotations

import argparse
import contextlib
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

TOP = Path(__file__).parents[2]
_OF_WHEEL = "METADATA RECORD WHEEL licenses/LICENSE top_level.txt"
_OF_SDIST = "PKG-INFO SOURCES.txt dependency_links.txt requires.txt top_level.txt"
# A README in another language may come; nothing else does without a thought.
_BESIDE = {
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "PKG-INFO",
    "README.md", "README.zh-CN.md", "SECURITY.md", "pyproject.toml", "setup.cfg",
}  # fmt: skip
_METADATA = ("Author", "Keywords", "License", "License-File", "Requires-Python", "Summary")


class Proof:
    """Counts what holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: list[bool] = []

    def say(self, name: str, wrong: object = "") -> None:
        """Notes and prints one thing, and what is wrong with it, if anything is."""
        self.held.append(not wrong)
        print(f"{'BAD' if wrong else 'ok '} {name}", *[wrong] * bool(wrong), flush=True)

    def run(self, name: str, *command: str | Path, says: str = "") -> None:
        """Runs a command in the folder; it must succeed, and say something."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        result = subprocess.run(
            command, cwd=self.folder, env=environment | {"PYTHONWARNINGS": "ignore"},
            capture_output=True, text=True, timeout=1800, check=False,
        )  # fmt: skip
        printed = f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        is_good = result.returncode == 0 and says in printed
        self.say(name, "" if is_good else f"\n{printed}")


def known_to_git() -> list[str]:
    """The files of the repository, as paths from its top; without git all but what tools left."""
    if not (TOP / ".git").exists():
        files = {str(path.relative_to(TOP)) for path in TOP.rglob("*") if path.is_file()}
        files |= {"expbase/experiments"}
        return [n for n in sorted(files) if not re.search(r"egg-info|__pycache__|(^|/)\.", n)]
    # In a container the checkout may be another user's.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    result = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, text=True, check=True)
    return [name for name in result.stdout.split("\0") if name and os.path.lexists(TOP / name)]


def expected(known: Iterable[str]) -> tuple[set[str], set[str]]:
    """What belongs into both, under its path there, and what into the sdist alone."""
    code = {
        name for name in known if name.startswith("expbase/") and name.endswith((".py", ".pyi"))
    }
    experiments = {f"expbase/{name}" for name in known if name.startswith("experiments/")}
    beside = {"PKG-INFO", *({*known} & _BESIDE)}
    return code | experiments | {"expbase/py.typed"}, beside


def difference(found: Iterable[str], wanted: Iterable[str]) -> str:
    """What is too much and what is missing, for a person."""
    found, wanted = {*found}, {*wanted}
    named = {"too much": found - wanted, "missing": wanted - found}
    return "; ".join(f"{what}: {', '.join(sorted(n))}" for what, n in named.items() if n)


def built(proof: Proof) -> Path:
    """Builds both and looks at them; returns the wheel."""
    known = known_to_git()
    for name in known:
        (proof.folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(TOP / name, proof.folder / "source" / name, follow_symlinks=False)
    proof.run("both are built", sys.executable, "-m", "build", "--outdir", "dist", "source")
    (wheel,), (sdist,) = ((proof.folder / "dist").glob(f"*{s}") for s in (".whl", ".tar.gz"))
    proof.run("twine finds no fault", sys.executable, "-m", "twine", "check", "--strict",
              wheel, sdist)  # fmt: skip
    both, beside = expected(known)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith("METADATA")).rpartition("/")[0]
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    of_wheel = {f"{info}/{name}" for name in _OF_WHEEL.split()}
    proof.say(f"the wheel: {len(names)} files", difference(names, both | of_wheel))
    with tarfile.open(sdist) as tar:
        members = [member for member in tar if not member.isdir()]
    proof.say("the sdist has no links", [m.name for m in members if not m.isreg()])
    names = [member.name.partition("/")[2] for member in members]
    of_sdist = {f"paddle_expbase.egg-info/{name}" for name in _OF_SDIST.split()}
    proof.say(f"the sdist: {len(names)} files", difference(names, both | beside | of_sdist))
    proof.say("the metadata", [name for name in _METADATA if not metadata[name]])
    relative = [line for line in str(metadata.get_payload()).splitlines() if "](" in line]
    proof.say("no link of the description is dead", [x for x in relative if "](http" not in x])
    return wheel


def installed(proof: Proof, wheel: Path) -> None:
    """Installs the wheel into an empty environment, and uses it there."""
    venv.create(proof.folder / "venv", with_pip=True)
    python = proof.folder / "venv/bin/python"
    proof.run("installed", python, "-m", "pip", "install", "-q", f"{wheel}[cpu]")
    used(proof, python)


def used(proof: Proof, python: Path) -> None:
    """Does with an installed wheel what its description and the README say, without a clone."""
    passed = "smoke test passed"
    proof.run("new x", python, "-m", "expbase", "new", "x", says="try     python x/train.py")
    proof.run("x is tried", python, "x/train.py", "--smoke", says=passed)
    words = ["--config", "x/config.yaml", "--output", "runs/x"]
    proof.run("x is trained", python, "x/train.py", *words)
    proof.run("new y", python, "-m", "expbase", "new", "y", "--from", "digits")
    imports = "paddle-expbase[experiments]"
    proof.run("y has its imports", python, "-m", "pip", "install", "-q", imports)
    words = ["y/train.py", "--config", "y/config.yaml"]
    proof.run("y is tried", python, *words, "--smoke", says=passed)
    words += ["--output", "runs/y"]
    proof.run("y is trained and its best is tested", python, *words, says="test/accuracy=")
    verified = ["verify", "y/train.py", "--output", "verified", "--kills", "2", "--", *words[1:3]]
    proof.run("y is killed twice", python, "-m", "expbase", *verified, says="identical: ")
    proof.run("runs are listed", python, "-m", "expbase", "ls", "runs", says="finished")
    proof.run("a run is shown", python, "-m", "expbase", "show", "runs/y", says="finished")
    proof.say("runs are on the board", board(proof, python))


def board(proof: Proof, python: Path) -> str:
    """What is wrong with the board, which must answer, and end at SIGTERM."""
    command = [python, "-W", "ignore", "-m", "expbase", "board", "runs", "--port", "0"]
    with subprocess.Popen(command, cwd=proof.folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().partition("/app/")[0]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        answer, end = "", time.monotonic() + 120
        while address and not answer and process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):  # it starts
                answer = opener.open(f"{address}/app/api/runs", timeout=60).read().decode()
        process.terminate()
    is_well = "runs/x" in answer and "runs/y" in answer and process.returncode == 143
    return "" if is_well else f"{address}: {answer}, exit code {process.returncode}"


def main() -> int:
    """Runs the proof; the exit code says whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--built", action="store_true", help="build and look, install nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="expbase-packaging-") as folder:
        proof = Proof(Path(folder))
        wheel = built(proof)
        if not args.built:
            installed(proof, wheel)
    print(f"{sum(proof.held)} of {len(proof.held)} hold")
    return int(not all(proof.held))


if __name__ == "__main__":
    sys.exit(main())
