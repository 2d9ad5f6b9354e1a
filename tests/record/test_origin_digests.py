"""Digests: what they are of, what changes them, and that they fail for nothing and draw nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import pretend
import pytest
from tiny import DEVICE

from expbase.record import origin_digests

Named = list[tuple[str, Any]]


def hex_of(text: str) -> str:
    word, value, _ = text.split(" ", 2)
    assert word == "sha256"
    assert len(value) == 64
    return value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three files, one of them below."""
    folder = tmp_path / "data"
    (folder / "below").mkdir(parents=True)
    for name in ("b", "a", "below/c"):
        (folder / name).write_bytes(name.encode() * 100)
    return folder


# --- files -----------------------------------------------------------------------------------


def test_that_of_a_file_is_what_sha256sum_prints(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_234_567)
    value = hashlib.sha256(path.read_bytes()).hexdigest()
    assert origin_digests.of_path(path) == f"sha256 {value} of 1,234,567 bytes"


def test_of_a_large_file_the_size_and_both_ends_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_BYTES", 99)
    monkeypatch.setattr(origin_digests, "_END_BYTES", 10)
    path = tmp_path / "file"
    found = []
    for content in (b"ab" * 50, b"ab" * 51, b"ab" * 49 + b"ax", b"xb" + b"ab" * 49):
        path.write_bytes(content)
        found.append(origin_digests.of_path(path))
    assert len({*map(hex_of, found)}) == len(found)
    assert found[0].endswith(" of the size and the ends of 100 bytes")
    path.write_bytes(b"ab" * 20 + b"xy" + b"ab" * 29)  # in the middle
    assert origin_digests.of_path(path) == found[0]


def test_that_of_a_folder_is_the_same_for_a_copy_and_through_a_link(
    folder: Path, tmp_path: Path
) -> None:
    found = origin_digests.of_path(folder)
    assert found.endswith(" of 900 bytes in 3 files")
    copy = tmp_path / "copy"
    (tmp_path / "elsewhere").mkdir()
    copy.mkdir()
    for place, name in ((tmp_path / "elsewhere", "c"), (copy, "a"), (copy, "b")):
        source = next(folder.rglob(name))
        (place / name).write_bytes(source.read_bytes())
    (copy / "below").symlink_to(tmp_path / "elsewhere")
    assert origin_digests.of_path(copy) == found


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda folder: (folder / "below/c").write_bytes(b"below/c" * 99 + b"below/x"),
    "name": lambda folder: (folder / "a").rename(folder / "z"),
    "place": lambda folder: (folder / "a").rename(folder / "below/a"),
    "an empty one": lambda folder: (folder / "new").touch(),
    "one less": lambda folder: (folder / "a").unlink(),
}


@pytest.mark.parametrize("most", [1 << 28, 100], ids=["whole", "ends"])
def test_a_change_in_a_folder_is_another_digest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_BYTES", most)
    before = origin_digests.of_path(folder)
    assert ("names, sizes and ends of" in before) == (most == 100)
    for name, change in CHANGES.items():
        copy = Path(shutil.copytree(folder, tmp_path / name))
        assert origin_digests.of_path(copy) == before, name
        change(copy)
        assert hex_of(origin_digests.of_path(copy)) != hex_of(before), name


def test_each_size_counts_where_the_middle_of_files_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_BYTES", 100)
    before = origin_digests.of_path(folder)
    for name, length in (("a", 90), ("b", 110)):
        (folder / name).write_bytes(name.encode() * length)
    after = origin_digests.of_path(folder)
    assert hex_of(after) != hex_of(before)
    assert after.endswith(" of the names, sizes and ends of 900 bytes in 3 files")


