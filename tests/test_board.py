"""The board over HTTP, and its copies of files that are torn, cut back or damaged."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests

from expbase.__main__ import main
from expbase.tools import board
from expbase.tools.board import Mirror, addresses, free_port
from expbase.visualizer import FILE_NAME, Visualizer

SECONDS = 30.0


def written(directory: Path, *, rate: float = 0.1, points: int = 20) -> Path:
    """A run as far as the board is concerned: its record file has one of everything."""
    directory.mkdir(parents=True)
    for name in ("config.yaml", "ledger.jsonl"):
        (directory / name).touch()
    visualizer = Visualizer(directory)
    visualizer.add_hparams({"optim.lr": rate}, ["valid/accuracy"])
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
    """A board in a process of its own.

    Attributes:
        temporary: Where it keeps its copies.
        process: Its process.
        server: VisualDL's.
    """

    def __init__(self, runs: Path, temporary: Path) -> None:
        temporary.mkdir()
        self.temporary = temporary
        command = [sys.executable, "-W", "ignore", "-m", "expbase", "board", str(runs)]
        self.process = subprocess.Popen(
            [*command, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert self.process.stdout
        said = self.process.stdout.readline()
        self.address = said.split()[0].removesuffix("/app/scalar")
        (self.server,) = psutil.Process(self.process.pid).children()
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy

    def get(self, path: str, **query: Any) -> Any:
        answer = self._session.get(f"{self.address}/app/api/{path}", params=query, timeout=SECONDS)
        return answer.json()["data"]

    def steps(self, run: str) -> list[int] | None:
        """Of the training loss; None while VisualDL is being started again."""
        try:
            points = self.get("scalar/list", run=run, tag="train/loss")
        except requests.ConnectionError:
            return None
        return [step for _, step, _ in points]

    def end(self, number: signal.Signals) -> int:
        """Sends a signal; returns the exit code."""
        self.process.send_signal(number)
        assert self.process.stdout
        self.process.stdout.close()
        return self.process.wait(timeout=SECONDS)


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
    made.process.wait()


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_runs_are_shown_and_followed_and_nothing_is_left_behind(runs: Path, shown: Board) -> None:
    slow, fast = "runs/deep/lr=0.1", "runs/lr=0.5"
    assert set(shown.get("runs")) == {slow, fast}
    assert set(shown.get("component_tabs")) >= {"scalar", "image", "hyper_parameters"}
    table = {row.pop("name"): row for row in shown.get("hparams/list")}
    assert table[fast]["hparams"] == {"lr": 0.5}
    assert table[slow]["metrics"]["valid/accuracy"] == pytest.approx(0.85)
    assert shown.steps(slow) == shown.steps(fast) == [*range(20)]

    # It goes on; a record is half written, and finished.
    run = runs / "lr=0.5"
    before = (run / FILE_NAME).stat().st_size
    add_points(run, range(20, 22))
    whole = (run / FILE_NAME).read_bytes()
    os.truncate(run / FILE_NAME, len(whole) - 5)
    until(lambda: shown.steps(fast) == [*range(21)])
    (run / FILE_NAME).write_bytes(whole)
    until(lambda: shown.steps(fast) == [*range(22)])
    assert psutil.Process(shown.process.pid).children() == [shown.server]  # all that time

    # It is resumed from an earlier checkpoint.
    add_points(run, range(100, 150), after=before)
    until(lambda: shown.steps(fast) == [*range(20), *range(100, 150)])
    assert shown.steps(slow) == [*range(20)]

    assert shown.end(signal.SIGINT) == 0
    assert not shown.server.is_running()
    assert list(shown.temporary.iterdir()) == []
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "ledger.jsonl", FILE_NAME]


def test_visualdl_ends_with_a_board_that_is_killed(shown: Board) -> None:
    assert shown.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: shown.steps("runs/lr=0.5") is None)


# --- copies ----------------------------------------------------------------------------------


class Copies:
    """The copies of the runs below a directory."""

    def __init__(self, *folders: Path) -> None:
        self.directory = folders[0].parent / "copies"
        self.mirror = Mirror(folders, self.directory)

    def now(self) -> dict[str, bytes]:
        """After an update, or after as many as it takes."""
        while not self.mirror.update():
            assert list(self.directory.iterdir()) == []
        found = sorted(self.directory.rglob(FILE_NAME))
        return {str(p.parent.relative_to(self.directory)): p.read_bytes() for p in found}


@pytest.mark.parametrize("left", [1, 7, 8, 9, 30])
def test_half_a_record_at_the_end_is_left_out_until_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: int
) -> None:
    path = written(tmp_path / "runs/a")
    whole, half = path.read_bytes(), ends(path)[12]
    path.write_bytes(whole[: half + left])
    copies = Copies(tmp_path / "runs")
    assert copies.now() == copies.now() == {"runs/a": whole[:half]}
    path.write_bytes(whole)
    assert copies.now() == {"runs/a": whole}
    assert capsys.readouterr().out == ""


def test_a_file_that_was_cut_back_is_copied_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "runs/a")
    size = ends(path)[12]
    copies = Copies(tmp_path / "runs")
    copies.now()
    os.truncate(path, size)
    assert not copies.mirror.update()
    assert copies.now() == {"runs/a": path.read_bytes()}
    for first in (100, 200):
        # Longer than it was before, and nobody looked in between.
        add_points(path.parent, range(first, first + 40), after=size)
        assert copies.mirror.update() == (first == 100)
        assert copies.now() == {"runs/a": path.read_bytes()}


def test_runs_come_and_go_and_are_moved(tmp_path: Path) -> None:
    first = written(tmp_path / "runs/a").read_bytes()
    written(tmp_path / "runs/.hidden")
    copies = Copies(tmp_path / "runs")
    assert copies.now() == {"runs/a": first}
    (tmp_path / "runs/a").rename(tmp_path / "runs/a.old")
    second = written(tmp_path / "runs/a", points=3).read_bytes()
    assert not copies.mirror.update()  # another run under this name
    assert copies.now() == {"runs/a": second, "runs/a.old": first}
    shutil.rmtree(tmp_path / "runs/a.old")
    assert not copies.mirror.update()
    assert copies.now() == {"runs/a": second}


def test_names_begin_where_all_folders_are(tmp_path: Path) -> None:
    for name in ("runs/a", "runs/b/c", "other/d"):
        written(tmp_path / name)
    runs, other = tmp_path / "runs", tmp_path / "other"
    assert [*Copies(runs / "a").now()] == ["runs/a"]
    assert [*Copies(runs / "a", runs / "b").now()] == ["runs/a", "runs/b/c"]
    shutil.rmtree(runs / "copies")
    names = [*Copies(runs, other).now()]
    assert names == [f"{tmp_path.name}/{name}" for name in ("other/d", "runs/a", "runs/b/c")]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [(8, b"\xff" * 9), (0, b"\xff" * 8), (0, bytes(40))],
    ids=["payload", "length", "zeros"],
)
def test_damage_is_told_once_and_what_comes_before_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int, wrong: bytes
) -> None:
    path = written(tmp_path / "runs/a")
    other = written(tmp_path / "runs/b").read_bytes()
    good, size = path.read_bytes(), ends(path)[12]
    path.write_bytes(good[: size + at] + wrong + good[size + at + len(wrong) :])
    copies = Copies(tmp_path / "runs")
    assert copies.now() == copies.now() == {"runs/a": good[:size], "runs/b": other}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: damaged at byte {size}: ")
    assert line.endswith(". Shown is what comes before.")
    add_points(path.parent, range(99, 100), after=size)  # as a resumed run does
    assert copies.now()["runs/a"] == path.read_bytes()


def test_a_file_that_cannot_be_read_is_told_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = written(tmp_path / "runs/secret")
    written(tmp_path / "runs/a")
    copies = Copies(tmp_path / "runs")
    opened = Path.open

    def refusing(path: Path, *words: Any, **options: Any) -> Any:  # root may read everything
        if path == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *words, **options)

    monkeypatch.setattr(Path, "open", refusing)
    assert [*copies.now()] == [*copies.now()] == ["runs/a"]
    assert capsys.readouterr().out == f"{secret}: Permission denied. Not shown.\n"


def test_visualdl_is_stopped_while_a_copy_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "runs/a")
    mirror = Mirror([tmp_path / "runs"], tmp_path / "copies")
    server = subprocess.Popen(["sleep", "100"])
    state = psutil.Process(server.pid).status
    seen = []
    whole_records = board.whole_records

    def records(file: Any) -> Iterator[bytes]:
        seen.append(state())
        yield from whole_records(file)

    monkeypatch.setattr(board, "whole_records", records)
    try:
        for points in (range(20, 21), range(21, 22)):
            add_points(path.parent, points)
            assert mirror.update(server)
            assert state() != "stopped"
            assert mirror.update(server)  # there is nothing new
    finally:
        server.kill()
        server.wait()
    assert seen == ["stopped", "stopped"]
    monkeypatch.undo()
    add_points(path.parent, range(22, 23))
    assert mirror.update(server)  # it has ended, which `_check` reports


# --- errors ----------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["board", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m expbase board: error: ")
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_shown_or_bound_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    empty, run = tmp_path / "empty", tmp_path / "run"
    empty.mkdir()
    file = written(run)
    assert "no: no such directory; expected" in refused(capsys, str(tmp_path / "no"))
    assert f"{FILE_NAME}: is a file; expected" in refused(capsys, str(file))
    assert f"no runs with VisualDL records below {empty}." in refused(capsys, str(empty))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = refused(capsys, str(run), "--port", port)
        assert f"--port: {port} is in use; expected a free one" in error
    assert "expected an address of this machine, and a port from 0 to 65535" in refused(
        capsys, str(run), "--port", "65536"
    )
    for host in ("203.0.113.1", "a..b"):
        error = refused(capsys, str(run), "--host", host)
        assert f"--host {host} --port 0: cannot be bound: " in error
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_visualdl_that_ends_by_itself_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "run")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2\necho no such thing >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    error = refused(capsys, str(tmp_path / "run"))
    assert error.endswith("VisualDL ended with exit code 3: no such thing\n")


def test_a_free_port_is_found_when_none_is_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert free_port("127.0.0.1", None) not in (0, taken.getsockname()[1])


def test_the_address_is_one_that_a_browser_takes() -> None:
    assert next(addresses("::1", 80)) == "http://[::1]:80/app/scalar (Ctrl-C ends it)"
    assert "ssh -N -L 80:127.0.0.1:80 " in [*addresses("127.0.0.1", 80)][1]
    here, others = addresses("0.0.0.0", 80)
    assert here == "http://127.0.0.1:80/app/scalar (Ctrl-C ends it)"
    assert others == f"from another machine: http://{socket.gethostname()}:80/app/scalar"
