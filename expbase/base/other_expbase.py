"""Looks whether another distribution has files in our folder of site-packages.

Ours is `paddle-expbase`; the package index has an `expbase` of another project, which is imported
by the same name. Whichever is installed last overwrites files of the other, and uninstalling either
takes files away from both.

    [*told()]           # a sentence, if both are there, and what is imported is ours
    broken("1.0.0")     # what is wrong, if files of ours are gone
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "paddle-expbase"  # of our distribution
_OURS = re.compile(r"^expbase/__init__\.py,", re.MULTILINE)  # in the list of a distribution's files
_WAY_OUT = f"Run `pip uninstall expbase`, then install {NAME} again, with --force-reinstall."


def told() -> Iterator[str]:
    """Yields a sentence if a distribution named expbase has our files, too.

    A clone that was installed under this name, as before 1.0, has no files there but its own facts.
    """
    for folder in dict.fromkeys(sys.path):  # importlib.metadata takes 20 ms to import
        for record in Path(folder).glob("expbase-*.dist-info/RECORD"):
            if _OURS.search(_text_of(record)):
                version = record.parent.name.removesuffix(".dist-info").partition("-")[2]
                yield (
                    f"the distribution expbase {version} is installed, too: it is not {NAME}, and "
                    f"its files have the names of ours; expected one of them. {_WAY_OUT}"
                )


def _text_of(record: Path) -> str:
    with contextlib.suppress(OSError):
        return record.read_text(errors="replace")
    return ""


def broken(version: str) -> str:
    """Returns what is wrong if the package that Python has imported is not ours; "" if it is.

    Args:
        version: Ours.
    """
    found = vars(sys.modules["expbase"])  # without __init__.py it is a package all the same
    if found.get("__version__") == version:
        return ""
    whose = "is another project's" if found.get("__file__") else "is not there"
    return (
        f"expbase/__init__.py {whose}: the distribution expbase, which is not {NAME}, has "
        f"overwritten or taken away files of ours. {_WAY_OUT}"
    )
