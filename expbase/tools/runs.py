"""Where runs are, and how their names are printed: shared by the tools that look at runs.

for path in find(Path("runs")):
    print(printable(str(path)))
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from expbase.record.run_record import LEDGER
from expbase.run_dir import CONFIG, LOCK

LOCK_FILE = LOCK.format(rank=0)


def check_folder(folder: Path) -> None:
    """Checks that there is a directory to look into.

    Raises:
        ValueError: There is none.
    """
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "no such directory"
        raise ValueError(f"{folder}: {wrong}; expected a directory with runs in it.")


def is_run(files: list[str]) -> bool:
    """Whether a directory with these files is the output directory of a run."""
    # Two of them are enough: a damaged run may lack one.
    return len({CONFIG, LEDGER, LOCK_FILE}.intersection(files)) > 1


def find(folder: Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """The output directories of runs at or below a folder, sorted.

    Args:
        folder: Where to look.
        on_error: Called for directories that cannot be read.

    Raises:
        ValueError: There is no such folder.
    """
    check_folder(folder)
    found = []
    for directory, names, files in os.walk(folder, onerror=on_error):
        names[:] = [name for name in names if not name.startswith(".")]
        if is_run(files):
            found.append(Path(directory))
            names.clear()  # what is below belongs to the run
    return sorted(found)


def printable(text: str) -> str:
    """The text with what a terminal cannot show, line ends too, as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
