"""Kinds of state, some of the corpus that tests/proofs/kinds.py runs whole."""

from __future__ import annotations

import sys

import forks
import pytest
from tiny import TESTS, run_script

KINDS = TESTS / "proofs" / "kinds.py"
FEW = {
    "exact": ("dict in a layer", "list under two names", "average by id"),
    "told": ("second loader", "closure"),
    "refused": ("layer added",),
}
MORE = {
    "exact": (
        "adam optimizer", "progress bar", "mask cache", "named tuple in a data set",
        "enum in a sampler", "defaultdict", "array in fortran order",
        "schedule of schedules in a list", "head of shares on two", "process id set at begin",
        "layer switched", "an optimizer switched", "array of a weight",
        "list of parameters that is cut", "schedule of another class from setup",
        "stream that shuffles",
    ),
    "told": ("generator", "cycle", "counter of the class"),
    "refused": ("schedule of another class", "loader set anew", "buffer that grows"),
}  # fmt: skip


@pytest.mark.parametrize(
    "kinds",
    [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.long)],
)
def test_kinds_of_state_continue_exactly_are_told_or_are_refused(
    kinds: dict[str, tuple[str, ...]],
) -> None:
    names = [name for of_outcome in kinds.values() for name in of_outcome]
    result = run_script(KINDS, "--show", "--jobs", "4", "--only", f"^({'|'.join(names)})$")
    assert result.returncode == 0, result.stdout + result.stderr
    counts = ", ".join(f"{outcome} {len(of_it)}" for outcome, of_it in kinds.items())
    expected = f"{len(names)} kinds: {counts}, silent 0, stuck 0; 0 wrong"
    assert result.stdout.splitlines()[-1] == expected


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


@pytest.mark.long
def test_what_is_lost_or_stuck_is_found() -> None:
    result = forks.run([sys.executable, "-W", "ignore", "-c", _LOST])
    assert result.stdout.split() == ["silent", "stuck", "exact"], result.stderr
