"""Proves that a run on two machines is one on one machine, and ends when one of them is lost.

The machines are two network namespaces with a cable between them; they end with this script, in
whatever way that ends. On each is a launcher of paddle's with one rank of net.py.

Exactness: with a disk for each machine, and with one for both, a run that is stopped and continued
has the bits of one machine with two ranks, or with training.shares of one process. Places: machines
that have changed places and code that differs are told. Faults: ranks are killed, machines and the
cable are lost, in training, in a validation and during the start: who is left names who is gone
within the limit, ends and leaves nothing behind. For a rank that is stopped, or late, in training
or in a validation the others say that nothing moves. A validation that takes long on one rank is no
fault. It needs the rights of root.

    python tests/proofs/nodes.py [CASE …]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare import differences

from expbase.base.processes import die_with_parent
from expbase.checkpoint import layout

NET = Path(__file__).with_name("net.py")
MANY = NET.with_name("many.py")
LAUNCHER = "paddle.distributed.launch"
LONG_SECONDS = 300.0  # that nothing here takes
HANG_SECONDS = 8
# From the moment of a fault until all who are left have ended: their launchers take 4 s of it. What
# hangs is noticed at the next look, a quarter of hang_seconds later, and who waits for others gives
# them six looks to end first.
DEATH_LIMIT, HANG_LIMIT = 10.0, 2.75 * HANG_SECONDS + 5.0
GLOO_LIMIT, MINUTE_LIMIT = 30.0 + 15.0, 60.0 + 20.0
EXACT = ["training.max_iteration=60", "training.save_interval=10", "training.valid_interval=20"]
LATE = "gloo::TimeoutException|gloo/.* TIMEOUT"  # in a backward with SIGABRT, else an exception
ENDLESS = ["training.max_iteration=1000000", "training.save_interval=10"]
PORT = 29400

# net.py with what the faults need: a place to be found in, for as long as a file says.
SLOW = '''
import os, sys, time
from pathlib import Path
sys.path.insert(0, {proofs!r})
from net import Net, main
from expbase.ranks import collectives

SECONDS = float(os.environ.get("SLOW_SECONDS", "0"))


class Slow(Net):
    def train_batch(self):
        if self.iteration == 25 and self.rank == int(os.environ.get("SLOW_RANK", "-1")):
            if not self.config.training.valid_interval:
                self.logger.info("trains slowly")
                time.sleep(SECONDS)
        super().train_batch()

    def valid(self):
        if self.rank == int(os.environ.get("SLOW_RANK", "-1")):
            self.logger.info("validates slowly")
            time.sleep(SECONDS)
        return super().valid()


def connect(device, connect=collectives.init_parallel):
    """Rank 0 waits in gloo for rank 1, which is late."""
    if os.environ.get("SLOW_START"):
        print("starts slowly", flush=True)
        time.sleep(SECONDS * collectives.rank())
    connect(device)


collectives.init_parallel = connect
if __name__ == "__main__":
    main(Slow)
'''


class Node:
    """A network namespace, which lives as long as the process that sleeps in it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.address = number, f"10.77.0.{number + 1}"
        self.folder = folder / f"node-{number}"
        self.folder.mkdir(parents=True)
        self._sleeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
            preexec_fn=die_with_parent,  # so the kernel removes it, even after kill -9
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._sleeper.stdout
        if not self._sleeper.stdout.readline():  # it has ended, and not come to the shell
            raise PermissionError(str(self._sleeper.communicate()[1]))
        self._path = f"/proc/{self._sleeper.pid}/ns/net"
        self._inode = os.readlink(self._path)
        self.ns = str(self._sleeper.pid)

    def call(self, *words: str) -> None:
        """Runs a command in it."""
        subprocess.run(["nsenter", f"--net={self._path}", *words], check=True)

    def launch(self, script: Path, words: Sequence[str], rank: int, **variables: str) -> None:
        """Starts a launcher with one process."""
        options = ["--nnodes", "2", "--nproc_per_node", "1", "--log_dir", f"{self.folder}/log"]
        options += ["--master", f"10.77.0.1:{PORT}", "--host", self.address, "--rank", str(rank)]
        command = [sys.executable, "-m", LAUNCHER, *options, str(script), *words]
        with (self.folder / "launcher.txt").open("ab") as log:
            self.launcher = subprocess.Popen(
                ["nsenter", f"--net={self._path}", *command, "--device", "cpu"],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "PYTHONWARNINGS": "ignore", **variables},
                start_new_session=True,
            )
        self.rank = rank

    def pids(self) -> list[int]:
        """The processes in it."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns/net") == self._inode:
                    found.append(int(path.name))
        return [pid for pid in found if pid != self._sleeper.pid]

    def rank_pid(self) -> int:
        """The process of its rank."""
        for pid in self.pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--output" in words and LAUNCHER.encode() not in words:
                return pid
        raise ProcessLookupError("no rank")

    def signal(self, number: int) -> None:
        """Sends a signal to all that is in it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cable(self, state: str) -> None:
        """Takes the cable "down" or "up"."""
        self.call("ip", "link", "set", "cable", state)

    def said(self) -> str:
        """The log of its rank, and what it has printed."""
        paths = [self.run / f"worker_{self.rank}.log", self.folder / "log/workerlog.0"]
        return "".join(path.read_text() for path in paths if path.exists())

    @property
    def run(self) -> Path:
        """Its output directory, if it has one of its own."""
        return self.folder / "run"

    def remove(self) -> None:
        """Ends all that is in it, and itself."""
        self.signal(signal.SIGKILL)
        self._sleeper.kill()
        self._sleeper.communicate()
        if hasattr(self, "launcher"):
            self.launcher.wait()


