"""What the record of a run may start: who sends a run writes its record, too.

It may name a script or a module of the work tree, also for paddle's launcher on this machine, or a
file for `-m expbase run`. Of variables those count that a run notes, without what names files.

    check(start)                        # a ConfigError: -c, or a launcher of several machines
    check_place(start, words, places)   # a ConfigError: the script is none of the work tree
    variables, left_out = variables_of(start)
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expbase.config import ConfigError
from expbase.record.provenance import is_noted

_LAUNCHER = "paddle.distributed.launch"
_RUNNERS = ("expbase", "expbase.__main__")  # by the second name a rank knows it
_OURS = "expbase.experiments."  # modules that are installed with this tool
# Options of the interpreter that load and write nothing.
_PYTHON = re.compile(r"-[uBOEsSIqvb]+|-[WX]|-W(ignore|error|default|always|module|once)")
_VALUES = re.compile(r"ignore|error|default|always|module|once|dev|faulthandler|utf8(=[01])?")
# Of the launcher those that connect to no other machine, and start nothing; and their values.
_LAUNCHED = {
    **dict.fromkeys(("devices", "gpus", "npus", "xpus", "job_id", "log_level"), r"[\w,.-]*"),
    **dict.fromkeys(("nproc_per_node", "start_port", "max_restart"), r"\d+"),
    **dict.fromkeys(("log_overwrite", "sort_ip", "enable_gpu_log"), r"\w+"),
    **dict.fromkeys(("nnodes",), "1"),
    **dict.fromkeys(("run_mode",), "collective"),
    **dict.fromkeys(("log_dir",), ".*"),  # another folder takes its place
}
# A library that is loaded, a file that is written, a machine that is asked.
_NAMES_FILES = re.compile("dir|file|_fname|path|plugin|dump|_log|engine|best_config|comm_id", re.I)
_VALUE = re.compile(r"[\w.,:;+=^-]{0,200}")
_NO_EXECUTABLE = (
    "expected a script or a module of the work tree, paddle's launcher on one machine, or "
    "-m expbase run. A run from somebody else is code: what you trust, start by hand."
)


class Places(NamedTuple):
    """Where the code of a run may lie."""

    cwd: Path  # where the command is given
    top: Path  # the work tree of now
    copy: Path  # the code of the run; without git, or with --here, the same
    run: Path  # which has no code that may be started


def command_text(start: Mapping[str, Any]) -> str:
    """Returns the command of a start for a message, without the options of the script."""
    return shlex.join(["python", *start["command"][: start["script"] + 1]])[:300]


def check(start: Mapping[str, Any]) -> None:
    """Raises a ConfigError if a command is none that may be started, whatever the code is."""
    words, place = start["command"], start["script"]
    before = words[: max(place, 0)]
    is_fine = 0 <= place < len(words) and not words[place].startswith("-")
    if is_fine and _LAUNCHER in before:
        at = before.index(_LAUNCHER)
        is_fine = before[at - 1 : at] == ["-m"] and _are_launchers(before[at + 1 :])
        before = before[: at - 1]
    elif before[-1:] == ["-m"]:
        before = before[:-1]
    if not (is_fine and _are_pythons(before)):
        raise _refused(start, "the command is none that may be made again")


def _are_pythons(words: Sequence[str]) -> bool:
    """Returns whether options of the interpreter load and write nothing."""
    pairs = zip(["", *words], words, strict=False)
    return all(
        _VALUES.fullmatch(word) if before in ("-W", "-X") else _PYTHON.fullmatch(word)
        for before, word in pairs
    )


def _are_launchers(words: Sequence[str]) -> bool:
    """Returns whether options of paddle's launcher start processes of this machine alone."""
    left = [*words]
    while left:
        option, equals, value = left.pop(0).partition("=")
        if not equals:
            value = left.pop(0) if left else ""
        expected = _LAUNCHED.get(option.removeprefix("--"))
        if expected is None or not option.startswith("--") or not re.fullmatch(expected, value):
            return False
    return True


