"""Players of schedulers: they start, signal, kill and restart a command as the real ones do.

Each takes the recipe from docs/clusters.md, so what is tried is what stands there.

    job = Job(folder, iterations=200)
    pod = Pod(job, recipe("job.yaml"))
    with pod.started() as container:
        container.terminate()      # SIGTERM to its first process, SIGKILL after the grace period
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from compare import ledger, logged
from watched import Watched

PROOFS = Path(__file__).parent
PAGE = PROOFS.parents[1] / "docs/clusters.md"
LONG_SECONDS = 300.0  # that nothing here takes, however busy the machine is
GONE_SECONDS = 60.0  # that what came of an ended command may still be there
KILL_WAIT = 15.0  # of Slurm; by default it is 30 s

SCRIPT = """
import itertools, os, sys, time
sys.path.insert(0, {proofs!r})
from net import Net
from expbase import main
from expbase.checkpoint import storage as checkpoint

write = checkpoint.write

def write_slowly(*args):
    time.sleep(float(os.environ.get("WRITE_SECONDS", 0)))
    return write(*args)

checkpoint.write = write_slowly
made = itertools.count(1)  # iterations of this start

class Train(Net):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data.update({data!r})
        config.training.update({training!r})
        return config

    def setup_dataloader(self):
        open("in_setup", "w").close()
        for _ in range(20 * int(os.environ.get("SETUP_SECONDS", 0))):
            time.sleep(0.05)  # python hears a signal that comes just before a sleep at its end
        super().setup_dataloader()

    def train_batch(self):
        super().train_batch()
        # At last slowly, if it must not end by itself: when it has logged a line.
        time.sleep(float(os.environ.get("PACE_SECONDS", 0.01)) if next(made) > 12 else 0.01)

if __name__ == "__main__":
    main(Train)
"""


def recipe(name: str) -> str:
    """The block of the page whose first or second line names this file."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    (found,) = [block for block in blocks if f"# {name}\n" in block]
    return str(found)


class Job:
    """A folder with the train.py that the recipes start, and its output in runs/line.

    Args:
        folder: Is made.
        iterations: Of the whole run.
        workers: Of each loader.
        nodes: That share the folder; each has a working directory of its own in it.
        script: What train.py is; by default the experiment of net.py.
    """

    def __init__(
        self, folder: Path, iterations: int, workers: int = 0, nodes: int = 1, script: str = ""
    ) -> None:
        self.folder, self.nodes = folder, nodes
        self.output = folder / "runs/line"
        self.log = folder / "said.txt"
        data = {"workers": workers, "samples": 154}
        training = {"max_iteration": iterations, "save_interval": 40, "valid_interval": 60}
        training |= {"log_interval": 10}
        text = script or SCRIPT.format(proofs=str(PROOFS), data=data, training=training)
        for node in range(nodes):
            self.directory(node).mkdir(parents=True)
            (self.directory(node) / "train.py").write_text(text)
            (self.directory(node) / "runs").symlink_to(folder / "runs")  # the disk that they share
        (folder / "runs").mkdir()

    def directory(self, node: int) -> Path:
        """Where a node's command is started."""
        return self.folder / f"node{node}"

    def environment(self, **more: str) -> dict[str, str]:
        """Of the command: `python` is this one, and the CPU is the device of paddle's launcher."""
        here = str(Path(sys.executable).parent)
        return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", **more}

    def watched(self, command: list[str], node: int = 0, **more: str) -> Watched:
        """The command on a node; not started yet."""
        words = ["env", "-C", str(self.directory(node)), *command]
        return Watched(words, self.log, self.environment(**more))

    @property
    def starts(self) -> int:
        """Of the run, which the ledger has."""
        return len(ledger(self.output, "start"))

    def trains(self, starts: int) -> bool:
        """Whether the newest of so many starts has logged a line."""
        begun = ledger(self.output, "start")
        with suppress(FileNotFoundError, IndexError, ValueError):
            last = logged(self.output)[-1]["iteration"]
            return len(begun) >= starts and bool(last > begun[-1]["iteration"])
        return False

    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return any(end["reason"] == "finished" for end in ledger(self.output, "end"))

    def said(self, text: str) -> bool:
        """Whether a log of the run has this text."""
        return any(text in log.read_text() for log in self.output.glob("worker_*.log"))


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it came true."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > LONG_SECONDS:
            raise TimeoutError(f"{what}: not within {LONG_SECONDS:.0f} s")
        time.sleep(0.02)
    return time.monotonic() - began


def children(pid: int) -> list[int]:
    """Of a process, as this namespace counts them."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]
    return []


def descendants(pid: int) -> list[int]:
    """All that came of a process and still have their parents."""
    found = children(pid)
    return found + [further for child in found for further in descendants(child)]


def kill(pid: int, signum: int) -> None:
    """Sends a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def shown(code: int) -> int:
    """The code that a shell shows."""
    return 128 - code if code < 0 else code


