"""Several machines: which run their directories belong to, and whether they run the same code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import forks
import pytest
from tiny import TESTS, Tiny, make, run_ranks

from expbase import machines
from expbase.machines import Place, check_places, different_code
from expbase.run_dir import RunDirectory
from expbase.state.checkpoint import CheckpointError


def second(newest: int = -1, run: str = "x", known: int = 40, made_on: str = "alpha") -> Place:
    return Place(1, "beta", "/runs/a", newest, run, known, made_on)


def first(newest: int = 40, run: str = "x", known: int = 40) -> Place:
    return Place(0, "alpha", "/runs/a", newest, run, known, "alpha")


@pytest.mark.parametrize(
    "places",
    [
        [first(), second()],  # as it should be
        [first(), second(newest=40)],  # copied from there to here
        [first(-1, "", -1), second(-1, "", -1)],  # a new run
        [first(-1, "x", -1), second(-1, "y", -1)],  # of two that came to no checkpoint
        [first(40, "", -1), second()],  # the note was not copied with the checkpoints
        [first(), second(-1, "", -1)],  # a new machine beside rank 0
    ],
)
def test_machines_that_lose_nothing_may_start(places: list[Place]) -> None:
    assert [*check_places(places)] == []


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (
            [first(-1), second(newest=40)],
            "the newest checkpoint, of iteration 40, is with rank 1 (beta, /runs/a)",
        ),
        ([first(40), second(newest=60, known=60)], "of iteration 60, is with rank 1 (beta"),
        (
            [first(-1, "", -1), second()],
            "no checkpoint is there, and rank 1 (beta, /runs/a) knows of one of iteration 40 on "
            "alpha",
        ),
        ([first(-1), second(-1, "", -1)], "rank 0 (alpha, /runs/a) knows of one of iteration 40"),
        ([first(), second(run="y")], "its run is not that of the other machine: rank 1 (beta"),
    ],
)
def test_a_start_that_would_leave_checkpoints_behind_is_refused(
    places: list[Place], text: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        [*check_places(places)]
    assert str(error.value).startswith("output directory of rank 0 (alpha, /runs/a): ")
    assert text in str(error.value)
    assert "--fresh begins a new run on purpose." in str(error.value)


def test_an_older_checkpoint_than_one_that_was_known_is_told() -> None:
    (text,) = check_places([first(20, known=20), second()])
    assert text.startswith("continues from iteration 20, although rank 1 (beta, /runs/a) knows")


def test_other_versions_and_files_are_told_with_both_values() -> None:
    ours = {"python": "3.11.7", "train.py": "0a", "rank_0_only.py": "0b"}
    theirs = {"python": "3.12.1", "train.py": "0c"}
    assert [*different_code({"rank 0": ours, "rank 1": theirs, "rank 2": ours})] == [
        "rank 1 does not run the same as rank 0: python 3.12.1 (not 3.11.7), train.py 0c (not 0a)"
    ]


def test_the_code_of_an_experiment_is_its_versions_and_the_files_it_has_loaded() -> None:
    facts = machines.code(Tiny)
    assert {"python", "numpy", "paddle", "expbase", "tiny.py", "test_machines.py"} <= {*facts}
    assert not [name for name in facts if name.startswith(("/", "..")) or "-packages" in name]


def test_the_code_of_a_wheel_is_that_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A wheel has the experiments as files, a checkout as a link.
    monkeypatch.setattr(machines, "__file__", str(tmp_path / "expbase/machines.py"))
    found = []
    for name in ("machines.py", "data/loaders.py", "experiments/line/train.py"):
        (tmp_path / "expbase" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "expbase" / name).write_text("code")
        found.append(machines.code(Tiny)["expbase"])
    assert found[0] != found[1] == found[2]


LOOKS = """
import sys
from expbase.run_dir import RunDirectory
print(RunDirectory(sys.argv[1]).is_of_rank_zero())
"""


def test_rank_zeros_directory_is_known_by_its_lock_also_by_rank_zero(tmp_path: Path) -> None:
    def looked(path: Path) -> str:
        command = [sys.executable, "-W", "ignore", "-c", LOOKS, str(path)]
        return forks.run(command).stdout.strip()

    directory = RunDirectory(tmp_path)
    assert not directory.is_of_rank_zero()
    directory.lock(rank=0)
    assert looked(tmp_path) == "True"
    assert directory.is_of_rank_zero()
    assert looked(tmp_path) == "True"  # the look has not opened the lock
    directory.release()
    assert looked(tmp_path) == "False"


def test_one_process_writes_no_note_and_loads_no_module_for_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tiny import Tiny, trained\n"
        "trained(Tiny, Path(sys.argv[1]), max_iteration=2)\n"
        "assert not {'expbase.machines', 'expbase.peers'} & {*sys.modules}"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "run")]
    result = forks.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)})
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "run" / ".run.json").exists()


def test_a_note_is_of_the_directory_and_goes_with_it_when_a_new_run_begins(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".run.json").write_text(json.dumps({"run": "x", "iteration": 40, "host": "alpha"}))
    exp = make(Tiny, run, {"fresh": True})
    exp.setup()
    exp.close()
    assert not (run / ".run.json").exists()
    assert (tmp_path / "run.old-1/.run.json").exists()


TRAINS = """
import sys
from pathlib import Path
from tiny import Tiny, trained
trained(Tiny, Path(sys.argv[1]), max_iteration=4)
"""


def run_on(outputs: Sequence[Path]) -> list[tuple[int, str]]:
    """Starts a rank in each directory; their codes and what they print."""
    ends = run_ranks([["-c", TRAINS, str(output)] for output in outputs])
    return [(end.returncode, end.stderr) for end in ends]


def test_machines_that_have_changed_places_are_told_where_the_checkpoints_are(
    tmp_path: Path,
) -> None:
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    assert [code for code, _ in run_on([alpha, beta])] == [0, 0]
    notes = [json.loads((run / ".run.json").read_text()) for run in (alpha, beta)]
    assert notes[0] == notes[1]
    assert notes[0]["iteration"] == 4  # also the last one, which is written at the end
    for code, text in run_on([beta, alpha]):
        assert code == 1
        where = f"the newest checkpoint, of iteration 4, is with rank 1 ({notes[0]['host']}, "
        assert f"{where}{alpha})" in text
    assert not (beta / "checkpoints").exists()
