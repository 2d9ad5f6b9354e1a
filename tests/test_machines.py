"""Several machines: who has the newest checkpoint, and whether they run the same code."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import forks
from tiny import TESTS, Tiny, run_ranks

from expbase.ranks import machines
from expbase.ranks.machines import different_code


def test_other_versions_and_files_are_told_with_both_values() -> None:
    ours = {"python": "3.11.7", "train.py": "0a", "rank_0_only.py": "0b"}
    theirs = {"python": "3.12.1", "train.py": "0c"}
    assert different_code({"rank 0": ours, "rank 1": theirs, "rank 2": ours}) == [
        "rank 1 does not run the same as rank 0: python 3.12.1 (not 3.11.7), train.py 0c (not 0a)"
    ]


def test_the_code_of_an_experiment_is_its_versions_and_the_files_it_has_loaded() -> None:
    facts = machines.code(Tiny)
    assert {"python", "numpy", "paddle", "expbase", "tiny.py", "test_machines.py"} <= {*facts}
    assert not [name for name in facts if name.startswith(("/", "..")) or "-packages" in name]


def test_one_process_loads_no_module_for_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tiny import Tiny, trained\n"
        "trained(Tiny, Path(sys.argv[1]), max_iteration=2)\n"
        "assert not {'expbase.ranks.machines', 'expbase.ranks.watch'} & {*sys.modules}"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "run")]
    result = forks.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)})
    assert result.returncode == 0, result.stderr


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
    for code, text in run_on([beta, alpha]):
        assert code == 1
        where = f"the newest checkpoint, of iteration 4, is with rank 1 ({platform.node()}, "
        assert f"{where}{alpha})" in text
    assert not (beta / "checkpoints").exists()
