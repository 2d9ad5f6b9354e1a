"""Saving in the background: one job at a time, errors that arrive, snapshots in reused memory."""

from __future__ import annotations

import threading
from concurrent import futures

import forks
import paddle
import pretend
import pytest
from tiny import DEVICE, wait_until

from expbase.base import threads
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


@pytest.mark.device
def test_a_snapshot_has_what_was_queued_before_it_and_nothing_after_it() -> None:
    one, many = paddle.zeros([4]).to(DEVICE), paddle.zeros([1 << 16]).to(DEVICE)
    live = {"file": {"one": Array.of(one), "many": Array.of(many), "none": Array.of(one[:0])}}
    buffer = SnapshotBuffer()
    for number in range(1, 4):
        for _ in range(8):
            many.fill_(-number)  # which takes a while
        for tensor in (one, many):
            tensor.fill_(number)
        copies = buffer.snapshot(live)["file"]
        for tensor in (one, many):
            tensor.fill_(-1)
        assert {*copies["one"].tensor().tolist(), *copies["many"].tensor().tolist()} == {number}


@pytest.mark.pretend
def test_a_snapshot_copies_each_tensor_once_and_waits_once() -> None:
    live = {
        name: {str(i): Array.of(paddle.ones([i, 5]).to(DEVICE)) for i in range(3)} for name in "ab"
    }
    before = pretend.counts()
    SnapshotBuffer().snapshot(live)
    counts = pretend.counts().since(before)
    assert (counts.waits, counts.synchronized, counts.queued_to_host) == (1, 1, 4)


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
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(futures.Future, "set_result", die)
    monkeypatch.setattr(futures.Future, "set_exception", die)
    writer.start(lambda: None)
    with pytest.raises(RuntimeError, match="a thread that reads or writes checkpoints has died"):
        writer.wait()
    writer.wait()
