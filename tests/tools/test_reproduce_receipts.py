"""Receipts of parts: together they show a run as it is now, and the whole of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expbase.checkpoint import layout, storage
from expbase.tools import reproduce_receipts
from expbase.tools.remake_part import Made, PartResult
from expbase.tools.run_parts import History, Stretch


@pytest.fixture
def history(tmp_path: Path) -> History:
    """A run of four iterations that has kept two checkpoints."""
    run = tmp_path / "run"
    (run / layout.FOLDER).mkdir(parents=True)
    lines = [{"iteration": number, "train/loss": number / 8} for number in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for iteration in (2, 4):
        save(run, iteration)
    return History(run, [{"iteration": 0, "command": ["a.py"], "git": {}}], [2, 4], False)


def save(run: Path, iteration: int, weights: bytes = b"weights") -> None:
    state = {"values": {}, "loop": {"todo": []}, "environment": {}}
    files = {"model.safetensors": [weights], "state.json": [json.dumps(state).encode()]}
    storage.write(run / layout.FOLDER, iteration, files)


def give(history: History, first: int, last: int, **changes: Any) -> Path:
    """Writes the receipt of a part, which is the same unless something is changed."""
    numbers = {f"train/loss at iteration {at}": at / 8 for at in range(first + 1, last + 1)}
    name = layout.name_of(last)
    saved = reproduce_receipts.what_is_saved(history.run / layout.FOLDER / name)
    del saved["environment"]
    made = Made(Stretch(first, last))
    made.then = PartResult(numbers, {name: saved}, {"sources": {"a.py": "1"}})
    made.now = PartResult(numbers, {name: saved}, {"sources": {"a.py": "1"}})
    made.problem = changes.get("problem", "")
    made.changed = {"sources.a.py": ("1", "2")} if "source" in changes else {}
    path = history.run.with_name(f"{first}{last}{''.join(changes)}.json")
    reproduce_receipts.write(path, history, [made], "")
    return path


def test_receipts_of_all_parts_show_the_whole_run_in_any_order(history: History) -> None:
    problem, words = reproduce_receipts.together(
        history, [give(history, 2, 4), give(history, 0, 2)]
    )
    assert problem == ""
    expected = (
        "iterations 1 to 4, by the receipts of 2 parts, the same bits (2 checkpoints, 4 logged"
    )
    assert words == f"reproduced: {expected} numbers)"


@pytest.mark.parametrize("is_last", [True, False])
def test_a_no_about_a_part_counts_wherever_it_stands(history: History, is_last: bool) -> None:
    paths = [give(history, 0, 2), give(history, 2, 4)]
    no = give(history, 0, 2, problem="train/loss differs")
    problem, words = reproduce_receipts.together(history, [*paths, no] if is_last else [no, *paths])
    assert problem == f"{no}: iterations 1 to 2: train/loss differs"
    assert words == f"NOT REPRODUCED: {problem}"


def change_line(history: History) -> None:
    path = history.run / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.125", "0.126"))


def add_line(history: History) -> None:
    with (history.run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "train/norm": 1.0}\n')


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_line, "iteration 1 was 0.125 when it was compared; the run has 0.126"),
        (add_line, "no receipt has train/norm at iteration 4"),
        (lambda history: save(history.run, 4, b"other"), "the run has another step-00000004 than"),
    ],
)
def test_what_has_changed_since_is_shown_by_no_receipt(
    history: History, change: Callable[[History], None], expected: str
) -> None:
    paths = [give(history, 0, 2), give(history, 2, 4)]
    change(history)
    assert expected in reproduce_receipts.together(history, paths)[0]


def test_a_part_by_other_code_shows_nothing_of_the_run_s(history: History) -> None:
    here = give(history, 2, 4, source="2")
    problem, _ = reproduce_receipts.together(history, [give(history, 0, 2), here])
    expected = "it was made with --here, by code that is not the run's"
    assert problem == f"{here}: iterations 3 to 4: {expected}"


def test_a_part_that_is_missing_is_named(history: History) -> None:
    problem, _ = reproduce_receipts.together(history, [give(history, 0, 2)])
    assert problem == "no receipt of the iterations from 3 on, of 4"
