"""The parts in which a run can be made again."""

from __future__ import annotations

from pathlib import Path

from expbase.tools.parts import History, Part


def test_the_state_that_a_run_saved_where_it_began_is_of_the_first_part() -> None:
    history = History(Path("run"), [{"iteration": 10}], [15, 20], has_kept_first=True)
    assert history.parts() == [Part(10, 15), Part(15, 20)]
    assert history.kept_in(Part(10, 15)) == [10, 15]
    assert history.kept_in(Part(10, 20)) == [10, 15, 20]
    assert history.kept_in(Part(15, 20)) == [20]
