"""Checkpoint directories: complete or not there, verified to the bit, never lost to a new one."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from tiny import refusing

from expbase.base import threads
from expbase.base.files import write_single_file
from expbase.checkpoint import layout, storage
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.storage import UnreadableError


def write(directory: Path, iteration: int, **files: bytes) -> Path:
    files = files or {"model.safetensors": b"m" * 300, "state.json": b'{"a": 1}', "empty": b""}
    return storage.write(directory, iteration, {name: [data] for name, data in files.items()})


def newest_intact(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest one, and what was said about damaged ones."""
    said: list[str] = []
    return storage.newest_intact(directory, said.append), said


def content(path: Path) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in storage.opened(path).files.items()}


def damage(path: Path) -> str:
    """What is wrong with a checkpoint; empty: nothing."""
    try:
        storage.verify(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    files = {"a": [b"one", memoryview(b"two")], "empty": [b""]}
    path = storage.write(tmp_path / "c", 400, files, {"x": 1.5})
    assert path.name == "step-00000400"
    assert content(path) == {"a": b"onetwo", "empty": b""}
    assert storage.verify(path)["info"] == {"x": 1.5}
    assert newest_intact(tmp_path / "c") == (path, [])


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write(tmp_path / "c", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


class Killed(BaseException):
    pass


def kill_points(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Makes the at-th step of writing end like a kill: nothing after it happens."""
    reached: list[str] = []

    def stop(name: str, real: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            reached.append(name)
            if len(reached) == at:
                raise Killed(name)
            return real(*args, **kwargs)

        return step

    for owner, name in (
        (Path, "mkdir"), (Path, "rename"), (storage, "write_flushed"), (os, "fsync"),
        (shutil, "rmtree"), (storage, "flush"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, stop(name, getattr(owner, name)))
    return reached


def test_a_kill_at_any_step_loses_at_most_the_checkpoint_under_way(tmp_path: Path) -> None:
    at, ended = 0, False
    while not ended:
        at += 1
        directory = tmp_path / str(at)
        write(directory, 1, data=b"old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_points(monkeypatch, at)
            try:
                write(directory, 2, data=b"new")
                storage.prune(directory, keep_last=1)
                ended = True
            except Killed:
                pass
        path, rejected = newest_intact(directory)
        assert rejected == []
        assert path is not None
        assert content(path) == {"data": b"old" if path.name == "step-00000001" else b"new"}
        assert not list(directory.glob(".*"))
    assert at > 12


def test_everything_is_on_disk_before_it_gets_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    flush, rename = os.fsync, Path.rename

    def noted_flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert path.stat().st_size > 0  # nothing waits in a buffer of ours
        steps.append(path.name)
        flush(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        steps.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_flush)
    monkeypatch.setattr(Path, "rename", noted_rename)
    write(tmp_path / "c", 1, a=b"1", b=b"2")
    assert steps == ["a", "b", "manifest.json", ".writing-step-00000001", "renamed", "c"]


def test_every_damage_is_found_and_the_one_before_is_used(tmp_path: Path) -> None:
    random_source = random.Random(5)
    write(tmp_path, 1)
    for name in ("manifest.json", "model.safetensors", "state.json", "empty"):
        file = write(tmp_path, 2) / name
        data = file.read_bytes()
        damaged = [b"", data + b"x"]
        damaged += [data[: random_source.randrange(len(data))] for _ in range(5 if data else 0)]
        for _ in range(100 if data else 0):
            position, bit = random_source.randrange(len(data)), 1 << random_source.randrange(8)
            changed = bytes([data[position] ^ bit])
            damaged.append(data[:position] + changed + data[position + 1 :])
        for bad in damaged:
            if bad != data:
                file.write_bytes(bad)
                assert name in damage(file.parent)
        file.unlink()
        path, [rejected] = newest_intact(tmp_path)
        assert path == tmp_path / "step-00000001"
        assert "step-00000002" in rejected
        assert name in rejected
        assert "Moved aside to damaged-step-00000002" in rejected


def test_a_damaged_one_takes_the_place_of_an_earlier_damaged_one(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path, 3)
        (tmp_path / "step-00000003/state.json").unlink()
        with pytest.raises(CheckpointError, match="no intact checkpoint is left"):
            newest_intact(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged-step-00000003"]


def test_what_the_system_refuses_to_read_is_no_damage_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("checksum_of", "read_bytes"):
        with monkeypatch.context() as patched:
            patched.setattr(storage, name, refuse)
            with pytest.raises(UnreadableError, match=r"step-00000002.*Input/output error.*mand"):
                newest_intact(tmp_path)
    assert newest_intact(tmp_path) == (path, [])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "deep/file"])
def test_a_manifest_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 1)
    manifest = storage._manifest_bytes(1, {name: {"size": 1, "crc32": 1}}, {})
    (path / "manifest.json").write_bytes(manifest)
    for reader in (storage.verify, storage.opened):
        with pytest.raises(CheckpointError, match=r"manifest\.json: its content has changed"):
            reader(path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    for file in ("model.safetensors", "manifest.json"):  # the second one is looked at first
        (path / file).unlink()
        os.mkfifo(path / file)
        assert file in damage(path)


def test_a_manifest_without_a_table_or_nested_without_end_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    files: Any = "model"
    for text in (storage._manifest_bytes(1, files, {}), b"[" * 100_000):
        (path / "manifest.json").write_bytes(text)
        assert "manifest.json: damaged" in damage(path)


def test_a_state_that_is_another_thing_has_no_position(tmp_path: Path) -> None:
    for number, values in enumerate(({}, {"values": 3}, {"values": {"data": {}}})):
        state = json.dumps({"format": layout.FORMAT, **values}).encode()
        path = write(tmp_path, number, **{"state.json": state})
        assert storage.position_at(path) == (None, None)


def test_a_system_that_refuses_is_told_and_the_earlier_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, 2)
    monkeypatch.undo()
    text = str(caught.value)
    assert "step-00000002: cannot be written" in text
    assert os.strerror(errno.EROFS) in text
    assert "Earlier checkpoints are intact. Make room" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    storage.verify(tmp_path / "step-00000001")


def test_a_disk_that_is_really_full_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode: open("/dev/full", "wb"))
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(tmp_path, 1)


def test_pruning_keeps_the_newest_every_nth_and_the_best(tmp_path: Path) -> None:
    for iteration in range(1, 11):
        write(tmp_path, iteration, a=b"x")
    storage.prune(tmp_path, keep_last=2, keep_every=4, keep_best=lambda there: [3])
    left = [layout.iteration_of(path) for path in layout.listed(tmp_path)]
    assert left == [3, 4, 8, 9, 10]
    storage.prune(tmp_path, keep_last=0)
    assert len(layout.listed(tmp_path)) == 5


def test_a_kill_within_a_deletion_leaves_none_that_is_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2):
        write(tmp_path, iteration, a=b"x")

    def killed(path: Path, **options: bool) -> None:
        next(path.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            storage.prune(tmp_path, keep_last=1)
    for path in layout.listed(tmp_path):
        storage.verify(path)
    storage.newest_intact(tmp_path, print)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_one_that_cannot_be_deleted_stays_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2, 3):
        write(tmp_path, iteration)
    refusing(monkeypatch, "step-00000001")
    refused = storage.prune(tmp_path, keep_last=1)
    assert refused == {"step-00000001": "Device or resource busy", "step-00000002": ""}
    assert [path.name for path in layout.listed(tmp_path)] == ["step-00000001", "step-00000003"]
    assert storage.prune(tmp_path, keep_last=1, ignored=["step-00000001"]) == {}


@pytest.mark.parametrize("protected", [3, 1])
def test_one_of_which_no_file_can_be_deleted_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protected: int
) -> None:
    """As after `chmod -R a-w`; of one with a single such file the others are gone, and told."""
    for iteration in (1, 2):
        write(tmp_path, iteration, a=b"a", b=b"b")

    def refuse(path: Path, **options: bool) -> None:
        for file in sorted(path.iterdir())[protected:]:
            file.unlink()
        if not options:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        [why] = storage.prune(tmp_path, keep_last=1).values()
        said = newest_intact(tmp_path)[1]
    if protected == 3:
        assert why == "Operation not permitted"
        storage.verify(tmp_path / "step-00000001")
        assert said == []
    else:
        assert why == "Operation not permitted. What is left of it is in .deleting-step-00000001"
        [text] = said
        assert text.endswith("step-00000001: left by another start, and cannot be deleted: "
                             "Operation not permitted")  # fmt: skip


def test_checkpoints_are_listed_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    for name in (
        "step-100000000",
        "step-00000009",
        "step-00000010",
        "step-x",
        ".writing-step-00000011",
    ):
        (tmp_path / name).mkdir()
    names = [path.name for path in layout.listed(tmp_path)]
    assert names == ["step-00000009", "step-00000010", "step-100000000"]
    assert layout.listed(tmp_path / "missing") == []


def test_a_checksum_whose_thread_has_died_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise MemoryError

    path = write(tmp_path, 1)
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(futures.Future, "set_result", die)
    monkeypatch.setattr(futures.Future, "set_exception", die)
    for use in (lambda: storage.verify(path), lambda: write(tmp_path, 2)):
        with pytest.raises(RuntimeError, match="has died, as one does for want of memory"):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_is_in_the_place_of_a_half_written_checkpoint_is_removed(tmp_path: Path) -> None:
    place = tmp_path / ".writing-step-00000001"
    for put in (os.mkfifo, lambda place: place.symlink_to("/nowhere")):
        for use in (newest_intact, lambda folder: write(folder, 1)):
            put(place)
            use(tmp_path)
            assert not os.path.lexists(place)


def test_a_link_in_the_place_of_a_half_written_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".writing-config.yaml").symlink_to("theirs")
    write_single_file(tmp_path / "config.yaml", [b"ours"])
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "config.yaml").read_text() == "ours"
