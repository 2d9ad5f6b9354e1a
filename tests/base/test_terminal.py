"""What is said on a terminal that may be gone, or may lack the characters."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import forks
import pytest
from tiny import PYTHONPATH, ledger, wait_until

from expbase.__main__ import main
from expbase.base.terminal import Lasting, lasting, say, shown


def gone_terminal() -> TextIO:
    reader, writer = pty.openpty()
    stream = open(writer, "w", encoding="utf-8")
    os.close(reader)
    return stream


def pipe_without_a_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def closed_file() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("lost", [gone_terminal, pipe_without_a_reader, closed_file, lambda: None])
def test_what_nobody_can_read_is_no_error(
    monkeypatch: pytest.MonkeyPatch, lost: Callable[[], TextIO | None]
) -> None:
    stream = lost()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    say("said")
    with lasting():
        print("printed by the user")
        print("complained by the user", file=sys.stderr, flush=True)
    assert sys.stdout is sys.stderr is stream
    if stream is not None and not stream.closed:
        stream.close()  # writes what waits in it, as python does at its end


def test_a_full_disk_does_not_lead_a_stream_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be room again."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("said")
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what waits in it


def test_a_stream_that_the_user_puts_in_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that writes to a file, too."""
    theirs = io.StringIO()
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with lasting():
        sys.stdout = theirs
    assert sys.stdout is theirs


def test_what_lasts_is_otherwise_the_stream() -> None:
    with open(os.devnull, "w", encoding="latin-1", errors="replace") as stream:
        lasts = Lasting(stream)
        assert (lasts.encoding, lasts.errors, lasts.name) == ("latin-1", "replace", os.devnull)
        assert (lasts.fileno(), lasts.isatty()) == (stream.fileno(), False)
        assert lasts.buffer is stream.buffer
        assert lasts.write("…") == 1
        lasts.close()
        assert not stream.closed


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "实验 é → …"),
        ("latin-1", r"\u5b9e\u9a8c é -> ..."),
        ("ascii", r"\u5b9e\u9a8c \xe9 -> ..."),
    ],
)
def test_characters_that_a_stream_lacks_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str
) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding)
    monkeypatch.setattr(sys, "stderr", stream)
    say("实验 é → …")
    assert written.getvalue().decode(encoding) == f"{text}\n"
    assert shown("实验 é → …", stream) == text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_tool_shows_names_that_the_terminal_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    run = tmp_path / "实验"
    run.mkdir()
    (run / "config.yaml").write_text("name: 名\n", encoding="utf-8")
    configs = ({"name": name * 80} for name in ("字", "名"))
    starts = ({"event": "start", "time": 0, "iteration": 0, "config": one} for one in configs)
    (run / "ledger.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in starts))
    for words in (["ls", tmp_path, "--columns", "run", "name"], ["show", run], ["--help"]):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        with contextlib.suppress(SystemExit):
            assert main([*map(str, words)]) == 0
        sys.stdout.flush()
        text = written.getvalue().decode(encoding)
        assert words == ["--help"] or r"\u5b9e\u9a8c" in text
        if words[0] == "ls":  # columns stand below each other
            head, row = text.splitlines()
            assert head.index("name") == row.index(r"\u540d")
            assert row.endswith("...")


SCRIPT = """
import time
from tiny import Tiny
from expbase import main

class Printing(Tiny):
    def train_batch(self):
        super().train_batch()
        print("printed by the user")
        time.sleep(0.01)
        gone = self.output_dir / "gone"
        if self.iteration == 5:
            while not gone.exists():
                time.sleep(0.01)
        if self.iteration == 8 and gone.read_text() == "fail":
            gone.write_text("failed once")
            raise ArithmeticError("the first start")
    def valid(self):
        print("validated")
        return super().valid()

if __name__ == "__main__":
    main(Printing)
"""


@pytest.mark.parametrize("how", ["fail", pytest.param("kill", marks=pytest.mark.long)])
def test_a_run_whose_terminal_is_gone_goes_on_to_its_end(tmp_path: Path, how: str) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    reader, writer = pty.openpty()
    most = {"fail": 12, "kill": 10**6}[how]
    words = [f"training.max_iteration={most}", "training.log_interval=1", "--restarts=1"]
    with forks.Popen(
        [sys.executable, str(script), "--output", str(run), "--device=cpu", *words],
        stdin=writer, stdout=writer, stderr=writer,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore", "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(writer)
        wait_until(lambda: read(reader) and (run / "metrics.jsonl").exists(), process)
        os.close(reader)
        (run / "gone").write_text(how)
        if how == "kill":
            wait_until(lambda: len(ledger(run)) > 1, process)
            process.send_signal(signal.SIGTERM)
        code = process.wait(forks.LONG_SECONDS)
    assert code == {"fail": 0, "kill": 143}[how]
    reasons = [event.get("reason") for event in ledger(run) if event["event"] == "end"]
    failure = "ArithmeticError('the first start')"
    assert reasons == {"fail": [failure, "finished"], "kill": ["SIGTERM"]}[how]


def read(terminal: int) -> bytes:
    return os.read(terminal, 1 << 16) if select.select([terminal], [], [], 0)[0] else b""
