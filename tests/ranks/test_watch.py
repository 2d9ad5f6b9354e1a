"""The other ranks: one that dies or is stopped, however it was started; one that never comes.

Ranks that fail by an error are in test_stop.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from tiny import DEVICE, run_ranks, run_script

from expbase.base import processes
from expbase.ranks import collectives, store
from expbase.ranks.watch import LIMIT, Watch

KILLED = '''
import os, signal, subprocess, sys
from tiny import Tiny
from expbase import main


class Killed(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 5 and self.rank == int(os.environ["KILLED_RANK"]):
            if "PADDLE_LOCAL_RANK" in os.environ:  # how it ended is known until its parent asks
                subprocess.Popen(["sh", "-c", LAUNCHER, "sh", *map(str, self.said())])
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)

    def said(self):
        log = self.output_dir / f"worker_{1 - self.rank}.log"
        return os.getppid(), os.getpid(), log


# Kills a rank while the launcher stands still, which looks each second, until the other one speaks.
LAUNCHER = """
kill -STOP $1; kill -KILL $2
n=0; while [ $n -lt 4000 ] && ! grep -q 'another rank failed' $3; do sleep 0.05; n=$((n+1)); done
kill -CONT $1
"""

if __name__ == "__main__":
    main(Killed)
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(KILLED)
    return path


LONG = [pytest.param(*case, marks=pytest.mark.long) for case in ((0, 0), (2, 0), (2, 1))]


@pytest.mark.parametrize(("launch", "killed"), [(0, 1), *LONG])
def test_a_rank_that_is_killed_is_named_with_the_signal_by_the_other_one(
    killed: int, launch: int, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_RANK", str(killed))
    run = script.parent / "run"
    words = ["--output", str(run), "--device", "cpu", "training.max_iteration=100000"]
    result = run_script(script, *words, *([] if launch else ["--nprocs", "2"]), launch=launch)
    assert result.returncode != 0
    last_line = (run / f"worker_{1 - killed}.log").read_text().splitlines()[-1]
    text = f"another rank failed: rank {killed} was killed by SIGKILL"
    assert text in last_line
    if not launch:
        assert result.stderr.splitlines()[-1] == f"rank {killed} was killed by SIGKILL"
    elif killed == 1:
        assert text in (script.parent / "launch_log/workerlog.0").read_text()


@pytest.mark.long
def test_a_death_is_told_to_those_who_are_connected_to_rank_zero_alone(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED_RANK", "2")
    run = script.parent / "run"
    words = ["--output", str(run), "--device", "cpu", "training.max_iteration=100000"]
    run_script(script, *words, "--nprocs", "3")
    last_line = (run / "worker_1.log").read_text().splitlines()[-1]
    assert "another rank failed: rank 2 was killed by SIGKILL" in last_line


@pytest.mark.pretend
def test_ranks_that_wait_in_a_collective_of_the_device_end_when_one_is_killed(
    script: Path,
) -> None:
    words = [str(script), "--output", str(script.parent / "run"), "training.max_iteration=100000"]
    *others, killed = run_ranks([words] * 4, KILLED_RANK="3")
    assert killed.returncode == -signal.SIGKILL
    for rank, other in enumerate(others):
        assert other.returncode == 1
        last_line = (script.parent / f"run/worker_{rank}.log").read_text().splitlines()[-1]
        assert "another rank failed: rank 3 " in last_line
    assert f"{DEVICE}:0, ranks: 4" in others[0].stderr


STOPPED = """
import os, signal
from tiny import Tiny
from expbase import main


