"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

# What starts the most processes begins first, so that no core waits for it at the end.
_FIRST = ("proofs", "verify", "stopping", "distributed", "readme", "replay", "evaluation", "extras")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long files first."""
    names = [f"test_{name}.py" for name in _FIRST]
    items.sort(key=lambda item: item.path.name not in names)  # otherwise in their order


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script whose body is `main(Tiny)`."""
    path = tmp_path / "train.py"
    path.write_text(
        "from tiny import Tiny\nfrom expbase import main\n"
        "if __name__ == '__main__':\n    main(Tiny)\n"
    )
    return path
