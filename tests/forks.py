"""Python programs for tests, forked from a process that has paddle: its import takes longer than
most of them run.

    with forks.Popen([sys.executable, "train.py"], env={"PYTHONWARNINGS": "ignore"}) as process: ...

is what subprocess.Popen is: any command, any stream, an id to send signals to. A program that runs
this interpreter, and ignores warnings, begins in a fork: with the modules of `tiny` loaded, one
thread, no random state in common with another one, and in a session of its own. All else is as
for a fresh one (test_forks.py); what an import does is for tests that start fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LONG_SECONDS = 300.0  # that nothing in the tests takes, however busy the machine is
_MAX_BYTES = 1 << 17  # of a request: a command and an environment


_Fresh: Any = subprocess.Popen  # which tests may replace by the next one


class Popen(_Fresh):  # type: ignore[misc]
    """A process, forked if it can be; the rest is inherited, and how it is started is not."""

    _report = -1  # where its id comes from, and how it ended

    def _execute_child(self, args: Any, *options: Any) -> None:  # in the order of 3.10 to 3.13
        cwd, env, streams = options[4], options[5], options[9:15]
        environment = dict(os.environ if env is None else env)
        words = _program(args, environment)
        if not words:
            super()._execute_child(args, *options)
            return
        import paddle

        # It had a thread with a lock; a fork might find it taken, and wait for it at its exit.
        if paddle.__version__ < "3.1.1":
            super()._execute_child(args, *options[:20], True, *options[21:])  # the session
            return
        self._report, told = os.pipe()
        given = {"args": args, "words": words, "cwd": str(cwd or os.getcwd()), "env": environment}
        fds = [n if fd == -1 else fd for n, fd in enumerate((streams[0], streams[3], streams[5]))]
        socket.send_fds(_server(), [json.dumps(given).encode()], [*fds, told])
        os.close(told)
        self._close_pipe_fds(*streams)
        self.pid = int.from_bytes(os.read(self._report, 8), "little")
        if not self.pid:  # a signal to 0 would reach this process
            raise RuntimeError(f"the process that forks has ended; {args} is not started")
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._report == -1:
            return super()._try_wait(wait_flags)  # type: ignore[no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._report], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._report, 8) or bytes([signal.SIGKILL])  # of its parent, and so of it
        os.close(self._report)
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, *args: Any, **options: Any) -> Any:
        if self._report == -1:
            super()._internal_poll(*args, **options)
            return self.returncode
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(
    args: Sequence[Any], said: str = "", timeout: float = LONG_SECONDS, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, and returns what it printed."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Popen(args, text=True, **pipes, **how) as process:
        try:
            out, err = process.communicate(said, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _program(args: Any, environment: dict[str, str]) -> list[str]:
    """What the interpreter is to run; empty: the command is another one, or it may warn."""
    if isinstance(args, str) or args[0] != sys.executable:
        return []
    words = [os.fspath(word) for word in args[1:]]
    is_silent = environment.get("PYTHONWARNINGS") == "ignore"
    while words[:1] in (["-u"], ["-W"]):
        is_silent |= words[:2] == ["-W", "ignore"]
        words = words[1 if words[0] == "-u" else 2 :]
    is_known = bool(words) and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
    return words if is_silent and is_known else []


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that forks, which ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = _Fresh(
        [sys.executable, "-W", "ignore", __file__, str(there.fileno())],
        pass_fds=[there.fileno()],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    there.close()
    atexit.register(server.wait)
    atexit.register(_end, here, os.getpid())
    return here


def _end(here: socket.socket, owner: int) -> None:
    """Ends the process that forks, also where a worker that is left holds its connection open."""
    if os.getpid() == owner:
        here.shutdown(socket.SHUT_RDWR)
        here.close()


def serve(door: socket.socket) -> Callable[[], object]:
    """Forks, until nobody can ask any more; returns only in a fork: the program that it is for."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        request, fds, *_ = socket.recv_fds(door, _MAX_BYTES, 4)
        if not request:
            os._exit(0)
        if not os.fork():
            door.close()
            return _kept(json.loads(request), fds)
        for fd in fds:
            os.close(fd)


def _kept(given: dict[str, Any], fds: list[int]) -> Callable[[], object]:
    """Forks the program, and tells its id and how it ended."""
    from expbase.base.processes import die_with_parent

    die_with_parent()
    *streams, told = fds
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        die_with_parent(keeper)
        return _begun(given, streams)
    for fd in (0, 1, 2, *streams):  # who reads them waits for their end
        with contextlib.suppress(OSError):
            os.close(fd)
    for number in (pid, 0):
        os.write(told, (number or os.waitpid(pid, 0)[1]).to_bytes(8, "little"))
    os._exit(0)


def _begun(given: dict[str, Any], streams: list[int]) -> Callable[[], object]:
    """Makes this process what the interpreter would make of itself; returns what it runs."""
    import numpy as np

    os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    np.random.seed()
    sys.orig_argv[:] = given["args"]
    what, *words = given["words"]
    folders = filter(None, given["env"].get("PYTHONPATH", "").split(os.pathsep))
    first = {"-c": "", "-m": os.getcwd()}.get(what, str(Path(what).resolve().parent))
    sys.path[:1] = [first, *folders]  # in place of the directory of this file
    if what == "-m":
        sys.argv = words
        return functools.partial(runpy.run_module, words[0], run_name="__main__", alter_sys=True)
    sys.argv = [what, *words[what == "-c" :]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if what != "-c":
        main.__file__ = os.path.abspath(what)
    source = words[0] if what == "-c" else Path(what).read_text(encoding="utf-8")
    code = compile(source, "<string>" if what == "-c" else what, "exec", dont_inherit=True)
    return functools.partial(exec, code, vars(main))


if __name__ == "__main__":
    import numpy.random  # noqa: F401
    import tiny  # noqa: F401  # with paddle and expbase

    gc.freeze()  # no fork looks for garbage in what is loaded, and copies its memory for that
    serve(socket.socket(fileno=int(sys.argv[1])))()