def test_the_order_in_which_a_disk_lists_files_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("below/d", "beside/a", "beside/b"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    found = []
    walk = os.walk
    for is_reversed in (False, True):

        def walked(*args: Any, order: bool = is_reversed, **options: Any) -> Iterator[Any]:
            for place, *lists in walk(*args, **options):
                for names in lists:
                    names.sort(reverse=order)
                yield place, *lists

        monkeypatch.setattr(os, "walk", walked)
        found.append(origin_digests.of_path(folder))
    assert found[0] == found[1]


def test_of_a_large_folder_no_more_is_read_than_of_a_small_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_BYTES", 60)
    lengths = []
    ends = origin_digests._ends

    def noted(file: Path, size: int, length: int) -> Any:
        parts = [*ends(file, size, length)]
        lengths.append(sum(map(len, parts)))
        return parts

    monkeypatch.setattr(origin_digests, "_ends", noted)
    found = origin_digests.of_path(folder)
    assert lengths == [20, 20, 20]
    assert found.endswith(" of the names, sizes and ends of 900 bytes in 3 files")


def test_of_a_folder_of_many_files_the_first_ones_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_FILES", 2)
    found = origin_digests.of_path(folder)
    assert found.endswith(" of 200 bytes in the first 2 files")
    (folder / "below/c").unlink()
    assert hex_of(origin_digests.of_path(folder)) == hex_of(found)


def test_a_run_a_pipe_and_a_link_to_above_are_no_part_of_a_folder(folder: Path) -> None:
    found = origin_digests.of_path(folder)
    (folder / "runs/a/checkpoints").mkdir(parents=True)
    for name in ("ledger.jsonl", "checkpoints/model"):
        (folder / "runs/a" / name).write_text("{}")
    os.mkfifo(folder / "pipe")
    (folder / "below/loop").symlink_to(folder)
    (folder / "nowhere").symlink_to(folder / "missing")
    assert origin_digests.of_path(folder) == found


def test_why_there_is_no_digest_is_said_without_a_path(folder: Path) -> None:
    def fail() -> str:
        raise MemoryError

    assert origin_digests.or_reason(lambda: "sha256 1") == "sha256 1"
    missing = origin_digests.or_reason(lambda: origin_digests.of_path(folder / "missing/x"))
    assert missing == "not known: No such file or directory"
    assert origin_digests.or_reason(fail) == "not known: MemoryError"


# --- tensors ---------------------------------------------------------------------------------


def numbers(dtype: str = "float32", size: int = 5000) -> Any:
    return paddle.arange(size).astype(dtype)


def test_name_type_shape_and_each_number_count() -> None:
    named: list[Named] = [
        [("a", numbers())],
        [("b", numbers())],
        [("a", numbers("int32"))],
        [("a", numbers().reshape([50, 100]))],
        [("a", paddle.concat([numbers(size=4999), paddle.zeros([1])]))],
        [("a", numbers()), ("b", paddle.zeros([0]))],
    ]
    found = [origin_digests.of_tensors(one) for one in named]
    assert len({*map(hex_of, found)}) == len(named)
    assert found[0].endswith(" of 1 tensor of 20,000 bytes")
    assert found[-1].endswith(" of 2 tensors of 20,000 bytes")


def test_neither_the_order_nor_a_second_name_counts() -> None:
    a, b = numbers(), numbers("int32")
    named = [("a", a), ("b", b)]
    assert origin_digests.of_tensors(named[::-1]) == origin_digests.of_tensors(named)
    shared = origin_digests.of_tensors([("a", a), ("b", a)])
    assert shared.endswith(" of 1 tensor of 20,000 bytes")


def test_of_large_ones_a_sample_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_TENSOR_BYTES", 30_000)
    monkeypatch.setattr(origin_digests, "_ELEMENTS", 50)
    named = [("a", numbers()), ("b", numbers()), ("scalar", paddle.ones([]))]
    found = origin_digests.of_tensors(named)
    assert found.endswith(" of a sample of each of 3 tensors of 40,004 bytes")
    digest = {hex_of(found)}
    for index in (0, 2500, 4900):
        other = numbers()
        other[index] = -1.0
        digest.add(hex_of(origin_digests.of_tensors([named[0], ("b", other), named[2]])))
    assert len(digest) == 4


@pytest.mark.parametrize("most", [1 << 26, 1], ids=["whole", "sample"])
def test_every_type_has_one(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_TENSOR_BYTES", most)
    one, other = paddle.zeros([3, 3]), paddle.ones([3, 3])
    for dtype in ("bfloat16", "float16", "complex64", "bool", "float8_e4m3fn"):
        found = {
            hex_of(origin_digests.of_tensors([("a", each.astype(dtype))])) for each in (one, other)
        }
        assert len(found) == 2, dtype


def test_a_parameter_without_memory_and_a_piece_have_one() -> None:
    with paddle.LazyGuard():
        lazy = paddle.nn.Linear(2, 3)
    named = [*lazy.named_parameters()]
    assert origin_digests.of_tensors(named).endswith(" of 2 tensors of 0 bytes")
    if DEVICE == "cpu":
        mesh = dist.ProcessMesh([0], dim_names=["x"])
        piece = dist.shard_tensor(paddle.ones([4, 2]), mesh, [dist.Shard(0)])
        assert origin_digests.of_tensors([("a", piece)]).endswith(" of 1 tensor of 32 bytes")


def test_nothing_is_drawn_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_TENSOR_BYTES", 1)
    layer = paddle.nn.Linear(50, 50)
    content = layer.weight.numpy().copy()
    paddle.seed(1)
    drawn = paddle.rand([3]).tolist()
    paddle.seed(1)
    origin_digests.of_tensors([*layer.named_parameters()])
    assert paddle.rand([3]).tolist() == drawn
    assert (layer.weight.numpy() == content).all()
    assert layer.weight.inplace_version == 0
    assert layer.weight.grad is None


@pytest.mark.pretend
@pytest.mark.parametrize("most", [1 << 26, 1], ids=["whole", "sample"])
def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(origin_digests, "_MOST_TENSOR_BYTES", most)
    monkeypatch.setattr(origin_digests, "_ELEMENTS", 4)
    named = [(f"{number}", paddle.ones([8, 8])) for number in range(5)]
    before = pretend.counts()
    origin_digests.of_tensors(named)
    counts = pretend.counts().since(before)
    assert (counts.waits, counts.synchronized) == (1, 1)
    assert counts.queued_to_host == len(named)
