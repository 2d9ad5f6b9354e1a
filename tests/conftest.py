"""Fixtures that several test files share."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pretend
import pytest

# Nothing that imports paddle: it looks for plug-ins for devices when it is imported.

# What takes longest begins first, so that no core waits for it at the end.
_FIRST = """
    pretend proofs readme watch stop evaluate_and_export evaluation resume experiment
    safe_first runner mixins verify distributed provenance first_updates update rank_state
    restarts launch progress_bar board experiments
""".split()


_stderr = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --device."""
    text = f"what the tests train on: cpu, gpu …, or the pretend accelerator, {pretend.NAME}"
    parser.addoption("--device", default="cpu", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Lets xdist keep our order, else the files of the most tests would be first.

    Undoes nohup, and the & of a script: who ignores a signal hands that down to all that it starts.
    """
    global _stderr
    _stderr = os.dup(2)  # not the file where the output of a test is caught
    device = config.getoption("--device")
    os.environ["EXPBASE_TEST_DEVICE"] = device  # for `tiny`, in all processes
    if device.startswith(pretend.NAME):
        try:
            os.environ.update(pretend.environment())
        except RuntimeError as error:
            raise pytest.UsageError(f"--device {device}: {error}") from None
    config.option.loadscopereorder = False
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the long files first; leaves out what is only for a device that is not this one."""
    if not config.getoption("--device").startswith(pretend.NAME):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("pretend")])
        items[:] = [item for item in items if not item.get_closest_marker("pretend")]
    places = {f"test_{name}.py": place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_sessionfinish() -> None:
    """Removes what killed workers have left in shared memory: no start comes that would do it."""
    from expbase.data.shared_memory import remove_left_files

    remove_left_files()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says so if nothing could run on the pretend accelerator."""
    if pretend.missing():
        terminalreporter.write_line(f"nothing ran on the pretend accelerator: {pretend.missing()}")


@pytest.fixture(autouse=True)
def _told() -> None:
    """Has the stack printed when the process dies, as of a page that only a device may touch.

    The handlers of pytest are gone: paddle sets its own when it is imported, and a run Python's.
    """
    faulthandler.disable()
    faulthandler.enable(_stderr)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    """Lets each test begin on the device of --device, whatever the one before it has set."""
    device = request.config.getoption("--device")
    if device != "cpu" and "paddle" in sys.modules:
        sys.modules["paddle"].set_device(device)


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
