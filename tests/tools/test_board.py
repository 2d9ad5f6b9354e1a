"""The board over HTTP, and its copies of files that are torn or cut back."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import numpy as np
import psutil
import pytest
import requests
from tiny import wait_until

from expbase.__main__ import main
from expbase.record.visualizer import FILE_NAME, Visualizer
from expbase.tools import board
from expbase.tools.board import _room_for_copies, record_files, update
from expbase.tools.board_server import is_ours


def written(directory: Path, *, rate: float = 0.1, points: int = 20) -> Path:
    """A run as far as the board is concerned: its record file has one of everything."""
    directory.mkdir(parents=True)
    for name in ("config.yaml", "ledger.jsonl"):
        (directory / name).touch()
    visualizer = Visualizer(directory)
    visualizer.add_scalar("valid/accuracy", 0.95 - rate, 1)
    visualizer.add_image("sample", np.full([30, 40], 128, "uint8"), 7)
    visualizer.close()
    add_points(directory, range(points))
    return directory / FILE_NAME


def add_points(directory: Path, steps: range, *, after: int | None = None) -> None:
    """Goes on with the curve; first cuts the file back to a size, if there is one."""
    visualizer = Visualizer(directory)
    if after is not None:
        visualizer.cut(after)
    for step in steps:
        visualizer.add_scalar("train/loss", 1 / (1 + step), step)
    visualizer.close()


def ends(path: Path) -> list[int]:
    """How long the file is after each of its records."""
    data, found = path.read_bytes(), [0]
    while found[-1] < len(data):
        found.append(found[-1] + 8 + int.from_bytes(data[found[-1] :][:8], "little"))
    return found


# --- over HTTP -------------------------------------------------------------------------------


class Board:
    """A board in a process of its own."""

    def __init__(self, runs: Path, temporary: Path) -> None:
        temporary.mkdir()
        command = [sys.executable, "-W", "ignore", "-m", "expbase", "board", str(runs)]
        self.process = forks.Popen(
            [*command, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert self.process.stdout
        said = self.process.stdout.readline()
        self.address = said.split()[0].removesuffix("/app/scalar")
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy

    def get(self, path: str, **query: Any) -> Any:
        address, limit = f"{self.address}/app/api/{path}", forks.LONG_SECONDS
        answer = self._session.get(address, params=query, timeout=limit)
        return answer.json()["data"]

    def steps(self, run: str) -> list[int] | None:
        """Of the training loss; None while VisualDL is being started again."""
        try:
            points = self.get("scalar/list", run=run, tag="train/loss")
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            return None  # the latter: it was ended in the middle of its answer
        return [step for _, step, _ in points]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    written(tmp_path / "runs/deep/lr=0.1")
    written(tmp_path / "runs/lr=0.5", rate=0.5)
    return tmp_path / "runs"


@pytest.fixture
def shown(runs: Path, tmp_path: Path) -> Iterator[Board]:
    made = Board(runs, tmp_path / "temporary")
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.mark.long
def test_runs_are_shown_and_followed_until_the_board_ends(
    runs: Path, shown: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = "runs/deep/lr=0.1", "runs/lr=0.5"
    wait_until(lambda: shown.steps(fast) is not None)
    servers = psutil.Process(shown.process.pid).children()
    assert set(shown.get("runs")) == {slow, fast}
    assert set(shown.get("component_tabs")) >= {"scalar", "image"}
    assert shown.steps(slow) == shown.steps(fast) == [*range(20)]
    for name, code in (
        ("evil.example:8040", 403),
        ("localhost:1", 200),
        (socket.gethostname(), 200),
    ):
        answer = requests.get(f"{shown.address}/app/api/runs", headers={"Host": name}, timeout=60)
        assert answer.status_code == code, name
        assert ("'evil.example:8040' is no name of this machine" in answer.text) == (code == 403)

    # It goes on; a record is half written, and finished.
    run = runs / "lr=0.5"
    add_points(run, range(20, 22))
    whole = (run / FILE_NAME).read_bytes()
    os.truncate(run / FILE_NAME, len(whole) - 5)
    wait_until(lambda: shown.steps(fast) == [*range(21)])
    (run / FILE_NAME).write_bytes(whole)
    wait_until(lambda: shown.steps(fast) == [*range(22)])
    assert psutil.Process(shown.process.pid).children() == servers  # all that time

    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "ledger.jsonl", FILE_NAME]

    # VisualDL ends with a board that is killed; the next board removes its copies, and no other's.
    (left,) = (tmp_path / "temporary").iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with _room_for_copies():
        assert left.exists()
    shown.process.kill()
    wait_until(lambda: shown.steps(slow) is None)
    shown.process.wait()
    with _room_for_copies() as room:
        assert [*(tmp_path / "temporary").iterdir()] == [room]


@pytest.mark.long
def test_a_run_that_is_resumed_from_an_earlier_checkpoint_is_shown_anew(
    runs: Path, shown: Board
) -> None:
    slow, fast = "runs/deep/lr=0.1", "runs/lr=0.5"
    wait_until(lambda: shown.steps(fast) is not None)
    run = runs / "lr=0.5"
    before = ends(run / FILE_NAME)[-5]
    add_points(run, range(100, 150), after=before)
    wait_until(lambda: shown.steps(fast) == [*range(16), *range(100, 150)])
    assert shown.steps(slow) == [*range(20)]


def test_an_address_or_a_name_of_this_machine_is_ours() -> None:
    """A foreign name may be given this machine's address by who owns the name."""
    own = (
        "127.0.0.1:80",
        "[::1]:80",
        "192.168.0.7",
        "LocalHost:80",
        socket.gethostname(),
        "gpu7:1",
    )
    assert [host for host in own if not is_ours(host, "gpu7")] == []
    foreign = ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "", "[:::")
    assert [host for host in foreign if is_ours(host, "gpu7")] == []


