"""Begins experiments, looks at runs and proves things of them; train.py trains."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from expbase._version import __version__
from expbase.base import other_expbase
from expbase.base.terminal import say, show_any_character
from expbase.help_text import check_system

TOOLS = {
    "new": "tools.new",
    "run": "extras.yaml_runner",
    "board": "tools.board",
    "ls": "tools.ls",
    "plot": "tools.plot",
    "reproduce": "tools.reproduce",
    "rm": "tools.rm",
    "show": "tools.show",
    "verify": "tools.verify",
}


def parser_of(names: Iterable[str]) -> argparse.ArgumentParser:
    """Returns the command line of these tools. Some need paddle, whose import takes seconds."""
    parser = argparse.ArgumentParser(prog="python -m expbase", description=__doc__)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for name in names:
        importlib.import_module(f"expbase.{TOOLS[name]}").add_parser(tools)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; returns its exit code."""
    show_any_character()
    if wrong := other_expbase.broken(__version__):  # before the tools, which may need what is gone
        say(f"python -m expbase: error: {wrong}")
        return 1
    for text in other_expbase.told():
        say(f"python -m expbase: {text}")
    words = list(sys.argv[1:] if argv is None else argv)
    asked = [name for name in words[:1] if name in TOOLS]
    parser = parser_of(asked or TOOLS)
    if not words:
        parser.print_help()
        return 2
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.words = words[end + 1 :]  # for the user's script
    try:
        check_system()
        code: int = args.run(args)
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, head say, reads no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except args.user_errors as error:  # anything else shows its traceback
        say(f"python -m expbase {args.tool}: error: {error}")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
