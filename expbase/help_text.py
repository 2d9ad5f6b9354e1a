"""What every command of expbase has: a parser, help texts in paragraphs, an answer on Windows.

A leaf without paddle: a tool that only reads begins in a tenth of the time without it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from expbase._version import __version__
from expbase.base.did_you_mean import did_you_mean
from expbase.base.exit_codes import ExitCode
from expbase.config import ConfigError


class Paragraphs(argparse.HelpFormatter):
    """Fits each paragraph of a text to the terminal; what is indented stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(
            part if re.search("^ ", part, re.MULTILINE) else fill(part, width, indent)
            for part in text.strip().split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """Answers a wrong word as any other mistake: by one line, in which no usage hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.MISTAKE, f"{self.prog}: error: {message}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Answers words that nothing takes, with the option that is most like the first."""
        name = unknown[0].partition("=")[0]
        all_of_them = " --help names all there are."
        hint = did_you_mean(name, self._option_string_actions, otherwise=all_of_them, shown=str)
        self.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")


def add_version(parser: argparse._ActionsContainer) -> None:
    """Adds --version, which ends the process."""
    parser.add_argument(
        "--version",
        action="version",
        version=f"expbase {__version__}",
        help="print the version of expbase and end",
    )


def check_system() -> None:
    """Raises a ConfigError on Windows."""
    if sys.platform == "win32":  # no signals, no locks, no /proc
        raise ConfigError(
            "Windows: expected Linux. Install Python, paddle and paddle-expbase in WSL2."
        )
