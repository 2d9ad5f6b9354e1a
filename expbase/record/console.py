"""The live line below the log, for somebody at a terminal.

Rich draws it, and not tqdm: rich asks for the line in a thread of its own, so the training loop has
nothing to do for it, and what is printed meanwhile, by anybody, scrolls above it.

    with live_line(lambda: Line("train", 1200, 10000, ["loss 0.25", "45 it/s"])): ...
"""

from __future__ import annotations

import contextlib
import functools
import os
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table


@dataclass
class Line:
    """What the live line shows."""

    phase: str
    iteration: int  # iterations done
    total: int | None  # iterations until the end, if that is known
    words: Sequence[str]  # the most important first: a narrow terminal cuts off the rest


def is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal on which a line can be drawn again and again."""
    return (
        stream is not None
        and bool(stream.isatty())
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


@contextlib.contextmanager
def live_line(look: Callable[[], Line]) -> Iterator[Callable[[], bool]]:
    """Shows what `look` returns on stderr while the block runs; yields whether it is shown now.

    `look` is called in another thread. `breakpoint()` removes the line for good: a debugger needs
    the terminal for itself.
    """
    live = Live(
        get_renderable=lambda: _drawn(look()),
        # Soft wrap: what is copied from the terminal has no line breaks of rich's.
        console=Console(file=sys.stderr, soft_wrap=True, force_jupyter=False, highlight=False),
        refresh_per_second=4,
        transient=True,
        redirect_stdout=is_terminal(sys.stdout),  # what is printed into a file stays there
    )
    _free_children_from_rich()
    hook = sys.breakpointhook

    def debug(*args: Any, **options: Any) -> Any:
        live.stop()
        if hook is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
            return pdb.Pdb().set_trace(sys._getframe(1))  # the frame of the user, not this one
        return hook(*args, **options)

    sys.breakpointhook = debug
    live.start()
    live.console.show_cursor(True)  # rich hides it; after a kill -9 it would stay hidden
    try:
        yield lambda: live.is_started
    finally:
        live.stop()
        sys.breakpointhook = hook


def _drawn(line: Line) -> Padding:
    grid = Table.grid(padding=(0, 1), expand=True)
    of = f"/{line.total}" if line.total else ""
    done = f"{line.phase} {line.iteration}{of}"
    grid.add_column(no_wrap=True, min_width=len(done))
    grid.add_column(ratio=1, min_width=6, max_width=40)
    bar = ProgressBar(total=line.total, completed=line.iteration)  # without a total it moves
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(done, bar, "  ".join(line.words))
    return Padding(grid, (0, 3, 0, 0))  # room for a ^C, which would break the line otherwise


@functools.cache  # once in a process, because a fork handler cannot be removed
def _free_children_from_rich() -> None:
    """Lets a forked process, such as a data loader's worker, write to the terminal itself.

    It inherits rich's streams, whose lock may be held by a thread that was not forked and so never
    releases it: the first print would wait for ever.
    """

    def restore_streams() -> None:
        sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    os.register_at_fork(after_in_child=restore_streams)
