"""Several machines: who has the newest checkpoint, and whether they run the same code."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import forks
import pytest
from tiny import TESTS, Tiny, run_ranks, trained

OWN = """
import sys
from pathlib import Path
from tiny import Tiny, trained
class Own(Tiny): ...
trained(Own, Path(sys.argv[1]), max_iteration=1)
"""


def test_another_file_is_told_with_both_checksums(tmp_path: Path) -> None:
    scripts = [tmp_path / str(rank) / "train.py" for rank in (0, 1)]
    for script in scripts:
        script.parent.mkdir()
        script.write_text(f"{OWN}# {script.parent}\n")
    for end in run_ranks([[str(script), str(tmp_path / "run")] for script in scripts]):
        assert end.returncode == 0, end.stderr
    log = (tmp_path / "run/worker_0.log").read_text()
    text = r"not all ranks run the same code: train\.py: \w+ on rank 0, \w+ on rank 1"
    assert re.search(text, log)


def test_one_process_loads_no_module_for_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tiny import Tiny, trained\n"
        "trained(Tiny, Path(sys.argv[1]), max_iteration=2)\n"
        "assert 'expbase.ranks.watch' not in sys.modules"
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


@pytest.mark.long
def test_machines_that_have_changed_places_are_told_where_the_checkpoints_are(
    tmp_path: Path,
) -> None:
    alpha, beta = tmp_path / "alpha", tmp_path / "beta"
    trained(Tiny, alpha, max_iteration=2)
    for end in run_ranks([["-c", TRAINS, str(output)] for output in (beta, alpha)]):
        assert end.returncode == 1
        where = f"the newest checkpoint, of iteration 2, is with rank 1 ({platform.node()}, "
        assert f"{where}{alpha})" in end.stderr
    assert not (beta / "checkpoints").exists()
