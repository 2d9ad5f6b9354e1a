"""The parts in which a run can be made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expbase.record.starts_and_ends import _began_from
from expbase.tools.run_parts import History, Stretch

P = "--checkpoint_path"


def test_the_state_that_a_run_saved_where_it_began_is_of_the_first_part() -> None:
    history = History(Path("run"), [{"iteration": 10}], [15, 20], has_kept_first=True)
    assert history.parts() == [Stretch(10, 15), Stretch(15, 20)]
    assert history.kept_in(Stretch(10, 15)) == [10, 15]
    assert history.kept_in(Stretch(10, 20)) == [10, 15, 20]
    assert history.kept_in(Stretch(15, 20)) == [20]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([], {}),
        ([(None, {"--init_model_path": "a"}), (None, {})], {"began_from": {}}),
        ([("step-00000010", {P: "a"})], {"began_from": {P: "a"}}),
        ([("step-00000010", {P: "a"}), ("step-00000010", {P: "b"})], {"began_from": {P: "b"}}),
        # The second one went on from what the first one had kept of that state.
        ([("step-00000010", {P: "a"}), ("step-00000010", {})], {"began_from": {P: "a"}}),
    ],
)
def test_what_a_run_began_from_is_what_its_first_state_was_read_from(
    starts: list[tuple[str | None, dict[str, str]]], expected: dict[str, Any]
) -> None:
    facts = [{"resumed": resumed, "began_from": noted} for resumed, noted in starts]
    assert _began_from(facts) == expected
