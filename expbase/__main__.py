"""`python -m expbase`: the tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from expbase.tools import verify


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one tool; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m expbase", description=__doc__)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    verify.add_parser(tools)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"python -m expbase {args.tool}: error: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
