"""docs/judge.md: the loop of the page says of a run what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import blocks
from repository import commit, new_repository, shell

TASK, JUDGE = blocks("judge", "python")
(LOOP,) = blocks("judge", "bash")
(SAID,) = blocks("judge", "text")


@pytest.mark.long
def test_the_loop_judges_a_run_and_makes_two_parts_of_it_again(tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "task", TASK)
    (folder / "judge.py").write_text(JUDGE)
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n")
    commit(folder, "the judge")
    train = "python train.py --device=cpu --output runs/a"
    out = shell(f"{train}\n{LOOP}", folder)
    head, row, *said = out.splitlines()
    assert (head.split(), row.split()[:2]) == (["run", "state", "accuracy"], ["a", "finished"])
    for line, expected in zip(said, SAID.splitlines(), strict=True):
        if not line.startswith("reproduced: ") or "--parts" not in line:
            assert shape(line) == shape(expected)
        else:  # which part it is, is drawn
            assert re.fullmatch(
                r"reproduced: iterations \d+ to \d+ of 40, the same bits \(step-000000\d0, "
                r"\d+ logged numbers\); --parts 1 --seed \d+ takes these",
                line,
            )


def shape(line: str) -> str:
    return re.sub(r"0\.\d+", "0", line)