# --- Kubernetes ------------------------------------------------------------------------------


class Container:
    """A command as the first process of a pid namespace, with a /dev/shm that outlives it."""

    def __init__(self, process: subprocess.Popen[bytes], grace_seconds: float) -> None:
        self._process = process
        self._grace_seconds = grace_seconds

    @property
    def first(self) -> int:
        """The first process, as this namespace counts it."""
        wait_for(lambda: bool(children(self._process.pid)), "the first process")
        return children(self._process.pid)[0]

    def terminate(self) -> int:
        """SIGTERM to the first process, SIGKILL after the grace period; the code that is told."""
        first = self.first
        kill(first, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return shown(self._process.wait(self._grace_seconds))
        kill(first, signal.SIGKILL)
        self._process.wait(LONG_SECONDS)
        return 137

    def kill(self) -> int:
        """SIGKILL to the first process, as when memory ran out."""
        kill(self.first, signal.SIGKILL)
        self._process.wait(LONG_SECONDS)
        return 137

    def wait(self) -> int:
        """The code with which it ends by itself."""
        return shown(self._process.wait(LONG_SECONDS))

    def zombies(self) -> set[int]:
        """Ended processes in the namespace that nobody asks for, however long one waits."""
        found, deadline = self._zombies(), time.monotonic() + GONE_SECONDS
        while found and time.monotonic() < deadline:
            time.sleep(0.05)
            found &= self._zombies()
        return found

    def _zombies(self) -> set[int]:
        found = set()
        for pid in descendants(self.first):
            with suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found |= {pid} if stat[0] == "Z" else set()
        return found


class Pod:
    """The pod of a Job: restarts its container by code, as restartPolicy and backoffLimit say."""

    def __init__(self, job: Job, text: str, command: list[str] | None = None, **more: str) -> None:
        spec: Any = yaml.safe_load(text)["spec"]
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "OnFailure"
        self.restarts_left = int(spec["backoffLimit"])
        self.memory = job.folder / "memory"
        self.memory.mkdir(exist_ok=True)
        words = command or pod["containers"][0]["command"]
        words = [word.replace("/runs", str(job.folder / "runs")) for word in words]
        script = f'mount --bind {shlex.quote(str(self.memory))} /dev/shm && exec "$@"'
        new = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", script, "sh"]
        self.grace_seconds = pod["terminationGracePeriodSeconds"]
        self._watched = job.watched([*new, *words], **more)

    @contextmanager
    def started(self) -> Iterator[Container]:
        """The container; nothing is left of it afterwards."""
        with self._watched.started() as process:
            yield Container(process, self.grace_seconds)
            gone = self._watched.seconds_until_gone(GONE_SECONDS)
            assert gone <= GONE_SECONDS, f"a process of the container is there {gone:.0f} s later"

    def restarts(self, code: int) -> bool:
        """Whether the policy restarts a container that ended with this code."""
        self.restarts_left -= 1
        return code != 0 and self.restarts_left >= 0


def namespaces() -> bool:
    """Whether this user may make them."""
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


# --- Slurm -----------------------------------------------------------------------------------

SRUN = """#!{python}
# One task on each node, started like a child of that node's slurmstepd; the greatest code.
import os, subprocess, sys
count = int(os.environ["SLURM_NNODES"])
tasks = []
for number in range(count):
    environment = dict(os.environ, SLURM_PROCID=str(number))
    directory = os.environ["PLAY_FOLDER"] + f"/node{{number}}"
    tasks.append(subprocess.Popen(
        sys.argv[1:], env=environment, cwd=directory, start_new_session=True))
with open(os.environ["PLAY_FOLDER"] + "/tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SCONTROL = """#!/bin/sh
[ "$1" = requeue ] && [ "$2" = 7 ] && touch "$PLAY_FOLDER/requeued"
"""


class Slurm:
    """One batch job, as slurmctld and slurmstepd treat it.

    Sources: sbatch(1), srun(1), slurm.conf(5); send_job_warn_signal in slurmctld/job_mgr.c: to the
    steps, or to the batch shell alone; slurmstepd/req.c: the batch shell, not its children;
    proctrack_cgroup.c: of a step the task itself, unless SignalChildrenProcesses is set.

    Args:
        job: Its nodes are all on this machine.
        text: The batch script.
        to_children: Whether signals reach what the tasks have started, too.
        **more: Environment variables of the user.
    """

    def __init__(self, job: Job, text: str, *, to_children: bool = False, **more: str) -> None:
        self._job, self._to_children = job, to_children
        (self._signal,) = re.findall(r"^#SBATCH --signal=(\S+)@\d+$", text, re.M)
        assert re.search(r"^#SBATCH --requeue$", text, re.M)
        nodes = re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.M)
        assert int(nodes[0]) <= job.nodes
        commands = job.folder / "commands"
        commands.mkdir(exist_ok=True)
        for name, body in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
            (commands / name).write_text(body)
            (commands / name).chmod(0o755)
        script = job.folder / "script"
        script.write_text(text)
        more |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": nodes[0], "PLAY_FOLDER": str(job.folder)}
        more["PATH"] = f"{commands}:{job.environment()['PATH']}"
        self._watched = job.watched(["bash", str(script)], **more)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The batch shell; nothing is left of the job afterwards."""
        (self._job.folder / "tasks").unlink(missing_ok=True)
        with self._watched.started() as batch:
            yield batch
            gone = self._watched.seconds_until_gone(GONE_SECONDS)
            assert gone <= GONE_SECONDS, f"a process of the job is there {gone:.0f} s later"

    def warn(self, batch: subprocess.Popen[bytes]) -> None:
        """--signal, at its time before the limit."""
        name = self._signal.removeprefix("B:")
        pids = [batch.pid] if name != self._signal else self._tasks()
        for pid in pids:
            kill(pid, signal.Signals[f"SIG{name}"])

    def reach_limit(self, batch: subprocess.Popen[bytes]) -> None:
        """The time limit: SIGTERM to everything in the job, after KillWait SIGKILL."""
        for pid in [batch.pid, *self._tasks()]:
            kill(pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            batch.wait(KILL_WAIT)
        deadline = time.monotonic() + KILL_WAIT
        while self._watched.family() and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self._watched.family():
            kill(pid, signal.SIGKILL)
        batch.wait(LONG_SECONDS)

    def abandon(self) -> None:
        """A node has died: Slurm kills what is left of the job, and requeues it by itself."""
        for pid in self._watched.family():
            kill(pid, signal.SIGKILL)

    def requeued(self) -> bool:
        """Whether the script has asked for it; forgotten then."""
        with suppress(FileNotFoundError):
            (self._job.folder / "requeued").unlink()
            return True
        return False

    def _tasks(self) -> list[int]:
        file = self._job.folder / "tasks"
        tasks = [int(word) for word in file.read_text().split()] if file.exists() else []
        inherited = [pid for task in tasks for pid in descendants(task)]
        return tasks + inherited * self._to_children


# --- etcd ------------------------------------------------------------------------------------


def free_ports(number: int) -> list[int]:
    """That nobody listens at now."""
    with ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [door.getsockname()[1] for door in doors]


class Etcd:
    """A real etcd, and nodes on this machine that follow a recipe.

    Args:
        job: What they train.
        text: The recipe.
        more: Further words of its command.
        **environment: Variables of the nodes.
    """

    def __init__(self, job: Job, text: str, more: tuple[str, ...] = (), **environment: str) -> None:
        self._job, self._environment = job, environment
        self._port, self._peers = free_ports(2)
        text = text.replace("etcd.example:2379", f"127.0.0.1:{self._port}")
        text = text.replace("/shared", str(job.folder)).replace("python -m", "exec python -m", 1)
        self.script = text.rstrip() + f" {shlex.join(more)}\n"
        self._watched: list[Watched] = []
        self.gave_up = 0  # launchers that ended though the run had not
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Etcd:
        address, peers = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{self._peers}"
        options = {
            "data-dir": str(self._job.folder / "etcd"),
            "listen-client-urls": address,
            "advertise-client-urls": address,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        command = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
        etcd = Watched(command, self._job.folder / "etcd.txt")
        self._stack.enter_context(etcd.started())
        wait_for(lambda: _listens(self._port), "etcd")
        return self

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        environment = {"POD_IP": "127.0.0.1", **self._environment}
        watched = self._job.watched(["sh", "-c", self.script], node, **environment)
        self._watched.append(watched)
        return self._stack.enter_context(watched.started())

    def restart(self, node: int) -> None:
        """Starts a node's launcher that has ended."""
        self.nodes[node] = self._launch(node)

    def start(self, node: int) -> None:
        """A further node's launcher."""
        self.nodes.append(self._launch(node))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Returns when it is true; launchers that gave up are started again meanwhile."""

        def look() -> bool:
            for number, node in enumerate(self.nodes):
                if node.poll() not in (None, 0, 15, -9):
                    self.gave_up += 1
                    self.restart(number)
            return condition()

        wait_for(look, what)

    def check_gone(self) -> None:
        """Raises an AssertionError if something of the launchers stays."""
        gone = max(watched.seconds_until_gone(GONE_SECONDS) for watched in self._watched)
        assert gone <= GONE_SECONDS, f"a process is there {gone:.0f} s after its launcher"

    def __exit__(self, *args: object) -> None:
        self._stack.close()


def _listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False
