"""What looks at runs, repeats them and proves things of them; train.py makes them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from expbase.extras import runner
from expbase.tools import board, ls, plot, replay, show, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m expbase", description=__doc__)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for tool in (runner, board, ls, plot, show, replay, verify):
        tool.add_parser(tools)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help()
        return 2
    before, after = _split(words)
    args, rest = parser.parse_known_args(before)
    if rest and hasattr(args, "overrides") and all(map(_is_setting, rest)):
        args.overrides += rest  # argparse takes them at one place alone
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)} (for your own script: after --)")
    if after and args.tool != "verify":
        parser.error(f"words after --: {' '.join(after)}; only verify takes some, for your script")
    args.words = after
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except args.user_errors as error:  # anything else shows its traceback
        print(f"python -m expbase {args.tool}: error: {error}", file=sys.stderr)
        return 1
    return code


def _is_setting(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after `--`; what comes after is for the user's own script."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
