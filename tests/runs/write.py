"""Writes the runs in this folder: `1.0/one` is one of expbase 1.0, and later versions must open it.

    python tests/runs/write.py                       # those of this version, before its release
    python tests/runs/write.py --commit 8510bf6^     # those of an older version's code

`ranks` is a run of two processes, `shares` one of training.shares; of versions before 1.0 there is
`one` alone. Beside them stand their code, a copy of train.py, and expected.json: what `--evaluate
best` prints, and the weights with which each of them ends when it is continued.

A run tells of the machine in its ledger alone. There the host, the platform, the process and
packages that expbase does not ask for are masked; in any other file they are an error. Directories
of a version that CHANGELOG.md calls released are never written again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TOP = HERE.parents[1]
SCRIPT = "train.py"
EXPECTED = "expected.json"
MOST_BYTES = 200_000  # of the runs of one version
_MASKS = {"host": "host", "platform": "Linux", "pid": 1}
_PACKAGES = ("PyYAML", "numpy", "paddlepaddle", "protobuf", "rich", "visualdl", "yacs")


class Kind(NamedTuple):
    """How a run is made: the words of its command, and the iterations at which it was stopped."""

    words: Sequence[str]
    stops: Sequence[int]
    is_exported: bool = False


KINDS = {
    # Stopped twice in the middle of an epoch, the second time with gradients added up.
    "one": Kind(("step_every=2", "training.skip_updates=[3]"), (5, 7), is_exported=True),
    "ranks": Kind(("--nprocs", "2"), (4,)),
    "shares": Kind(("training.shares=2",), (4,)),
}
BEFORE_1_0 = {"one": Kind(("step_every=2", "training.keep_last=1"), (5,))}


def is_released(version: str, changelog: str) -> bool:
    """Whether a version like "1.0" was released: a heading has it without "(unreleased)"."""
    headings = re.findall(r"^## (\d+\.\d+)\S*(.*)", changelog, re.MULTILINE)
    return any(number == version and "unreleased" not in rest for number, rest in headings)


def version_of(code: Path) -> str:
    """The version of a copy of the code, "1.0" of 1.0.3."""
    text = (code / "expbase/_version.py").read_text()
    return ".".join(re.findall(r"__version__ = \"(\d+)\.(\d+)", text)[0])


def code_of(commit: str, folder: Path) -> Path:
    """Unpacks the code of a commit."""
    command = ["git", "archive", commit, "expbase", "experiments"]
    packed = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write(folder: Path, code: Path, kinds: Mapping[str, Kind]) -> None:
    """Writes the runs, their code, and what is expected of them, into an empty folder."""
    shutil.copy(HERE / SCRIPT, folder)
    expected = {}
    for name, kind in kinds.items():
        for stop in kind.stops:
            _train(folder, code, name, *kind.words, stop_at=stop)
        best = json.loads(_train(folder, code, name, *kind.words, "--evaluate", "best"))
        if kind.is_exported:
            _train(folder, code, name, *kind.words, "--export", "best")
        straight = _train(folder, code, "straight", *kind.words)
        shutil.rmtree(folder / "straight")
        expected[name] = {
            "words": kind.words, "iteration": kind.stops[-1], "best": best,
            "weights": straight.split()[-1],
        }  # fmt: skip
        _mask(folder / name / "ledger.jsonl")
        for lock in (folder / name).glob(".lock-*"):
            lock.unlink()
    (folder / EXPECTED).write_text(f"{json.dumps(expected, indent=1)}\n")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    names = (str(TOP), str(code), sys.prefix, str(Path.home()), os.uname().nodename)
    if wrong := problems(folder, names):
        raise SystemExit("\n".join(wrong))


def problems(folder: Path, names: Sequence[str]) -> list[str]:
    """What keeps runs from being put here: files that name the machine, or are too large."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = []
    for name in filter(None, {*names, tempfile.gettempdir()}):
        word = re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
        found += [f"{path}: holds {name!r}" for path in files if word.search(path.read_bytes())]
    size = sum(path.stat().st_size for path in files)
    if size > MOST_BYTES:
        found.append(f"{folder}: {size} bytes; expected {MOST_BYTES} at most")
    return found


def _train(folder: Path, code: Path, output: str, *words: str, stop_at: int = 0) -> str:
    """What a command prints; it sees of the environment what it needs. 0: it is not stopped."""
    command = [sys.executable, SCRIPT, "--device", "cpu", "--output", output, *words]
    needed = {"PATH", "LD_LIBRARY_PATH"} & {*os.environ}
    variables = {name: os.environ[name] for name in needed}
    variables |= {"PYTHONPATH": str(code), "PYTHONWARNINGS": "ignore", "HOME": str(folder.parent)}
    variables["STOP_AT"] = str(stop_at)
    result = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}: code {result.returncode}\n{result.stderr}")
    return result.stdout


def _mask(ledger: Path) -> None:
    """Takes the machine out of the records of a ledger."""
    records: list[dict[str, Any]] = [json.loads(line) for line in ledger.read_text().splitlines()]
    for record in records:
        record |= {name: value for name, value in _MASKS.items() if name in record}
        if "packages" in record:
            record["packages"] = {name: record["packages"][name] for name in _PACKAGES}
    ledger.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def main() -> None:
    """Writes the directories of a version in the place of those that are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", metavar="COMMIT", help="whose code is run (default: this one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="expbase-runs-") as temporary:
        code = code_of(args.commit, Path(temporary, "code")) if args.commit else TOP
        version = version_of(code)
        target = HERE / version
        is_old = version.startswith("0.")
        if target.exists() and (is_old or is_released(version, (TOP / "CHANGELOG.md").read_text())):
            raise SystemExit(f"{target}: is of a released version; expected that it is left alone.")
        made = Path(temporary, "made")
        made.mkdir()
        write(made, code, BEFORE_1_0 if is_old else KINDS)
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(made, target)
    print(f"written: {target.relative_to(TOP)}")


if __name__ == "__main__":
    main()
