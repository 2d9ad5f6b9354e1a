"""Tools around experiments and their runs; `python -m expbase` lists them. The core knows none.

A tool is a file with `main`, which runs it and returns its exit code, and `add_parser`, which adds
it to the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.checkpoint.layout import CheckpointError
from expbase.help_text import Paragraphs


def add_tool(tools: Any, main: Callable[..., int], exit_codes: str, usage: str = "") -> Any:
    """Adds a tool to the command line, under the name of its file.

    Args:
        tools: The subparsers of the command line.
        main: That of the tool. The docstring of its file is the help.
        exit_codes: What they mean, for the help, beside that of a mistake.
        usage: The words after the command. By default argparse puts options before paths, which an
            option that takes any number of words would take, too.

    Returns:
        The parser of the tool.
    """
    file = sys.modules[main.__module__]
    parser = tools.add_parser(
        file.__name__.rpartition(".")[2],
        help=str(file.__doc__).partition("\n\n")[0],
        description=file.__doc__,
        epilog=f"exit codes: {exit_codes}, 78 a mistake in what was given",
        formatter_class=Paragraphs,
    )
    if usage:
        parser.usage = f"%(prog)s {usage}"
    parser.set_defaults(
        run=main, parser=parser, user_errors=(OSError, ValueError, CheckpointError, RuntimeMistake)
    )
    return parser


def make_folder(folder: Path) -> None:
    """Makes a directory; raises a ValueError if there is something of that name."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueMistake(f"{folder}: exists already. Delete it, or give another name.") from None
