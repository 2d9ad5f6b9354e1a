"""Makes a folder to begin from, with train.py and config.yaml: a copy of an experiment of ours.

The copy is yours to change. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import shutil
from pathlib import Path
from shlex import quote
from typing import Any

from expbase.config import load_yaml
from expbase.tools import add_tool

_EXPERIMENTS = Path(__file__).parents[1] / "experiments"  # in a checkout a link to the folder
_KNOWN = sorted(script.parent.name for script in _EXPERIMENTS.glob("*/train.py"))
_COPIED = (".py", ".yaml", ".md")  # no runs, no __pycache__


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if there is such a folder already").add_argument
    add("dir", type=Path, metavar="DIR", help="the folder")
    names = f"the experiment: {', '.join(_KNOWN)} (default: line)"
    add("--from", dest="name", default="line", metavar="NAME", help=names)


def main(args: argparse.Namespace) -> int:
    if args.name not in _KNOWN:
        near = [f" Did you mean {n!r}?" for n in difflib.get_close_matches(args.name, _KNOWN, 1)]
        known = f"{', '.join(_KNOWN)}.{''.join(near)}"
        raise ValueError(f"--from: {args.name!r} given; expected one of {known}")
    folder: Path = args.dir
    if folder.exists():
        raise ValueError(f"{folder}: is there already; expected the name of a new folder.")
    files = [file for file in (_EXPERIMENTS / args.name).iterdir() if file.suffix in _COPIED]
    folder.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    print(f"{folder}: {', '.join(sorted(file.name for file in files))}")
    if missing := _missing(folder):
        print(f"first   pip install 'expbase[experiments]'  (not installed: {', '.join(missing)})")
    script = quote(str(folder / "train.py"))
    config = quote(str(folder / "config.yaml"))
    train = f"python {script} --config {config} --output {quote(f'runs/{folder.name}')}"
    if "runner" in load_yaml(folder / "config.yaml"):
        train = f"python -m expbase run {config}"
    print(f"try     python {script} --smoke\ntrain   {train}")
    print(f"change  data and model in {script}, numbers in {config}")
    return 0


def _missing(folder: Path) -> list[str]:
    """The packages that the scripts import and that are not installed."""
    scripts = {file.stem: file.read_text() for file in folder.glob("*.py")}
    named = re.findall(r"^(?:from|import) (\w+)", "\n".join(scripts.values()), re.MULTILINE)
    return [name for name in sorted({*named} - {*scripts}) if not importlib.util.find_spec(name)]