Nodes = tuple[Node, Node]


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Two machines, for the block."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in (0, 1):
            nodes.append(Node(number, folder))
            stack.callback(nodes[-1].remove)
        ends = [["name", "cable", "netns", node.ns] for node in nodes]
        words = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
        subprocess.run(words, check=True)
        for node in nodes:
            node.call("ip", "link", "set", "lo", "up")
            node.call("ip", "address", "add", f"{node.address}/24", "dev", "cable")
            node.cable("up")
        yield nodes[0], nodes[1]


def may_make_nodes() -> bool:
    """Whether namespaces may be made here."""
    try:
        with tempfile.TemporaryDirectory() as folder, two_nodes(Path(folder)):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def until(condition: Callable[[], object], what: str, limit: float = LONG_SECONDS) -> float:
    """Waits; returns for how long.

    Raises:
        TimeoutError: It took too long.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            raise TimeoutError(f"{what}: not within {limit:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - began


def start(nodes: Nodes, words: Sequence[str], *, swapped: bool = False, **options: str) -> None:
    """Starts a rank on each; with `output` in the options in one directory for both."""
    script = Path(options.pop("script", NET))
    shared = options.pop("output", None)
    for node in nodes:
        rank = node.number if not swapped else 1 - node.number
        (node.folder / "log/workerlog.0").unlink(missing_ok=True)
        node.launch(script, ["--output", shared or str(node.run), *words], rank, **options)


def finish(nodes: Nodes) -> list[int]:
    """Waits for both launchers; their codes."""
    return [node.launcher.wait(timeout=LONG_SECONDS) for node in nodes]


# --- exactness and places ----------------------------------------------------------------------


def one_machine(run: Path, last: int) -> subprocess.Popen[bytes]:
    """Starts the same run on this machine alone."""
    words = [*EXACT, f"training.max_iteration={last}", "--device", "cpu", "--nprocs", "2"]
    with run.with_suffix(".txt").open("ab") as log:
        command = [sys.executable, str(NET), "--output", str(run), *words]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def exact(
    folder: Path, nodes: Nodes, *, shared: bool = False, parts: Sequence[int] = (30, 60)
) -> list[str]:
    """A run that is stopped at each of `parts` has the bits of one machine's."""
    reference = folder / "one-machine"
    output = folder / "shared" if shared else nodes[0].run
    options = {"output": str(output)} if shared else {}
    wrong = []
    with one_machine(reference, parts[-1]):
        for last in parts:
            start(nodes, [*EXACT, f"training.max_iteration={last}"], **options)
            wrong += [f"ended with codes {codes}" for codes in [finish(nodes)] if any(codes)]
    return wrong + differences(output, reference)


def shares(folder: Path, nodes: Nodes) -> list[str]:
    """With training.shares a run that both machines begin, and one alone ends, has its bits."""
    outputs = [nodes[0].run, folder / "one-process"]
    start(nodes, [*EXACT, "training.max_iteration=30"], script=str(MANY))
    wrong = [f"ended with codes {codes}" for codes in [finish(nodes)] if any(codes)]
    for output in outputs:
        words = ["--output", str(output), "--device", "cpu", *EXACT, "training.max_iteration=40"]
        subprocess.run([sys.executable, str(MANY), *words], check=True, capture_output=True)
    return wrong + differences(*outputs)


def trained(nodes: Nodes, last: int = 20) -> None:
    """A run that came to its end."""
    start(nodes, [*EXACT, f"training.max_iteration={last}"])
    if any(codes := finish(nodes)):
        raise RuntimeError(f"codes {codes}")


