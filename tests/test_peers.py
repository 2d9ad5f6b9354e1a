"""The other ranks: one that dies or is stopped, however it was started; one that never comes.

Ranks that fail by an error are in test_stopping.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
from paddle.base import core
from tiny import Tiny, make, run_ranks, run_script

from expbase import distributed, peers, processes

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


def test_questions_to_the_store_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def connections() -> dict[str, bool]:
        """Whether each connection of this process to the store sends at once, by its number."""
        found = {}
        for path in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
            made = socket.socket(fileno=int(path.name))
            with contextlib.suppress(OSError, IndexError):
                if made.getpeername()[1] == port:
                    found[path.name] = bool(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            made.detach()
        return found

    monkeypatch.setattr(distributed, "_stores", [])
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paddles = core.TCPStore("127.0.0.1", port, True, 1)
    before = connections()
    peers._ask_at_once("127.0.0.1", port)
    assert not any(before.values())  # paddle's own stays as it is
    assert [at_once for number, at_once in connections().items() if number not in before] == [True]
    assert distributed.add_to_store("a", 2) == paddles.add("a", 0) == 2


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(KILLED)
    return path


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("launch", [0, 2])
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


STOPPED = """
import os, signal, time
from tiny import Tiny
from expbase import main


class Stopped(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 5 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def valid(self):
        if self.iteration == 3 and self.rank == 1:
            time.sleep(8)  # longer than the limit, but its thread answers
        return super().valid()


if __name__ == "__main__":
    main(Stopped)
"""


def test_a_rank_that_is_stopped_is_named_with_its_place_and_one_that_is_busy_is_waited_for(
    tmp_path: Path,
) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(STOPPED)
    words = ["training.valid_interval=3", "training.hang_seconds=6"]
    result = run_script(script, "--output", str(run), "--device", "cpu", "--nprocs", "2", *words)
    assert result.returncode == 1
    last_line = (run / "worker_0.log").read_text().splitlines()[-1]
    text = r"rank 1 has not answered for \d+ s \(last in \w+ at iteration \d\): it is stopped, or"
    assert re.search(rf"\[[56]\] ended, because another rank failed: {text}", last_line)


# Gloo aborts in C++ when a rank is late; the text before it is what the others' threads told.
ABORTED = """
import os, time
from tiny import Tiny
from expbase import main, peers

peers._ABORT_SECONDS = 0.1


class Aborted(Tiny):
    def train_batch(self):
        while self.iteration == 3 and self.rank == 1:
            if "train at iteration 3" in self._other_ranks.others():
                os.abort()
            time.sleep(0.1)
        super().train_batch()


if __name__ == "__main__":
    main(Aborted)
"""


def test_a_rank_that_gloo_aborts_names_the_others_and_ends_with_code_1(tmp_path: Path) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(ABORTED)
    result = run_script(script, "--output", str(run), "--device", "cpu", "--nprocs", "2")
    assert result.returncode == 1
    text = "rank 1 aborted, as gloo does when another rank is 30 s late, or gone; rank 0"
    for rank in (0, 1):
        last_line = (run / f"worker_{rank}.log").read_text().splitlines()[-1]
        assert re.search(f"{text}: last in train at iteration 3, heard .* s ago", last_line)


def test_after_an_error_of_gloos_a_line_says_where_the_others_were_last(tmp_path: Path) -> None:
    class Late(Tiny):
        def train_batch(self) -> None:
            raise RuntimeError("[/third_party/gloo/pair.cc] Timed out waiting 30000ms for recv")

    where = "rank 1: last in train at iteration 1, heard 31 s ago"
    exp = make(Late, tmp_path / "run")
    exp.setup()
    exp._other_ranks = SimpleNamespace(
        others=lambda: where, last_words=contextlib.nullcontext, tell=lambda error: None
    )
    with pytest.raises(RuntimeError):
        exp.run()
    assert f"ERROR: [1] {where}" in (tmp_path / "run/worker_0.log").read_text()


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
                peers.LIMIT: "3",
                "PYTHONPATH": str(Path(__file__).parent),
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
from expbase import peers

folder, number = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"came_{os.environ['PADDLE_TRAINER_ID']}").touch()
wait_until(lambda: len([*folder.glob("came_*")]) == number)
peers._SAY_SECONDS = 0.0, 60.0
make(Tiny, folder / "run").setup()
"""


def test_ranks_that_wait_for_one_that_never_comes_say_so_and_end(tmp_path: Path) -> None:
    words = ["-c", EAGER, str(tmp_path), "2"]
    ends = run_ranks([words, [], words], **{peers.LIMIT: "3"})
    assert len(ends) == 2
    for end in ends:
        assert end.returncode == 1
        assert re.search("WARNING: waiting for rank.*; the limit is 3 s", end.stderr)
        assert "rank 1 of 3: did not come within 3 s." in end.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "text", "code"),
    [
        ("kill -9 $$", "was killed by SIGKILL", 137),
        ("exit 3", "ended with code 3, without a word", 3),
    ],
)
def test_how_a_process_ended_is_known_until_its_parent_asks(
    script: str, text: str, code: int
) -> None:
    process = subprocess.Popen(["sh", "-c", script])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert processes.ending(process.pid) == (text, code)
    process.wait()
    assert processes.ending(process.pid) == ("died without a word", 1)


def test_of_a_process_that_ended_well_there_is_nothing_to_say() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert processes.ending(process.pid) == ("", 0)


def test_a_mistake_that_all_ranks_make_is_reported_by_rank_zero_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tiny import Tiny, wait_until\nfrom expbase import main, peers\n"
        "from expbase.config import ConfigError\n"
        "tell = peers.FailureWatch.tell\n"
        "class Mistaken(Tiny):\n"
        "    def setup_model(self):\n"
        "        peers._TELL_SECONDS = 100 * self.rank\n"  # rank 0 is as late as it likes
        "        made = self.output_dir / 'made'\n"
        "        def noting(watch, error):\n"
        "            watch._error = repr(error)\n"
        "            made.touch()\n"
        "            tell(watch, error)\n"
        "        if self.rank:\n"
        "            peers.FailureWatch.tell = noting\n"
        "        else:\n"
        "            wait_until(made.exists)\n"
        "        raise ConfigError('optim.lr: -1 given; expected more than 0.')\n"
        "if __name__ == '__main__': main(Mistaken)\n"
    )
    result = run_script(script, "--output", str(tmp_path / "run"), "--nprocs", "2")
    assert result.returncode == 78
    last_line = "train.py: error: optim.lr: -1 given; expected more than 0."
    assert result.stderr.splitlines()[-1] == last_line
    assert "another rank" not in (tmp_path / "run/worker_0.log").read_text()
