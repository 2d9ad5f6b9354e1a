"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script whose body is `main(Tiny)`."""
    path = tmp_path / "train.py"
    path.write_text(
        "from tiny import Tiny\nfrom expbase import main\n"
        "if __name__ == '__main__':\n    main(Tiny)\n"
    )
    return path