def refused(nodes: Nodes, pattern: str, *, swapped: bool = False) -> list[str]:
    """Both end with code 78 at the start, and say what is expected."""
    start(nodes, EXACT, swapped=swapped)
    codes = finish(nodes)
    wrong = [f"ended with codes {codes}"] if codes != [78, 78] else []
    return wrong + [
        f"rank {node.rank} does not say {pattern!r}"
        for node in nodes
        if not re.search(pattern, node.said(), re.DOTALL)
    ]


def changed_places(folder: Path, nodes: Nodes) -> list[str]:
    """The machines have changed places; then back again, and the run goes on."""
    trained(nodes)
    text = r"the newest checkpoint, of iteration 20, is with rank 1 \(.*node-0/run\)"
    wrong = refused(nodes, text, swapped=True)
    trained(nodes, 40)
    last = layout.listed(nodes[0].run / layout.FOLDER)[-1].name
    return wrong + ([] if last == "step-00000040" else [f"the last checkpoint is {last}"])


def other_code(folder: Path, nodes: Nodes) -> list[str]:
    """The script of one machine is another one."""
    for node in nodes:
        (node.folder / "train.py").write_text(slow() + f"# {node.number}\n")
        script = node.folder / "train.py"
        node.launch(script, ["--output", str(node.run), *EXACT], node.number)
    codes = finish(nodes)
    wrong = [f"ended with codes {codes}"] if any(codes) else []
    told = all("not all ranks run the same code" in node.said() for node in nodes)
    told = told and "train.py" in nodes[1].said()
    return wrong + ([] if told else ["nobody says that train.py differs"])


# --- faults ------------------------------------------------------------------------------------


def slow() -> str:
    """The script with slow places."""
    return SLOW.format(proofs=str(NET.parent))


@dataclass(frozen=True)
class Fault:
    """A fault, and what must come of it.

    Attributes:
        where: A key of REACHED; in "batch" one rank is slow, which is the fault.
        strike: Makes it.
        left: What the ranks that are left must say, by number.
        limit: The seconds within which they and their launchers must have ended.
    """

    where: str
    strike: Callable[[Nodes], object]
    left: dict[int, str]
    limit: float
    hang_seconds: int = HANG_SECONDS

    def __call__(self, folder: Path, nodes: Nodes) -> list[str]:
        """Runs until the fault, and looks at what comes of it."""
        script = folder / "slow.py"
        script.write_text(slow())
        slow_rank, place = {"SLOW_RANK": "1"}, {"SLOW_START": "1"}
        place = {"training": {}, "validation": slow_rank, "batch": slow_rank, "start": place}
        interval = 30 if self.where == "validation" else 0
        words = [*ENDLESS, f"training.valid_interval={interval}"]
        words += [f"training.hang_seconds={self.hang_seconds}", "training.hang_action=end"]
        if not self.hang_seconds:  # only an update has gloo's limit, and a save has none
            words += ["training.save_interval=1000000"]
        start(nodes, words, script=str(script), SLOW_SECONDS="100", **place[self.where])
        until(lambda: REACHED[self.where] in nodes[1].said(), f"the {self.where} of rank 1")
        self.strike(nodes)
        began = time.monotonic()
        wrong = []
        for number, pattern in self.left.items():
            node = nodes[number]
            code = node.launcher.wait(timeout=LONG_SECONDS)
            seconds = time.monotonic() - began
            codes = (1, 250) if pattern == LATE else (1,)  # 250: of SIGABRT, by the launcher
            lines = [line for line in node.said().splitlines() if re.search(pattern, line)]
            say = lines[-1] if lines else "NOTHING OF IT"
            print(f"    rank {number}: code {code} after {seconds:.1f} s: {say}", flush=True)
            wrong += [f"rank {number}: code {code}"] * (code not in codes)
            wrong += [f"rank {number}: does not say {pattern!r}"] * (not lines)
            wrong += [f"rank {number}: ended after {seconds:.1f} s"] * (seconds > self.limit)
        wrong += self._what_is_left(nodes)
        return wrong

    def _what_is_left(self, nodes: Nodes) -> list[str]:
        """Nothing; of a stopped rank nothing when it goes on."""
        for number in {0, 1} - {*self.left}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(nodes[number].rank_pid(), signal.SIGCONT)
        try:
            until(lambda: not nodes[0].pids() + nodes[1].pids(), "the end of all", limit=15)
        except TimeoutError:
            return [f"processes are left: {[node.pids() for node in nodes]}"]
        return []


REACHED = {
    "training": "[20]",
    "validation": "validates slowly",
    "batch": "trains slowly",
    "start": "starts slowly",
}


