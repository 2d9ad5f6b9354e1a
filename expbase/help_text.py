"""What every command of expbase has: help texts in paragraphs, and a plain answer on Windows.

A leaf without paddle: a tool that only reads begins in a tenth of the time without it.
"""

from __future__ import annotations

import argparse
import re
import sys

from expbase.config import ConfigError


class Paragraphs(argparse.HelpFormatter):
    """Fits each paragraph of a text to the terminal; what is indented stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(
            part if re.search("^ ", part, re.MULTILINE) else fill(part, width, indent)
            for part in text.strip().split("\n\n")
        )


def check_system() -> None:
    """Raises a ConfigError on Windows."""
    if sys.platform == "win32":  # no signals, no locks, no /proc
        raise ConfigError(
            "Windows: expected Linux. Install Python, paddle and paddle-expbase in WSL2."
        )
