"""Kinds of state, some of the corpus that tests/proofs/kinds.py runs whole."""

from __future__ import annotations

import sys

import forks
from tiny import TESTS, run_script

KINDS = TESTS / "proofs" / "kinds.py"
EXACT = (
    "float", "list", "array", "tensor", "dict in a layer", "np.random.generator", "replay buffer",
    "adam optimizer", "progress bar", "mask cache", "list under two names",
    "named tuple in a data set", "enum in a sampler", "defaultdict", "array in fortran order",
    "schedule of schedules in a list", "average by id",
)  # fmt: skip
TOLD = ("generator", "cycle", "second loader", "set", "counter of the class", "closure")
REFUSED = ("layer added", "schedule of another class", "loader set anew", "buffer that grows")


def test_kinds_of_state_continue_exactly_are_told_or_are_refused() -> None:
    names = "|".join((*EXACT, *TOLD, *REFUSED))
    result = run_script(KINDS, "--show", "--jobs", "4", "--only", f"^({names})$")
    assert result.returncode == 0, result.stdout + result.stderr
    counts = f"exact {len(EXACT)}, told {len(TOLD)}, refused {len(REFUSED)}, silent 0, stuck 0"
    number = len((*EXACT, *TOLD, *REFUSED))
    assert result.stdout.splitlines()[-1] == f"{number} kinds: {counts}; 0 wrong"


# A state that is left out is lost without a word, and one that cannot be set back stops the run.
_LOST = f"""
import sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(KINDS.parent)!r})
from kinds import Kind, judge

class Lost(Kind):
    def make(self):
        self.count = 0
        self.exclude_from_state("count")
    def use(self):
        self.count += 1
        return self.count

class Stuck(Kind):
    def on_save_checkpoint(self):
        return {{"count": 1}}
    def on_load_checkpoint(self, states):
        raise RuntimeError("self.count: cannot be set")

class Nothing(Kind):
    pass

for kind in (Lost, Stuck, Nothing):
    with tempfile.TemporaryDirectory() as folder:
        print(judge("one", kind, Path(folder)).found, flush=True)
"""


def test_what_is_lost_or_stuck_is_found() -> None:
    result = forks.run([sys.executable, "-W", "ignore", "-c", _LOST])
    assert result.stdout.split() == ["silent", "stuck", "exact"], result.stderr
