"""The other ranks: one that dies, in whatever way and however it was started; one that never comes.

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

import pytest
from tiny import run_script

from expbase import peers, processes

KILLED = """
import os, signal, sys
from tiny import Tiny
from expbase import main


class Killed(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 5 and self.rank == int(os.environ["KILLED_RANK"]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Killed)
"""


def test_questions_to_the_store_are_sent_at_once() -> None:
    def is_at_once(connection: socket.socket) -> int:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        addresses = [server.getsockname() for server in servers]
        store, other = (stack.enter_context(socket.create_connection(a)) for a in addresses)
        stack.enter_context(socket.socket(socket.AF_UNIX))
        peers._send_at_once(addresses[0][1])
        assert (is_at_once(store), is_at_once(other)) == (1, 0)


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


# Says at once that it waits.
EAGER = """
import sys
from pathlib import Path
from tiny import Tiny, make
from expbase import peers

peers._SAY_SECONDS = 0.0, 60.0
make(Tiny, Path(sys.argv[1])).setup()
"""


def test_ranks_that_wait_for_one_that_never_comes_say_so_and_end(tmp_path: Path) -> None:
    ports = [29611, 29612, 29613]
    shared = {
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in ports),
        peers.LIMIT: "5",
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", EAGER, str(tmp_path / "run")]
    with contextlib.ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "PADDLE_TRAINER_ID": number},
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in ("0", "2")
        ]
        for process in ranks:
            stack.enter_context(process)
            stack.callback(process.kill)
        for process in ranks:
            stderr = process.communicate(timeout=60)[1]
            assert process.returncode == 1
            assert re.search("WARNING: waiting for rank.*; the limit is 5 s", stderr)
            assert "rank 1 of 3: did not come within 5 s." in stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "text"),
    [("kill -9 $$", "was killed by SIGKILL"), ("exit 3", "ended with code 3, without a word")],
)
def test_how_a_process_ended_is_known_until_its_parent_asks(script: str, text: str) -> None:
    process = subprocess.Popen(["sh", "-c", script])
    assert processes.ending(process.pid) == text
    process.wait()
    assert processes.ending(process.pid) == "died without a word"


def test_of_a_process_that_ended_well_there_is_nothing_to_say() -> None:
    with subprocess.Popen(["true"]) as process:
        assert processes.ending(process.pid) == ""


def test_a_mistake_that_all_ranks_make_is_reported_by_rank_zero_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfrom tiny import Tiny\nfrom expbase import main\n"
        "from expbase.config import ConfigError\n"
        "class Mistaken(Tiny):\n"
        "    def setup_model(self):\n"
        "        if self.rank == 0: time.sleep(0.5)\n"
        "        raise ConfigError('optim.lr: -1 given; expected more than 0.')\n"
        "if __name__ == '__main__': main(Mistaken)\n"
    )
    result = run_script(script, "--output", str(tmp_path / "run"), "--nprocs", "2")
    assert result.returncode == 1
    last_line = "train.py: error: optim.lr: -1 given; expected more than 0."
    assert result.stderr.splitlines()[-1] == last_line
    assert "another rank" not in (tmp_path / "run/worker_0.log").read_text()


def test_what_goes_to_the_store_is_not_held_back() -> None:
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [door.getsockname()[1] for door in doors]
        made = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        to_store, to_other = map(stack.enter_context, made)
        peers._send_at_once(ports[0])
        assert to_store.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not to_other.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
