"""Fixtures that several test files share."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import forks
import pytest

from expbase.data.shared_memory import remove_left_files

# What takes longest begins first, so that no core waits for it at the end.
_FIRST = """
    proofs readme watch stop evaluate_and_export evaluation resume experiment safe_first runner
    mixins verify distributed provenance first_updates update rank_state restarts launch
    progress_bar board experiments
""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Lets xdist keep our order, else the files of the most tests would be first.

    Undoes nohup, and the & of a script: who ignores a signal hands that down to all that it starts.
    """
    config.option.loadscopereorder = False
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long files first."""
    places = {f"test_{name}.py": place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_sessionfinish() -> None:
    """Removes what killed workers have left in shared memory: no start comes that would do it."""
    remove_left_files()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that a tool starts are forked."""
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script whose body is `main(Tiny)`."""
    path = tmp_path / "train.py"
    path.write_text(
        "from tiny import Tiny\nfrom expbase import main\n"
        "if __name__ == '__main__':\n    main(Tiny)\n"
    )
    return path
