"""`python -m expbase`: the tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from expbase import runner
from expbase.tools import ls, plot, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m expbase", description=__doc__)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for tool in (runner, ls, plot, verify):
        tool.add_parser(tools)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help()
        return 2
    before, after = _split(words)
    args = parser.parse_args(before)
    args.words = after
    try:
        code: int = args.run(args)
    except args.slips as error:  # of the person who called; anything else shows its traceback
        print(f"python -m expbase {args.tool}: error: {error}", file=sys.stderr)
        return 1
    return code


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after `--`; what comes after is for the user's own script."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
