"""Makes a folder to begin from, with train.py and config.yaml: a copy of an experiment of ours.

The copy is yours to change. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from shlex import quote
from typing import Any

from expbase.config import load_yaml
from expbase.tools import add_tool, make_folder

_EXPERIMENTS = Path(__file__).parents[1] / "experiments"  # in a checkout a link to the folder
_KNOWN = sorted(script.parent.name for script in _EXPERIMENTS.glob("*/train.py"))
_COPIED = (".py", ".yaml", ".md")  # no runs, no __pycache__


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if there is such a folder already").add_argument
    add("dir", type=Path, metavar="DIR", help="the folder")
    names = f"the experiment: {', '.join(_KNOWN)} (default: line)"
    add("--from", dest="name", default="line", choices=_KNOWN, metavar="NAME", help=names)


def main(args: argparse.Namespace) -> int:
    folder: Path = args.dir
    make_folder(folder)
    for file in (_EXPERIMENTS / args.name).iterdir():
        if file.suffix in _COPIED:
            shutil.copyfile(file, folder / file.name)
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    script = quote(str(folder / "train.py"))
    config = quote(str(folder / "config.yaml"))
    train = f"python {script} --config {config} --output {quote(f'runs/{folder.name}')}"
    if "runner" in load_yaml(folder / "config.yaml"):
        train = f"python -m expbase run {config}"
    print(f"try     python {script} --smoke\ntrain   {train}")
    print(f"change  data and model in {script}, numbers in {config}")
    return 0
