"""The board over HTTP, in a browser, and on files that are damaged, cut or being written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TESTS

from expbase.__main__ import main
from expbase.tools.board import RecordFile, Runs, addresses, bound, table_columns, table_rows
from expbase.visualizer import FILE_NAME, Visualizer, record_parser

SECONDS = 20.0


@pytest.fixture(autouse=True)
def _proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "proofs"))


def written(directory: Path, *, rate: float = 0.1, points: int = 20, **hparams: Any) -> Path:
    """A run's record file with one of everything."""
    visualizer = Visualizer(directory)
    visualizer.add_hparams({"optim.lr": rate, "training.seed": 0, **hparams}, ["valid/accuracy"])
    for step in range(points):
        visualizer.add_scalar("train/loss", 1 / (1 + rate * step), step)
        visualizer.add_scalar("valid/accuracy", 0.95 - rate, step)
    visualizer.add_image("sample", np.full([30, 40], 128, "uint8"), 7)
    visualizer.add_histogram("weights", np.linspace(-1, 1, 50), 7)
    visualizer.close()
    return directory / FILE_NAME


def sizes(path: Path) -> list[int]:
    """How long the file is after each of its records."""
    data, ends = path.read_bytes(), [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 8 + int.from_bytes(data[ends[-1] :][:8], "little"))
    return ends


class Pages:
    """What VisualDL's pages would get."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def raw(self, path: str, **query: Any) -> bytes:
        url = f"{self._address}{path}?{urllib.parse.urlencode(query)}"
        with self._opener.open(url, timeout=SECONDS) as answer:
            return answer.read()

    def get(self, path: str, **query: Any) -> Any:
        answer = json.loads(self.raw(f"app/api/{path}", **query))
        assert answer["status"] == 0, answer["msg"]
        return answer["data"]

    def curve(self, run: str, tag: str = "train/loss") -> dict[int, float]:
        points = self.get("scalar/list", run=run, tag=tag)
        assert len({step for _, step, _ in points}) == len(points)
        return {step: value for _, step, value in points}


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.1)


def ended(process: subprocess.Popen[str]) -> int:
    """The exit code of a board that said no more: no damage, and nothing of VisualDL's."""
    out, err = process.communicate(timeout=SECONDS)
    assert out == ""
    assert not [word for word in ("visualdl", "Traceback", "GET") if word in err]
    return process.returncode


# --- over HTTP -------------------------------------------------------------------------------


def test_all_runs_below_a_directory_are_shown_under_their_own_names(tmp_path: Path) -> None:
    from board import board

    written(tmp_path / "deep/lr=0.1")
    written(tmp_path / "lr=0.5", rate=0.5)
    before = {p: (p.read_bytes() if p.is_file() else b"") for p in tmp_path.rglob("*")}
    with board(tmp_path, "--port", "0") as shown:
        pages = Pages(shown.address)
        assert b"<title>VisualDL" in pages.raw("")
        assert pages.get("runs") == ["deep/lr=0.1", "lr=0.5"]
        assert set(pages.get("component_tabs")) == {
            "scalar", "image", "histogram", "hyper_parameters", "static_graph"
        }  # fmt: skip
        tags = pages.get("scalar/tags")
        assert tags["runs"] == ["deep/lr=0.1", "lr=0.5"]
        assert tags["tags"] == [["train/loss", "valid/accuracy"]] * 2
        for run, rate in (("deep/lr=0.1", 0.1), ("lr=0.5", 0.5)):
            expected = {step: pytest.approx(1 / (1 + rate * step)) for step in range(20)}
            assert pages.curve(run) == expected
        assert pages.get("image/list", run="lr=0.5", tag="sample")[0]["step"] == 7
        image = pages.raw("app/api/image/image", run="lr=0.5", tag="sample", index=0)
        assert image.startswith(b"\x89PNG")
        assert len(pages.get("histogram/list", run="lr=0.5", tag="weights")) == 1
        rows = pages.raw("app/api/scalar/data", run="lr=0.5", tag="train/loss", type="csv")
        assert len(rows.splitlines()) == 21
        assert pages.get("hparams/list") == [
            {"name": n, "hparams": {"optim/lr": r}, "metrics": {"valid/accuracy": pytest.approx(a)}}
            for n, r, a in (("deep/lr=0.1", 0.1, 0.85), ("lr=0.5", 0.5, 0.45))
        ]
        table = pages.raw("app/api/hparams/data", type="csv").decode().splitlines()
        assert table[:2] == ["Trial ID,optim/lr,valid/accuracy", "deep/lr=0.1,0.1,0.85"]
        pid = shown.process.pid
        assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""
        shown.process.send_signal(signal.SIGINT)
        assert ended(shown.process) == 0
    port = shown.address.rstrip("/").rpartition(":")[2]
    count, address, tunnel = shown.said
    assert count == f"2 runs below {tmp_path}"
    assert address == f"http://127.0.0.1:{port}/app/scalar (Ctrl-C ends it)"
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel
    assert before == {p: (p.read_bytes() if p.is_file() else b"") for p in tmp_path.rglob("*")}
    bound("127.0.0.1", int(port)).close()


