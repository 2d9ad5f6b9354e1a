"""The progress bar below the log, for somebody at a terminal.

The training loop draws it, and no thread of rich's: so a forked worker inherits no lock that is
held, and nothing draws over a debugger. What is printed meanwhile scrolls above it.

    with progress_bar(400, 10000) as show: show(completed=410, description="train/loss=0.25")
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


def is_terminal(stream: Any) -> bool:
    """Returns whether the stream is a terminal on which a line can be drawn again and again."""
    return (
        stream is not None
        and bool(stream.isatty())
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


def _forget_numbers(progress: Progress) -> None:
    """Hides the numbers of the bar in a forked worker, which would draw those of its beginning."""
    progress.live._live_render.set_renderable("train")


@contextlib.contextmanager
def progress_bar(completed: int, total: int | None) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr while the block runs.

    A narrow terminal cuts off its end, the description.

    Args:
        completed: Iterations that are done already.
        total: Iterations until the end; None: unknown.

    Yields:
        A function that draws it anew; it takes `completed` and `description`.
    """
    progress = Progress(
        TextColumn("train"),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn(
            "{task.description}", table_column=Column(overflow="crop", no_wrap=True, ratio=1)
        ),
        # Soft wrap: rich adds no line breaks to text that a user copies from the terminal.
        console=Console(file=sys.stderr, soft_wrap=True, force_jupyter=False, highlight=False),
        expand=True,
        auto_refresh=False,
        transient=True,
        redirect_stdout=is_terminal(sys.stdout),  # a stdout that is a file stays one
    )
    util.register_after_fork(progress, _forget_numbers)
    with progress:
        # rich/live.py, Live.start, hides it; after a kill -9 it would stay hidden.
        progress.console.show_cursor()
        task = progress.add_task("", total=total, completed=completed)
        yield functools.partial(progress.update, task, refresh=True)
