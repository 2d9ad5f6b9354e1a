"""Changes of a cluster: nodes and ranks that go by kill -9 or SIGTERM, and nodes that come back.

changes = Changes(etcd, output, random.Random(0))
for change in planned(20, random.Random(0)):
print(changes.make(change))        # when the run trains again
periods(output)                        # how many processes trained from when to when
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elastic import TRACE
from players import LONG_SECONDS, Etcd, descendants, kill

BACK = "comes back"


class Change(NamedTuple):
    """What happens to the cluster."""

    what: str  # "launcher", "rank" or BACK
    signum: int  # 0 for BACK
    processes: int  # that are to train afterwards

    def __str__(self) -> str:
        how = {signal.SIGKILL: "kill -9 of a ", signal.SIGTERM: "SIGTERM to a "}
        return how.get(self.signum, "a node ") + self.what


class Made(NamedTuple):
    """A change that was made, and what it cost."""

    change: Change
    at: float  # seconds, by the clock
    idle_seconds: float  # in which nobody trained
    lost: int  # updates that were done again

    def __str__(self) -> str:
        return (
            f"{self.change}: {self.change.processes} train, {self.idle_seconds:.1f} s without "
            f"progress, {self.lost} updates done again"
        )


class Period(NamedTuple):
    """A time in which the same processes trained, without a pause."""

    begin: float  # seconds, by the clock, at the end of its first update
    end: float
    processes: int
    first: int  # iteration
    last: int


def planned(count: int, draws: random.Random) -> list[Change]:
    """So many changes of two nodes, of which one always stays."""
    changes: list[Change] = []
    processes = 2
    for _ in range(count):
        what = draws.choice(["launcher", "launcher", "rank"] if processes == 2 else [BACK, "rank"])
        signum = 0 if what == BACK else draws.choice([signal.SIGKILL, signal.SIGTERM])
        processes += {"launcher": -1, "rank": 0, BACK: 1}[what]
        changes.append(Change(what, signum, processes))
    return changes


def periods(output: Path) -> list[Period]:
    """Of a run of elastic.py, up to now."""
    with suppress(FileNotFoundError):
        lines = (output.parent / TRACE).read_text(encoding="utf-8").splitlines(keepends=True)
        updates = [line.split() for line in lines if line.endswith("\n")]
        of_starts = [[*group] for _, group in itertools.groupby(updates, lambda words: words[1])]
        return [
            Period(float(a[0]), float(b[0]), int(a[2]), int(a[3]), int(b[3]))
            for a, *_, b in ([group[0], *group] for group in of_starts)
        ]
    return []


class Changes:
    """Those of one run on two nodes, which have been started.

    Args:
        etcd: Has the nodes.
        output: Of the run.
        draws: Says when, and whom, a change strikes.
        between: How long the run trains between two changes: least and most seconds.
    """

    def __init__(
        self, etcd: Etcd, output: Path, draws: random.Random, between: tuple[float, float] = (0, 4)
    ) -> None:
        self._etcd, self._output, self._draws, self._between = etcd, output, draws, between
        self._gone = -1  # the node that is
        self.made: list[Made] = []

    def wait_for(self, processes: int, after: int = 0) -> None:
        """Until so many train, in a later period than these."""

        def trains() -> bool:
            found = periods(self._output)[after:]
            newest = found[-1] if found else Period(0, 0, 0, 0, 0)
            return newest.processes == processes and newest.last - newest.first >= 4

        self._etcd.wait_for(trains, f"{processes} processes that train")

    def make(self, change: Change) -> Made:
        """Makes it at a random moment, and waits until the run trains again."""
        time.sleep(self._draws.uniform(*self._between))
        count, at = len(periods(self._output)), time.time()
        self._strike(change)
        self.wait_for(change.processes, count)
        pairs = [*itertools.pairwise(periods(self._output)[count - 1 :])]
        idle = sum(new.begin - old.end for old, new in pairs)
        lost = sum(old.last + 1 - new.first for old, new in pairs)
        self.made.append(Made(change, at, idle, lost))
        return self.made[-1]

    def _strike(self, change: Change) -> None:
        if change.what == BACK:
            self._etcd.restart(self._gone)
        elif change.what == "rank":
            kill(rank_process(self._etcd, self._draws.randrange(change.processes)), change.signum)
        else:
            self._gone = self._draws.randrange(2)
            launcher = self._etcd.nodes[self._gone]
            kill(launcher.pid, change.signum)
            launcher.wait(LONG_SECONDS)


def rank_process(etcd: Etcd, rank: int) -> int:
    """The id of a rank's process now."""
    variable = f"PADDLE_TRAINER_ID={rank}".encode()
    for node in etcd.nodes:
        for pid in descendants(node.pid):
            with suppress(OSError):
                if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
    raise LookupError(f"rank {rank} has no process")
