"""Fixtures that several test files share."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pretend
import pytest

# Nothing that imports paddle: it looks for plug-ins for devices when it is imported.

# What takes longest begins first, so that no core waits for it at the end.
_FIRST = """
    pretend proofs readme watch stop evaluate_and_export evaluation resume experiment
    safe_first yaml_runner mixins verify distributed provenance first_updates update rank_state
    restarts launch progress_bar board experiments
""".split()


_OURS = Path(__file__).parents[1] / "expbase/__init__.py"
# Tests start processes without a PYTHONPATH, and in other folders.
_WHICH = "import importlib.util as u; print(getattr(u.find_spec('expbase'), 'origin', None) or '')"

_stderr = 2
_num_left_out = 0  # of long tests


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --device."""
    text = f"what the tests train on: cpu, gpu …, or the pretend accelerator, {pretend.NAME}"
    parser.addoption("--device", default="cpu", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Lets xdist keep our order, else the files of the most tests would be first.

    Undoes nohup, and the & of a script: who ignores a signal hands that down to all that it starts.
    """
    if not hasattr(config, "workerinput"):
        _refuse_another()
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


def _refuse_another() -> None:
    """Ends the tests if they, or the processes that they start, would import another expbase."""
    here = getattr(importlib.util.find_spec("expbase"), "origin", None) or ""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    how: dict[str, Any] = {"cwd": "/", "env": environment, "text": True}
    started = subprocess.check_output([sys.executable, "-c", _WHICH], **how).strip()
    for origin in (here, started):
        if not os.path.exists(origin) or not os.path.samefile(origin, _OURS):
            raise pytest.UsageError(
                f"these tests would test {origin or 'no expbase'}; expected {_OURS}, beside which "
                'they lie. Install this clone first: pip install -e ".[cpu,test]"'
            )


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts the long tests that are left out."""
    global _num_left_out
    _num_left_out += sum(item.get_closest_marker("long") is not None for item in items)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the long files first; leaves out what is only for a device that is not this one."""
    if not config.getoption("--device").startswith(pretend.NAME):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("pretend")])
        items[:] = [item for item in items if not item.get_closest_marker("pretend")]
    places = {f"test_{name}.py": place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Keeps what is imported by now from being looked at by each collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Removes what killed workers have left in shared memory: no start comes that would do it."""
    from expbase.data.shared_memory import remove_left_files

    remove_left_files()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = _num_left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the count of a worker, which collects what all of them do."""
    global _num_left_out
    _num_left_out = getattr(node, "workeroutput", {}).get("left_out", _num_left_out)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Says in the last line what was left out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if _num_left_out and reporter and not hasattr(config, "workerinput"):
        how = 'python -m pytest -m long runs them, python -m pytest -m "" all'
        reporter.write_line(f"left out: {_num_left_out} long tests; {how}")


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
