"""Saving in the background: one job at a time, errors that arrive, snapshots in reused memory."""

from __future__ import annotations

import threading
from concurrent import futures

import forks
import paddle
import pytest
from tiny import wait_until

from expbase.base.arrays import Array
from expbase.base.background import Background, SnapshotBuffer


def test_waiting_returns_after_the_job_has_ended() -> None:
    go, done = threading.Event(), []
    writer = Background()

    def job() -> None:
        go.wait(forks.LONG_SECONDS)
        done.append(1)

    writer.start(job)
    threading.Timer(0.01, go.set).start()
    writer.wait()
    assert done == [1]
    writer.wait()  # of no job


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_what_the_job_raised_is_raised_once(error: BaseException) -> None:
    def fail() -> None:
        raise error

    writer = Background()
    writer.start(fail)
    wait_until(lambda: writer.is_done)
    with pytest.raises(type(error)):
        writer.wait()
    writer.wait()


def test_a_snapshot_keeps_its_bytes_and_the_next_one_takes_its_memory() -> None:
    tensors = {"model": paddle.zeros([4]), "other": paddle.ones([2], "int64")}
    live = {"file": {name: Array.of(tensor) for name, tensor in tensors.items()}}
    buffer = SnapshotBuffer()
    first = buffer.snapshot(live)["file"]
    tensors["model"].add_(paddle.ones([4]))
    assert first["model"].tensor().tolist() == [0.0] * 4
    assert first["other"].tensor().tolist() == [1, 1]
    second = buffer.snapshot(live)["file"]
    assert second["model"].tensor().tolist() == [1.0] * 4
    assert second["model"].data.ctypes.data == first["model"].data.ctypes.data


def test_a_thread_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does for want of memory: python would wait for what it was to do."""

    def die(*_: object) -> None:
        raise MemoryError

    writer = Background()
    monkeypatch.setattr(futures.Future, "set_result", die)
    monkeypatch.setattr(futures.Future, "set_exception", die)
    writer.start(lambda: None)
    with pytest.raises(RuntimeError, match="a thread that reads or writes checkpoints has died"):
        writer.wait()
    writer.wait()