def test_a_run_is_followed_while_it_is_written_byte_by_byte(tmp_path: Path) -> None:
    from board import board

    whole = written(tmp_path / "elsewhere/run").read_bytes()
    (tmp_path / "runs/run").mkdir(parents=True)
    with (
        (tmp_path / "runs/run" / FILE_NAME).open("wb", buffering=0) as file,
        board(tmp_path / "runs", "--port", "0") as shown,
    ):
        pages = Pages(shown.address)
        assert pages.get("runs") == ["run"]  # of zero bytes
        assert pages.get("hparams/list") == []
        for at in range(0, len(whole), 37):
            file.write(whole[at : at + 37])
            if at % 5 == 0:
                pages.get("scalar/tags")
        until(lambda: len(pages.get("image/tags")["runs"]) == 1)
        assert len(pages.curve("run")) == 20
        shutil.copytree(tmp_path / "elsewhere/run", tmp_path / "runs/later")
        until(lambda: pages.get("runs") == ["later", "run"])
        assert len(pages.curve("later")) == 20
        shown.process.send_signal(signal.SIGTERM)
        assert ended(shown.process) == 143


# --- files in every state --------------------------------------------------------------------


class Seen:
    """The runs below a directory, looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        self._now = 0.0
        self.runs = Runs(folder, self.lines.append, lambda: self._now)

    def steps(self) -> dict[str, list[int]]:
        self._now += 10
        names = self.runs.runs()
        losses = self.runs.get_reservoir("scalar")
        return {name: [p.id for p in losses.get_items(name, "train%loss")] for name in names}


@pytest.mark.parametrize("bytes_left", [1, 7, 8, 9, 12, 30])
def test_half_a_record_at_the_end_is_left_out_until_it_is_whole(
    tmp_path: Path, bytes_left: int
) -> None:
    path = written(tmp_path / "run")
    whole, ends = path.read_bytes(), sizes(path)
    path.write_bytes(whole[: ends[12] + bytes_left])
    seen = Seen(tmp_path)
    before = seen.steps()["run"]
    assert before == list(range(len(before)))
    assert 0 < len(before) < 20
    assert seen.steps() == {"run": before}
    path.write_bytes(whole)
    assert seen.steps() == {"run": list(range(20))}
    assert seen.lines == []


def test_a_file_that_is_cut_back_and_goes_on_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    ends = sizes(path)
    seen = Seen(tmp_path)
    assert seen.steps() == {"run": list(range(20))}
    os.truncate(path, ends[12])
    cut = seen.steps()["run"]
    assert 0 < len(cut) < 20
    visualizer = Visualizer(tmp_path / "run")
    for step in range(100, 140):  # longer than it was before
        visualizer.add_scalar("train/loss", 0.5, step)
    visualizer.close()
    assert seen.steps() == {"run": [*cut, *range(100, 140)]}
    visualizer = Visualizer(tmp_path / "run")
    visualizer.cut(ends[12])
    for step in range(200, 260):  # longer than it was before, and nobody looked in between
        visualizer.add_scalar("train/loss", 0.5, step)
    visualizer.close()
    assert seen.steps() == {"run": [*cut, *range(200, 260)]}


def test_a_run_that_is_moved_aside_is_another_run_and_one_that_is_gone_is_gone(
    tmp_path: Path,
) -> None:
    written(tmp_path / "run", points=5)
    written(tmp_path / ".hidden")
    written(tmp_path / "run/checkpoints/step-1")
    seen = Seen(tmp_path)
    assert seen.steps() == {"run": [0, 1, 2, 3, 4]}
    (tmp_path / "run").rename(tmp_path / "run.old")
    written(tmp_path / "run", points=3)
    assert seen.steps() == {"run": [0, 1, 2], "run.old": [0, 1, 2, 3, 4]}
    shutil.rmtree(tmp_path / "run.old")
    assert seen.steps() == {"run": [0, 1, 2]}
    assert list(Seen(tmp_path / "run").steps()) == ["run"]  # a run by itself has a name, too


@pytest.mark.parametrize("place", ["payload", "length", "zeros"])
def test_a_damaged_record_is_said_once_and_what_comes_before_is_shown(
    tmp_path: Path, place: str
) -> None:
    path = written(tmp_path / "run")
    written(tmp_path / "other")
    data, at = bytearray(path.read_bytes()), sizes(path)[12]
    damage = {"payload": (8, b"\xff" * 9), "length": (0, b"\xff" * 8), "zeros": (0, bytes(40))}
    offset, wrong = damage[place]
    data[at + offset : at + offset + len(wrong)] = wrong
    path.write_bytes(data)
    seen = Seen(tmp_path)
    before = seen.steps()
    assert 0 < len(before["run"]) < 20
    assert len(before["other"]) == 20
    assert seen.steps() == before
    with path.open("ab") as file:
        file.write(bytes(100))
    assert seen.steps() == before
    (line,) = seen.lines
    assert line.startswith(f"{path}: damaged at byte {at}: ")
    assert line.endswith(" Shown is what comes before.")
    visualizer = Visualizer(tmp_path / "run")
    visualizer.cut(at)  # as a resumed run does
    visualizer.add_scalar("train/loss", 0.5, 99)
    visualizer.close()
    assert seen.steps()["run"] == [*before["run"], 99]


def test_a_file_that_cannot_be_read_is_said_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "secret")
    written(tmp_path / "run", points=2)
    read_on = RecordFile.read_on

    def refused(file: RecordFile) -> None:  # root may read everything
        if file.name == "secret":
            raise PermissionError(13, "Permission denied", str(file.path))
        read_on(file)

    monkeypatch.setattr(RecordFile, "read_on", refused)
    seen = Seen(tmp_path)
    assert seen.steps() == seen.steps() == {"run": [0, 1]}
    path = tmp_path / "secret" / FILE_NAME
    assert seen.lines == [f"{path}: Permission denied. Not shown."]


# --- the table -------------------------------------------------------------------------------


def table(folder: Path) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    files = [RecordFile(p.parent.name, p, record_parser()) for p in sorted(folder.glob("*/*.log"))]
    for file in files:
        file.read_on()
    rows = table_rows(files)
    json.dumps(rows, allow_nan=False)  # a browser reads no NaN
    return rows, table_columns(rows)


def test_the_table_shows_what_differs_and_mixes_no_types(tmp_path: Path) -> None:
    written(tmp_path / "a", clip=1.0, layers=3, size=1, name="x")
    written(tmp_path / "b", clip=float("inf"), layers=4, size="big")
    rows, columns = table(tmp_path)
    assert [row["hparams"] for row in rows] == [
        {"clip": "1.0", "layers": 3, "size": "1", "name_": "x"},
        {"clip": "inf", "layers": 4, "size": "big", "name_": "–"},
    ]
    assert [(column["name"], column["type"]) for column in columns["hparams"]] == [
        ("clip", "string"), ("layers", "numeric"), ("size", "string"), ("name_", "string")
    ]  # fmt: skip
    assert columns["metrics"] == [{"name": "valid/accuracy", "type": "continuous"}]


def test_the_table_holds_the_newest_of_everything(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path / "run")
    visualizer.add_hparams({"lr": 1.0, "seed": 1}, ["valid/a", "valid/later", "valid/broken"])
    for step in range(1500):  # more than VisualDL keeps
        visualizer.add_scalar("valid/a", step / 10, step)
    visualizer.add_scalar("valid/broken", float("nan"), 1)
    visualizer.add_hparams({"lr": 2.0, "seed": 1}, ["valid/a", "valid/later", "valid/broken"])
    visualizer.close()
    rows, columns = table(tmp_path)
    assert rows == [
        {
            "name": "run",
            "hparams": {"lr": 2.0, "seed": 1},  # of one run everything
            "metrics": {"valid/a": 149.9, "valid/later": None, "valid/broken": None},
        }
    ]
    assert columns["metrics"] == [{"name": "valid/a", "type": "continuous"}]


# --- errors, and what is not done ------------------------------------------------------------


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
    assert "expected 0 to 65535" in refused(capsys, str(run), "--port", "65536")
    for host in ("203.0.113.1", "a..b"):
        error = refused(capsys, str(run), "--host", host)
        assert f"--host {host} --port 0: cannot be bound: " in error
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_free_port_is_found_when_none_is_asked_for() -> None:
    with bound("127.0.0.1", None) as one, bound("127.0.0.1", None) as other:
        assert one.getsockname() != other.getsockname()


def test_the_address_is_one_that_a_browser_takes() -> None:
    assert next(addresses("::1", 80)) == "http://[::1]:80/app/scalar (Ctrl-C ends it)"
    here, others, tunnel = addresses("0.0.0.0", 80)
    assert here == "http://127.0.0.1:80/app/scalar (Ctrl-C ends it)"
    assert others.startswith(f"http://{socket.gethostname()}:80/app/scalar for everybody")
    assert "-L 80:127.0.0.1:80" in tunnel


def test_visualdl_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys\nfrom expbase.__main__ import main\n"
        "try:\n    main(['board', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'visualdl' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "0 ended by Ctrl-C, 143 ended by SIGTERM" in " ".join(result.stdout.split())


# --- in a browser ----------------------------------------------------------------------------


@pytest.fixture
def browser() -> Iterator[Any]:
    if shutil.which("chromium") is None:
        pytest.skip("no chromium on the PATH to look at the board with")
    from board import Browser

    made = Browser()
    yield made
    made.close()


def test_a_browser_shows_curves_images_and_the_table(tmp_path: Path, browser: Any) -> None:
    from board import board

    many = {f"section.a_rather_long_name_{i}": i for i in range(30)}
    written(tmp_path / "slow", **many)
    written(tmp_path / "fast", rate=0.5, **{name: value + 1 for name, value in many.items()})
    with board(tmp_path, "--port", "0") as shown:
        browser.open(f"{shown.address}app/scalar")
        browser.until_words("train", "slow", "fast")
        browser.until_curves(1)
        browser.open(f"{shown.address}app/sample/image")
        browser.until_words("slow", "fast", "Step: 7")
        browser.until("[...document.images].filter(i => i.naturalWidth === 40).length", 2)
        browser.open(f"{shown.address}app/hyper-parameter")
        browser.until_words("Trial ID", "optim/lr", "slow", "fast", "0.5", "0.85", "0.45")
        # Where VisualDL's own page hangs for good when there are many columns.
        browser.click("Parallel Coordinates View")
        browser.until("document.querySelectorAll('svg path.line').length", 2)
        asked = browser.requests()
        assert f"{shown.address}app/api/hparams/list" in asked
        own = (shown.address, "data:", "blob:", "about:blank")
        assert [url for url in asked if not url.startswith(own)] == []
