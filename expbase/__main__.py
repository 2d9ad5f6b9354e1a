"""Begins experiments, looks at runs and checks them; train.py trains."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from expbase._version import __version__
from expbase.base import other_expbase
from expbase.base.exit_codes import ExitCode, exit_code_of
from expbase.base.terminal import say, show_any_character
from expbase.help_text import Parser, add_version, check_system

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


def parser_of(names: Collection[str]) -> argparse.ArgumentParser:
    """Returns the command line of these tools; without names one that only lists all.

    Some tools need paddle, whose import takes seconds: to be listed, none is imported.
    """
    parser = Parser(prog="python -m expbase", description=__doc__)
    add_version(parser)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for name in names or TOOLS:
        if names:
            importlib.import_module(f"expbase.{TOOLS[name]}").add_parser(tools)
        else:
            tools.add_parser(name, help=_first_sentence(TOOLS[name]))
    return parser


def _first_sentence(module: str) -> str:
    """Returns how the docstring of a module of ours begins, without importing it."""
    file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return file.read_text(encoding="utf-8").split('"""')[1].partition("\n\n")[0]


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Returns the options; a word that nothing takes ends the process with ExitCode.MISTAKE."""
    args, unknown = parser.parse_known_args(words)
    tool: Parser = vars(args).pop("parser")
    if hasattr(args, "opts"):  # argparse takes no further KEY=VALUE after an option
        values = [word for word in unknown if "=" in word and not word.startswith("-")]
        args.opts = [*(args.opts or ()), *values]
        unknown = [word for word in unknown if word not in values]
    if unknown:
        tool.refuse(unknown)
    return args


def _code_of(error: Exception, args: argparse.Namespace) -> int:
    """Returns the exit code of an error of a tool; that of a path that was given is a mistake."""
    if isinstance(error, FileNotFoundError):
        given = [one for value in vars(args).values() for one in _listed(value)]
        paths = {os.path.abspath(one) for one in given if isinstance(one, (str, Path))}
        if error.filename and os.path.abspath(error.filename) in paths:
            return ExitCode.MISTAKE
    return exit_code_of(error, in_setup=True)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


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
    parser = parser_of(asked)
    if not words:
        parser.print_help()
        return ExitCode.MISTAKE
    end = words.index("--") if "--" in words else len(words)
    args = _parse(parser, words[:end])
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
        return _code_of(error, args)
    return code


if __name__ == "__main__":
    sys.exit(main())
