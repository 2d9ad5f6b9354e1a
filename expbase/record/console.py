"""The live line below the log, for somebody at a terminal.

Rich draws it, and not tqdm: rich asks for the line in a thread of its own, so the training loop has
nothing to do for it, and what is printed meanwhile, by anybody, scrolls above it.

    with live_line(lambda: "train 1200/10000  loss 0.25  45 it/s"): ...
"""

from __future__ import annotations

import contextlib
import functools
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


def is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal on which a line can be drawn again and again."""
    return (
        stream is not None
        and bool(stream.isatty())
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


@contextlib.contextmanager
def live_line(look: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """Shows what `look` returns on stderr while the block runs; yields whether it is shown now.

    A narrow terminal cuts off its end. `look` is called in another thread. `breakpoint()` removes
    the line for good: a debugger needs the terminal for itself.
    """
    live = Live(
        get_renderable=lambda: Text(look(), no_wrap=True, overflow="ellipsis"),
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