def test_ctrl_c_ends_it_and_leaves_no_copies(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Any, copies: Path, *rest: Any) -> None:
        copies.mkdir()
        os.kill(os.getpid(), signal.SIGINT)

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(board, "show", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["board", str(runs), "--port", "0"])
    assert end.value.code == 130
    assert list(temporary.iterdir()) == []


# --- copies ----------------------------------------------------------------------------------


class Copies:
    """The copies of the runs at and below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder.parent / "copies"
        self.seen: board.Seen = {}

    def update(self) -> bool:
        return update(record_files(self.folder, self.directory), self.seen)

    def remove(self) -> None:
        shutil.rmtree(self.directory)
        self.seen.clear()

    def now(self) -> dict[str, bytes]:
        found = self.directory.rglob(FILE_NAME)
        return {str(p.parent.relative_to(self.directory)): p.read_bytes() for p in found}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "runs/a")


@pytest.fixture
def copies(path: Path) -> Copies:
    return Copies(path.parents[1])


def test_half_a_record_at_the_end_is_left_out_until_it_is_whole(path: Path, copies: Copies) -> None:
    whole, half = path.read_bytes(), ends(path)[12]
    for left in (1, 7, 8, 9, 30):
        for torn in (whole[: half + left], whole[:half] + bytes(left)):  # of a kill, a power cut
            path.write_bytes(torn)
            assert copies.update(), left
            assert copies.now() == {"a": whole[:half]}, left
        path.write_bytes(whole)
        assert copies.update(), left
        assert copies.now() == {"a": whole}, left
        copies.remove()


def test_a_file_that_was_cut_back_is_noticed_even_if_it_has_grown_since(
    path: Path, copies: Copies
) -> None:
    size = ends(path)[12]
    assert copies.update()
    add_points(path.parent, range(100, 140), after=size)
    assert not copies.update()
    os.truncate(path, size)
    assert not copies.update()
    copies.remove()
    assert copies.update()
    assert copies.now() == {"a": path.read_bytes()}


def test_runs_come(path: Path, copies: Copies) -> None:
    runs = path.parents[1]
    written(runs / ".hidden")
    assert copies.update()
    written(runs / "deep/b", points=3)
    assert copies.update()
    assert set(copies.now()) == {"a", "deep/b"}


def test_a_file_is_opened_again_only_when_it_has_changed(
    path: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path.parents[1] / "b")
    opened: list[str] = []
    extend = board._extend

    def noted(copy: Path, file: Path) -> bool:
        opened.append(file.parent.name)
        return extend(copy, file)

    monkeypatch.setattr(board, "_extend", noted)
    assert copies.update()
    add_points(path.parent, range(100, 101))
    assert copies.update()
    assert copies.update()
    assert opened == ["a", "b", "a"]


def test_a_run_is_named_by_its_path_below_the_folder(tmp_path: Path) -> None:
    for name in ("runs/a", "runs/b/c"):
        written(tmp_path / name)
    for folder, names in (("runs/a", {"."}), ("runs", {"a", "b/c"})):
        found = record_files(tmp_path / folder, tmp_path)
        assert {str(copy.parent.relative_to(tmp_path)) for copy in found} == names


def test_a_copy_that_grows_is_replaced_so_that_nobody_reads_half_of_a_record(
    path: Path, copies: Copies
) -> None:
    whole, half = path.read_bytes(), ends(path)[12]
    path.write_bytes(whole[:half])
    assert copies.update()
    with (copies.directory / "a" / FILE_NAME).open("rb") as before:
        assert copies.update()
        assert os.path.samestat(os.fstat(before.fileno()), os.stat(before.name))
        path.write_bytes(whole)
        assert copies.update()
        assert before.read() == whole[:half]
    assert [file.name for file in (copies.directory / "a").iterdir()] == [FILE_NAME]
    assert copies.now() == {"a": whole}


# --- errors ----------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 78) -> str:
    assert main(["board", *words]) == code
    err = capsys.readouterr().err
    assert err.startswith("python -m expbase board: error: ")
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_shown_or_bound_is_one_line(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, run = tmp_path / "empty", str(path.parent)
    empty.mkdir()
    assert f"no runs with VisualDL records below {empty}." in refused(capsys, str(empty))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = refused(capsys, run, "--port", port, code=1)  # it may be free later
        told = f"error: --port {port}, --host 127.0.0.1: Address already in use; expected a port "
        assert error.endswith(f"{told}that nobody uses, --port 0 for any such one, and an address "
                              "of this machine.\n")  # fmt: skip
    error = refused(capsys, run, "--host", "203.0.113.1")
    assert "--port 8040, --host 203.0.113.1: Cannot assign requested address; expected" in error
    assert "--host no.invalid: " in refused(capsys, run, "--host", "no.invalid")
    error = refused(capsys, run, "--port", "65536")
    assert error.endswith("--port: 65536 given; expected 0 to 65535.\n")


def test_a_visualdl_that_ends_by_itself_is_one_line(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2\necho no such thing >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    error = refused(capsys, str(path.parent), "--port", "0", code=1)
    assert error.endswith("VisualDL ended with exit code 3: no such thing\n")
