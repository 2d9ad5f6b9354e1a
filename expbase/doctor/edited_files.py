"""Python files that were edited while this process runs, or while it was loading them.

for text in edited_files(internals.code, type(experiment)): ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from expbase.base.processes import began
from expbase.record.sources import Code

_SOON = 0.05  # seconds: a script may be written right before it is started


def edited_files(code: Code, experiment: type) -> Iterator[str]:
    """Yields which files of a start's code are not, or may not be, what it trains with.

    Args:
        code: As it was loaded, perhaps by the process that this one is a fork of.
        experiment: The class. What it has imported since is looked at, too.
    """
    if edited := code.edited():
        yield (
            f"{', '.join(edited)}: edited since the code was loaded. This start uses the code of "
            "then (a restart uses that of the first start), and the record has it; the next "
            "command loads the new one."
        )
    if not hasattr(sys.modules["__main__"], "__file__"):  # a notebook imports when it pleases
        return
    latest = began(code.process) + _SOON
    loaded = Code.of(experiment, code)
    late = [name for name in loaded.texts if _written(loaded.folder / name) > latest]
    if late := [name for name in late if name not in edited]:
        yield (
            f"{', '.join(late)}: written after this process began, so the record may not have the "
            "text that was imported; expected no edit while a run begins. To be sure, start again."
        )


def _written(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0