class Stopped(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 5 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(Stopped)
"""


@pytest.mark.long
def test_a_rank_that_is_stopped_ends_the_run_if_a_hang_does_and_the_launcher_names_it(
    tmp_path: Path,
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(STOPPED)
    words = ["--nprocs", "2", "training.hang_seconds=2", "training.hang_action=end"]
    result = run_script(script, "--output", str(run), "--device", "cpu", *words)
    assert result.returncode == 1
    text = "rank 1 did not end when another one had failed, and was killed"
    assert result.stderr.splitlines()[-1] == text
    log = (run / "worker_0.log").read_text()
    text = "no progress for 2 s: phase=train .*. The stacks of"
    assert re.search(text, log)


# Gloo aborts as soon as it sees a death, when the thread has perhaps not said it yet.
ABORTED = """
import os, signal, threading, time
from tiny import Tiny
from expbase import main
from expbase.ranks import watch

heard, ending = threading.Event(), watch.ending


def slow_ending(pid):
    heard.set()
    time.sleep(0.5)  # for the main thread to abort
    return ending(pid)


watch.ending = slow_ending


class Aborted(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.iteration == 3:
            heard.wait()
            os.abort()


if __name__ == "__main__":
    main(Aborted)
"""


@pytest.mark.long
def test_a_rank_that_gloo_aborts_names_the_death_that_is_the_cause_before_it_ends(
    tmp_path: Path,
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(ABORTED)
    run_script(script, "--output", str(run), "--device", "cpu", "--nprocs", "2")
    last_line = (run / "worker_0.log").read_text().splitlines()[-1]
    assert "another rank failed: rank 1 was killed by SIGKILL; the same command" in last_line


LEFT = [  # what has come when a connection closes, and how the rank left
    (b'[1, 2, "there"]\n["rank 1: OSError()", 1]\n', ("rank 1: OSError()", 1)),
    (b'[1, 2, "there"]\n["", 0]\n', ("", 0)),
    (b'[1, 2, "there"]\n', ("rank 1 died without a word", 1)),
    # A stranger is nobody.
    (b"GET / HTTP/1.1\r\n\r\n", ("", 0)),
    (b"", ("", 0)),
    (b"[" * 50_000, ("", 0)),
    (b'[1, 2, "there"]\n["", Infinity]\n', ("", 0)),
]


def test_how_a_rank_left_is_read_when_its_connection_closes_and_strangers_are_nobody() -> None:
    for received, left in LEFT:
        assert end_of(received, socket.socketpair) == left, received[:50]


def end_of(received: bytes, connect: Callable[[], Any]) -> tuple[str, int]:
    """With what a rank ends when the other end has sent this and closes its connection."""
    own, other = connect()
    watch = object.__new__(Watch)
    watch.__dict__ |= {"_received": {own: b""}, "_error": ""}
    ends = [("", 0)]
    watch._end = lambda *end: ends.append(end)
    other.sendall(received)
    other.close()
    while watch._received:
        watch._receive(own)
    return ends[-1]


def test_a_stranger_that_never_ends_is_not_listened_to() -> None:
    own, other = socket.socketpair()
    watch = object.__new__(Watch)
    watch.__dict__ |= {"_received": {own: b""}, "_error": ""}
    other.setblocking(False)
    while watch._received:
        other.send(b"GET /" * 1000)
        watch._receive(own)
    with pytest.raises(ConnectionError):
        other.send(b"GET /")
    other.close()


class Gone:
    """A connection whose other end does not acknowledge anything any more."""

    sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def recv(self, size: int) -> bytes:
        sent, self.sent = self.sent, b""
        if sent:
            return sent
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    def close(self) -> None:
        pass


def test_a_machine_that_is_gone_is_named_by_its_rank() -> None:
    gone = Gone()
    text = "rank 1 fell silent: its machine or its network is gone"
    assert end_of(b'[1, 2, "there"]\n', lambda: (gone, gone)) == (text, 1)


def test_what_a_rank_says_last_can_be_read_before_its_process_has_ended() -> None:
    own, other = socket.socketpair()
    watch = object.__new__(Watch)
    watch._received = {own: b""}
    other.settimeout(60)
    watch._leave("rank 1: OSError()", 1)
    assert other.makefile().read() == '["rank 1: OSError()", 1]\n'  # until its end
    own.close()
    other.close()


def test_a_connection_asks_whether_the_machine_at_its_other_end_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        watch = object.__new__(Watch)
        watch._received = {}
        watch._greet(connection)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    seconds = {
        name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")
    }
    assert seconds == {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_USER_TIMEOUT": 60_000}
    connection.close()


def test_a_socket_of_another_thread_that_is_gone_ends_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    os.close(gone := os.dup(one.fileno()))
    found = [set(), {Path(f"/proc/self/fd/{number}") for number in (gone, one.fileno())}]
    monkeypatch.setattr(store, "_sockets", lambda: found.pop(0))
    monkeypatch.setattr(store.core, "TCPStore", lambda *given: given)
    with one, other:
        store._ask_at_once("127.0.0.1", 1)
        one.send(b"open")  # it is no socket of TCP, and stays as it was
        assert other.recv(4) == b"open"
    assert store._connections.pop() == ("127.0.0.1", 1, False, 1)


@pytest.mark.long
def test_a_rank_zero_that_never_answers_is_not_waited_for_without_limit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as the system of a stopped one does
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        result = forks.run(
            [sys.executable, "-c", EAGER, str(tmp_path), "1"],
            env={
                **os.environ,
                "PADDLE_TRAINERS_NUM": "2",
                "PADDLE_TRAINER_ID": "1",
                "PADDLE_TRAINER_ENDPOINTS": f"{endpoint},127.0.0.1:1",
                LIMIT: "3",
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "PYTHONWARNINGS": "ignore",
            },
        )
    assert result.returncode == 1
    assert "in _make_store" in result.stderr


# Says at once that it waits, and begins when as many are there.
EAGER = """
import os, sys
from pathlib import Path
from tiny import Tiny, make, wait_until
from expbase.ranks import watch

folder, number = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"came_{os.environ['PADDLE_TRAINER_ID']}").touch()
wait_until(lambda: len([*folder.glob("came_*")]) == number)
watch._SAY_SECONDS = 1.0
make(Tiny, folder / "run").setup()
"""


@pytest.mark.long
def test_ranks_that_wait_for_one_that_never_comes_say_so_and_end(tmp_path: Path) -> None:
    words = ["-c", EAGER, str(tmp_path), "2"]
    ends = run_ranks([words, [], words], **{LIMIT: "3"})
    assert len(ends) == 2
    for end in ends:
        assert end.returncode == 1
        assert re.search("WARNING: waiting for rank.*; the limit is 3 s", end.stderr)
        lines = [line for line in end.stderr.splitlines() if "tcp_store.cc" not in line]
        assert "rank 1 of 3: did not come within 3 s." in lines[-1]
    assert not (tmp_path / "run").exists()


GLOO = "gloo aborts a rank when another one is 30 s late, or gone"


def test_how_a_process_ended_is_known_until_its_parent_asks() -> None:
    for script, text, code in (
        ("kill -9 $$", "was killed by SIGKILL", 137),
        ("kill -ABRT $$", f"was killed by SIGABRT ({GLOO})", 134),
        ("exit 3", "ended with code 3, without a word", 3),
        ("exit 0", "", 0),
    ):
        process = subprocess.Popen(["sh", "-c", script])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert processes.ending(process.pid) == (text, code), script
        process.wait()
        assert processes.ending(process.pid) == ("died without a word", 1), script


def test_a_mistake_that_all_ranks_make_is_reported_by_each_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tiny import Tiny, wait_until\nfrom expbase import main\n"
        "from expbase.ranks import watch\n"
        "from expbase.config import ConfigError\n"
        "tell = watch.Watch.tell\n"
        "class Mistaken(Tiny):\n"
        "    def setup_model(self):\n"
        "        watch._TELL_SECONDS = 100 * self.rank\n"  # rank 0 is as late as it likes
        "        made = self.output_dir / 'made'\n"
        "        def noting(self, error):\n"
        "            self._error = repr(error)\n"
        "            made.touch()\n"
        "            tell(self, error)\n"
        "        if self.rank:\n"
        "            watch.Watch.tell = noting\n"
        "        else:\n"
        "            wait_until(made.exists)\n"
        "        raise ConfigError('optim.lr: -1 given; expected more than 0.')\n"
        "if __name__ == '__main__': main(Mistaken)\n"
    )
    result = run_script(script, "--output", str(tmp_path / "run"), "--nprocs", "2")
    assert result.returncode == 78
    last_line = "train.py: error: optim.lr: -1 given; expected more than 0."
    assert result.stderr.splitlines()[-1] == last_line
    logs = [(tmp_path / f"run/worker_{rank}.log").read_text() for rank in (0, 1)]
    assert "another rank" not in "".join(logs)


@pytest.mark.parametrize(
    ("iteration", "barrier", "ended"),
    [
        (4, [0, 7], True),  # this rank, in iteration 5, has not been there, and never will
        (5, [0, 7], False),  # it may still come
        (4, [0, 6], False),  # it has come since
    ],
)
def test_a_wait_of_another_rank_ends_the_run_if_this_one_is_past_it(
    monkeypatch: pytest.MonkeyPatch, iteration: int, barrier: list[int], ended: bool
) -> None:
    ends: list[int] = []
    watch = Watch.__new__(Watch)
    vars(watch).update(_iteration=lambda: 5, _end=lambda failure, code: ends.append(code))
    monkeypatch.setattr(collectives, "_next_barrier", [0, 7])  # that this rank makes next
    wait = {"place": "self.save()", "barrier": barrier, "iteration": iteration, "rank": 0}
    line = json.dumps(wait).encode()
    strange = b'{"place": 3}\n{\n'
    assert watch._without_waits(b"[0, 1]\n" + strange + line + b"\n[") == b"[0, 1]\n["
    assert ends == [78] * ended
