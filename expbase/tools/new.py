"""Makes a folder to begin from, with train.py and config.yaml: a copy of an experiment of ours.

The copy is yours to change. Nothing is overwritten. Of the other files of the experiment those are
copied that its script or its config need.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from expbase.base.files import remove
from expbase.config import load_yaml
from expbase.tools import add_tool, make_folder

_EXPERIMENTS = Path(__file__).parents[1] / "experiments"  # in a checkout a link to the folder
_CLONE = Path(__file__).parents[2].resolve()  # if there is one
_EXTRAS = {"sklearn": "experiments", "gymnasium": "cartpole"}  # by what is imported
_KNOWN = sorted(script.parent.name for script in _EXPERIMENTS.glob("*/train.py"))


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0 made, 1 an error").add_argument
    add("dir", type=Path, metavar="DIR", help="the folder")
    names = f"the experiment: {', '.join(_KNOWN)} (default: line)"
    add("--from", dest="name", default="line", choices=_KNOWN, metavar="NAME", help=names)


def main(args: argparse.Namespace) -> int:
    folder: Path = args.dir
    make_folder(folder)
    try:
        for file in _files_of(_EXPERIMENTS / args.name):
            shutil.copyfile(file, folder / file.name)
    except OSError:
        remove(folder)  # half of it would refuse the next try
        raise
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    script = quote(str(folder / "train.py"))
    config = quote(str(folder / "config.yaml"))
    train = f"python {script} --config {config} --output {quote(f'runs/{folder.name}')}"
    if "runner" in load_yaml(folder / "config.yaml"):
        train = f"python -m expbase run {config}"
    for extra in _missing_extras(folder):
        print(f'needs   pip install "paddle-expbase[{extra}]"')
    print(f"try     python {script} --smoke\ntrain   {train}")
    print(f"change  data and model in {script}, numbers in {config}")
    if (_CLONE / ".git").exists() and folder.resolve().is_relative_to(_CLONE):
        print(
            f"{folder}: lies in the clone of expbase, whose git shows it as untracked; expected a "
            f"folder outside of it for an experiment of your own: new {_outside(folder)}",
            file=sys.stderr,
        )
    return 0


def _missing_extras(folder: Path) -> list[str]:
    """Returns the extras of which an experiment imports something that is not installed."""
    code = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    imported = {*re.findall(r"(?m)^ *(?:from|import) (\w+)", code)}
    return [e for name, e in _EXTRAS.items() if name in imported and not find_spec(name)]


def _outside(folder: Path) -> str:
    """Returns a folder of that name beside the clone, as it is written from here."""
    return quote(os.path.relpath(_CLONE.parent / folder.name))


def _files_of(experiment: Path) -> list[Path]:
    """Returns the files that an experiment needs, and none that a user has left beside them."""
    found = [
        experiment / "train.py",
        experiment / "config.yaml",
        *sorted(experiment.glob("README*.md")),
    ]
    beside = [*experiment.glob("*.py"), *experiment.glob("*.yaml")]
    for file in found:  # which grows
        needs = r"(\w+)\.(?:py|yaml)\b" if file.suffix == ".yaml" else r"(?m)^(?:from|import) (\w+)"
        names = re.findall(needs, file.read_text(encoding="utf-8"))
        found += [path for path in beside if path.stem in names and path not in found]
    return found
