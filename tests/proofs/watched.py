"""A process and everything that came of it, which is never left alone.

watched = Watched([sys.executable, "train.py"], Path("run.txt"))
with watched.started() as process:
    process.kill()
    watched.seconds_until_gone(5)     # how long its children outlived it
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


class Watched:
    """A command that may be started again and again.

    Args:
        command: Its words.
        log: What it prints is appended to this file.
        environment: Of the command; by default this process's.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._command = list(command)
        self._log = log
        self._environment = environment
        self._token = uuid.uuid4().hex  # children inherit it, also those that change their group

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The process in a session of its own; what is left of it afterwards is killed."""
        environment = {**self._environment, "PYTHONWARNINGS": "ignore"}
        environment["EXPBASE_PROOF"] = self._token
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            yield process
        finally:
            for pid in {process.pid, *self.family()}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def family(self) -> list[int]:
        """The living processes that came of the command."""
        token = self._token.encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if token in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def seconds_until_gone(self, limit: float) -> float:
        """How long somebody of the family lives on; a bit more than the limit if longer."""
        began = time.monotonic()
        while self.family() and time.monotonic() - began <= limit:
            time.sleep(0.01)
        return time.monotonic() - began
