"""The processes of --nprocs: exit codes, and the end of the others when one fails.

Runs with --nprocs are in test_stopping.py and test_distributed.py.
"""

from __future__ import annotations

import os

import pytest

from expbase import launch


class FakeProcess:
    """A process that has ended with an exit code; with None one that runs until it is killed."""

    def __init__(self, exitcode: int | None) -> None:
        self.sentinel, self._writer = os.pipe()
        self.exitcode = exitcode
        if exitcode is not None:
            os.close(self._writer)

    def kill(self) -> None:
        self.exitcode = -9
        os.close(self._writer)

    def join(self) -> None:
        os.close(self.sentinel)


@pytest.mark.parametrize(
    ("exitcodes", "answer"),
    [
        ([0, 0], 0),
        ([143, 0], 143),  # stopped
        ([0, -15], 143),  # by a signal that nobody handled
        ([124, 1], 1),  # a failure says more than a stop
        ([-9, 0], 137),
    ],
)
def test_the_answer_is_the_code_of_a_failure_else_of_a_stop(
    exitcodes: list[int], answer: int
) -> None:
    assert launch._join([FakeProcess(code) for code in exitcodes]) == answer


@pytest.mark.parametrize("exitcode", [1, -11, -15])
def test_when_a_process_fails_those_that_go_on_are_killed_after_a_while(
    exitcode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.0)
    going_on = [FakeProcess(None), FakeProcess(None)]
    launch._join([going_on[0], FakeProcess(exitcode), going_on[1]])
    assert [process.exitcode for process in going_on] == [-9, -9]
