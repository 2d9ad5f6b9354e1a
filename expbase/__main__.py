"""Begins experiments, looks at runs and proves things of them; train.py trains."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from expbase.extras import runner
from expbase.tools import board, ls, new, plot, show, verify

_GONE = {
    "replay": "the run's own command comes to its failure again",
    "--reproduce": "show prints the commit, the diff for git apply and the command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m expbase", description=__doc__)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for tool in (new, runner, board, ls, plot, show, verify):
        tool.add_parser(tools)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help()
        return 2
    place = words.index("--") if "--" in words else len(words)
    for word in _GONE.keys() & words[:place]:
        parser.error(f"{word}: is gone: {_GONE[word]}")
    args, rest = parser.parse_known_args(words[:place])
    args.words = words[place + 1 :]  # for the user's own script
    if rest and hasattr(args, "overrides") and all("=" in w and w[0] != "-" for w in rest):
        args.overrides += rest  # argparse takes them at one place alone
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)} (for your own script: after --)")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head say, reads no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except args.user_errors as error:  # anything else shows its traceback
        print(f"python -m expbase {args.tool}: error: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
