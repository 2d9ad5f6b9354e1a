"""What a part finds in its output directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expbase.checkpoint import layout, storage
from expbase.config import ConfigError
from expbase.tools import commands, remake_part
from expbase.tools.run_parts import History, Stretch


@pytest.mark.parametrize(
    ("first", "expected"), [(2, [2]), (4, [2, 4]), (6, [6]), (8, [6, 8]), (0, [])]
)
def test_a_part_begins_beside_the_checkpoint_that_was_the_best_one_then(
    tmp_path: Path, first: int, expected: list[int]
) -> None:
    run, output = tmp_path / "run", tmp_path / "0/run"
    scores = {2: 0.5, 4: 0.4, 6: 0.9, 8: 0.7}
    (run / layout.FOLDER).mkdir(parents=True)
    (run / "config.yaml").touch()
    lines = [{"monitor": "max score", "best": [one]} for one in scores.items()]
    (run / "validations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for iteration in scores:
        storage.write(run / layout.FOLDER, iteration, {}, {"validations_bytes": 0})
    history = History(run, [{"iteration": 0}], [*scores], has_kept_first=False)
    remake_part._begin(history, Stretch(first, first + 1), output)
    found = map(layout.iteration_of, layout.listed(output / layout.FOLDER))
    assert [*found] == expected


def test_a_part_of_which_the_run_says_nothing_is_refused_before_it_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 10, "train/loss": 0.5}\n')
    history = History(run, [{"iteration": 0}], [], has_kept_first=False)
    nobody: Any = None  # is asked
    with pytest.raises(ConfigError, match="has logged nothing in iterations 1 to 9, and keeps no"):
        remake_part.make(history, Stretch(0, 9), nobody, tmp_path / "0")


def test_a_path_that_leads_out_of_the_work_tree_is_found_from_its_copy_too(tmp_path: Path) -> None:
    top, folder = tmp_path / "top", tmp_path / "top/deep"
    folder.mkdir(parents=True)
    (tmp_path / "data").mkdir()
    words = [
        "train.py",
        "--data=../../data",
        "../../data",
        "--data=../data",
        "--x=1",
        "a=../../data",
    ]
    expected = [*words]
    expected[1:3] = [f"--data={tmp_path}/data", f"{tmp_path}/data"]
    assert [commands._from_outside(word, top, folder) for word in words] == expected


def test_a_part_leaves_nothing_in_the_temporary_directory(tmp_path: Path) -> None:
    history = History(tmp_path / "run", [{"iteration": 0}], [], has_kept_first=False)
    nobody: Any = None
    with pytest.raises(ConfigError):
        remake_part.make(history, Stretch(0, 9), nobody, tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_by_the_code_of_now_what_was_none_is_not_what_was_not_there() -> None:
    made = remake_part.Made(Stretch(0, 2))
    made.then.saved = {"step-00000002": {"values": {"level": None}}}
    made.now.saved = {"step-00000002": {"values": {"level": 3.5, "more": 1}}}
    problem = "values.level of step-00000002 differs: None then, 3.5 now"
    assert remake_part._difference(made, here=True) == problem
    made.now.saved["step-00000002"]["values"]["level"] = None
    assert remake_part._difference(made, here=True) == ""