def with_log_dir(words: Sequence[str], place: int, folder: Path) -> list[str]:
    """Returns a command whose launcher, if it is one, writes its logs into a folder."""
    found = [*words]
    for number, word in enumerate(found[:place]):
        if word == "--log_dir":
            found[number + 1] = str(folder)
        elif word.startswith("--log_dir="):
            found[number] = f"--log_dir={folder}"
    return found


def check_place(start: Mapping[str, Any], words: Sequence[str], places: Places) -> None:
    """Raises a ConfigError if the script or module of a command is none of the work tree."""
    place = start["script"]
    name = words[place]
    if not _is_of_tree(places.cwd, places):
        raise _not_there(start, places, f"{start['directory']!r} is no folder of the work tree")
    if not (place and words[place - 1] == "-m"):
        found = [places.cwd / name]
    elif name in _RUNNERS and "run" in words[place + 1 : place + 2]:
        found = [places.cwd / _yaml_of(start, words[place + 2 :])]
    elif name.startswith(_OURS):
        return
    else:
        found = _files_of(name, places.cwd)
    first = next(filter(Path.is_file, found), None)
    if first is None or not _is_of_tree(first, places):
        raise _not_there(start, places, f"{name} is no file of the work tree in {places.top}")


def _not_there(start: Mapping[str, Any], places: Places, why: str) -> ConfigError:
    if start["directory"] is not None:
        return _refused(start, why)
    return ConfigError(  # the run was in no git repository
        f"`{command_text(start)} …` is not started: it is no code of {places.cwd}. Give the "
        "command in the folder where the run was started."
    )


def _yaml_of(start: Mapping[str, Any], words: Sequence[str]) -> Path:
    """Returns the file of `python -m expbase run`."""
    from expbase.__main__ import parser_of

    try:
        args, _ = parser_of(["run"]).parse_known_args(["run", *words])
    except SystemExit:
        raise _refused(start, "its options are none of `python -m expbase run`") from None
    file: Path = args.file
    return file


def _files_of(module: str, cwd: Path) -> list[Path]:
    """Returns the files that a module may have, by its name; finders of modules may do more."""
    words = module.split(".")
    if not all(map(str.isidentifier, words)):
        return []
    folders = [cwd, cwd / "src", *map(Path, sys.path)]
    found = [folder.joinpath(*words) for folder in folders]
    return [file for one in found for file in (one.with_suffix(".py"), one / "__main__.py")]


def _is_of_tree(path: Path, places: Places) -> bool:
    """Returns whether a file or a folder is of the work tree, and did not come with the run.

    With it has come what lies in the run, or beside it without being known to git.
    """
    run, path = places.run.resolve(), path.resolve()
    roots = (places.copy.resolve(), places.top.resolve())
    root = next((root for root in roots if path.is_relative_to(root)), None)
    if root is None:
        return False
    name = path.relative_to(root)
    now = (roots[1] / name).resolve()  # of a link that git does not know there is a copy
    if now.is_relative_to(run):
        return False
    if run.parent == roots[1] or not now.is_relative_to(run.parent):
        return True
    asked = ["git", "-C", str(places.copy), "ls-files", "--error-unmatch", "--", str(name)]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def variables_of(start: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that a command is given, and the names of those that it is not."""
    given, left_out = {}, []
    for name, value in start["environment"].items():
        if name == "CUDA_VISIBLE_DEVICES":  # of another machine, perhaps
            continue
        is_plain = isinstance(value, str) and _VALUE.fullmatch(value)
        if is_plain and is_noted(name) and not _NAMES_FILES.search(name):
            given[name] = value
        else:
            left_out.append(name)
    return given, left_out


def _refused(start: Mapping[str, Any], why: str) -> ConfigError:
    return ConfigError(f"`{command_text(start)} …` is not started: {why}; {_NO_EXECUTABLE}")
