"""The one live line below the log that a person at a terminal sees.

It is drawn by rich and not by tqdm: rich asks us for the line, from a thread of its own, so the
loop has nothing to do for it; and what is printed meanwhile, by anybody, scrolls above it. In a
file, a pipe, a notebook or a dumb terminal there is none. A leaf: what to show is passed in.

    with live_line(lambda: Line("train", 1200, 10000, ["loss 0.25", "45 it/s"])): ...
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_REFRESHES_PER_SECOND = 4


@dataclass
class Line:
    """What the live line shows.

    Attributes:
        phase: "train", say.
        iteration: Done.
        total: Until the end; None if nobody knows.
        words: What else is worth it, the most important first: a narrow terminal cuts the rest.
    """

    phase: str
    iteration: int
    total: int | None
    words: Sequence[str]


def is_terminal(stream: Any) -> bool:
    """Whether somebody sits there whose lines can be drawn anew."""
    return bool(stream.isatty()) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


@contextlib.contextmanager
def live_line(look: Callable[[], Line]) -> Iterator[Callable[[], bool]]:
    """Shows the line while the block runs, on stderr.

    What is written to the terminal meanwhile, through sys.stdout too, stands above the line.
    `breakpoint()` takes the line away for good: a debugger needs the terminal for itself.

    Args:
        look: Gives what to show; called a few times a second, in another thread.

    Yields:
        Whether the line is still there, to be asked.
    """
    from rich.live import Live

    streams = (sys.stdout, sys.stderr)
    live = Live(
        get_renderable=lambda: _drawn(look()),
        console=_console(sys.stderr),
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=is_terminal(sys.stdout),  # a file's lines belong into the file
    )
    breakpoint_before = sys.breakpointhook

    def debug(*args: Any, **options: Any) -> Any:
        live.stop()
        if breakpoint_before is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
            import pdb

            return pdb.Pdb().set_trace(sys._getframe(1))  # there, and not here
        return breakpoint_before(*args, **options)

    _in_children_use(*streams)
    sys.breakpointhook = debug
    live.start()
    live.console.show_cursor(True)  # rich hides it, and after a kill -9 nobody would show it again
    try:
        yield lambda: live.is_started
    finally:
        live.stop()
        sys.breakpointhook = breakpoint_before
        _in_children_use()


def _console(stream: IO[str]) -> Any:
    from rich.console import Console

    class Unwrapped(Console):
        """Leaves long lines as they are: what is copied from the terminal has no breaks."""

        def print(self, *values: Any, **options: Any) -> None:
            super().print(*values, **{"soft_wrap": True, **options})

    return Unwrapped(file=stream, force_jupyter=False, highlight=False)


def _drawn(line: Line) -> Any:
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1), expand=True)
    of = f"/{line.total}" if line.total else ""
    cells: list[Any] = [f"{line.phase} {line.iteration}{of}"]
    grid.add_column(no_wrap=True)
    if line.total:
        grid.add_column(ratio=1, min_width=6, max_width=40)
        cells.append(ProgressBar(total=line.total, completed=line.iteration))
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(*cells, "  ".join(line.words))
    return Padding(grid, (0, 3, 0, 0))  # room for a ^C, which would break the line otherwise


# A data loader's worker is a fork of this process: it has copies of rich's streams, whose locks
# may be held for ever by a thread that is not there. It writes to the terminal itself.
_children_use: list[tuple[Any, ...]] = []


def _in_children_use(*streams: Any) -> None:
    _children_use[:] = [streams] if streams else []


def _restore_streams() -> None:
    for streams in _children_use:
        sys.stdout, sys.stderr = streams


os.register_at_fork(after_in_child=_restore_streams)


def memory() -> str:
    """What this process holds in main memory, or of the GPU if it uses one, for a person."""
    import paddle

    device = paddle.device.get_device()
    if device.startswith("gpu"):
        return f"{paddle.device.cuda.memory_allocated() / 2**20:.0f} MB on the device"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MB"