def slow_validation(folder: Path, nodes: Nodes) -> list[str]:
    """A validation of three times hang_seconds on one rank is no fault."""
    script = folder / "slow.py"
    script.write_text(slow())
    words = [*EXACT, f"training.hang_seconds={HANG_SECONDS}", "training.max_iteration=20"]
    seconds = str(3 * HANG_SECONDS)
    start(nodes, words, script=str(script), SLOW_SECONDS=seconds, SLOW_RANK="1")
    return [f"ended with codes {codes}" for codes in [finish(nodes)] if any(codes)]


def killed(number: int) -> Callable[[Nodes], object]:
    """A rank is killed."""
    return lambda nodes: os.kill(nodes[number].rank_pid(), signal.SIGKILL)


def stopped(number: int) -> Callable[[Nodes], object]:
    """A rank is stopped."""
    return lambda nodes: os.kill(nodes[number].rank_pid(), signal.SIGSTOP)


def lost(number: int) -> Callable[[Nodes], object]:
    """All that runs on a machine is killed."""
    return lambda nodes: nodes[number].signal(signal.SIGKILL)


def cut(nodes: Nodes) -> None:
    """The cable is pulled."""
    nodes[1].cable("down")


def both(text: str) -> dict[int, str]:
    """Each rank says it of the other one."""
    return {0: f"rank 1 {text}", 1: f"rank 0 {text}"}


def faults() -> dict[str, Fault]:
    """The faults by name."""
    found = {}
    for where in ("training", "validation", "start"):
        for number in (0, 1):
            # Its launcher may have asked first how it ended; then nobody else gets to know.
            how = "(was killed by SIGKILL|died without a word)"
            dead = {1 - number: f"another rank failed: rank {number} {how}"}
            for name, strike in (("killed", killed), ("lost", lost)):
                found[f"{name}-{number}-{where}"] = Fault(where, strike(number), dead, DEATH_LIMIT)
    stands = f"no progress for {HANG_SECONDS} s: phase={{}} .*"
    for where, phase in (("training", "train"), ("validation", "valid")):
        both_say = dict.fromkeys((0, 1), stands.format(phase))
        for number in (0, 1):
            says = {1 - number: both_say[1 - number]}
            found[f"stopped-{number}-{where}"] = Fault(where, stopped(number), says, HANG_LIMIT)
        found[f"cut-{where}"] = Fault(where, cut, both_say, HANG_LIMIT)
    # Without hang_seconds gloo's own limit, 30 s, and that of a machine, a minute, are left.
    for number in (0, 1):
        says = {1 - number: LATE}
        found[f"gloo-{number}"] = Fault("training", stopped(number), says, GLOO_LIMIT, 0)
    told = r"rank 0 was killed by SIGABRT \(gloo aborts a rank when another one is 30 s late"
    found["slow batch"] = Fault("batch", lambda nodes: None, {0: LATE, 1: told}, GLOO_LIMIT, 0)
    gone = both("fell silent: its machine or its network is gone")
    for where in ("validation", "start"):
        found[f"minute-{where}"] = Fault(where, cut, gone, MINUTE_LIMIT, 0)
    return found


def shared_disk(folder: Path, nodes: Nodes) -> list[str]:
    """`exact` with one directory for both."""
    return exact(folder, nodes, shared=True)


CASES: dict[str, Callable[[Path, Nodes], list[str]]] = {
    "own disks": exact,
    "shared disk": shared_disk,
    "shares": shares,
    "changed places": changed_places,
    "other code": other_code,
    "slow validation": slow_validation,
    **faults(),
}


def prove(folder: Path, name: str) -> list[str]:
    """Runs a case on two new machines; what was wrong."""
    with two_nodes(folder) as nodes:
        try:
            return CASES[name](folder, nodes)
        except (TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
            return [repr(error), *(node.said()[-2000:] for node in nodes)]


def main() -> None:
    """Prints what was wrong and how many cases were right; exit code 1 if one was not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    names = parser.parse_args().cases or [*CASES]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the machines are removed
    right = 0
    for number, name in enumerate(names):
        folder = Path(tempfile.mkdtemp(prefix="nodes-"))
        wrong = prove(folder, name)
        right += not wrong
        print(f"{number + 1}/{len(names)} {name}: {'right' if not wrong else 'WRONG'}", flush=True)
        for text in wrong:
            print(f"    {text} ({folder})", flush=True)
        if not wrong:
            shutil.rmtree(folder)
    print(f"{right} of {len(names)} cases right")
    sys.exit(right != len(names))


if __name__ == "__main__":
    main()
