"""The pictures of the docs show what there is: the recording, and the two terminals.

What digits says in them, and the columns of ls: test_readme.py, which runs digits. That their
lines of the log are some of today: test_docs.py.
"""

from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import docs_pictures as pictures
import pyte
import pytest
import screens
from pages import DOCS, blocks
from screens import SVG, Frame, Row, texts

from expbase.record.metrics import words
from expbase.record.progress_bar import progress_bar

FRAMES = [
    Frame(0.0, [Row("$ a")]),
    Frame(1.0, [Row("$ a"), Row("1/2")]),
    Frame(2.0, [Row("$ a"), Row("2/2", "a note")]),
]


def notes(path: Path) -> list[str]:
    groups = ET.parse(path).getroot().findall(f"{SVG}g")
    shown = [group for group in groups if group.get("visibility") != "hidden"]
    return [note.text or "" for group in shown for note in group.findall(f"{SVG}text[@class='n']")]


# --- the recording ---------------------------------------------------------------------------


PROMISE = DOCS / "promise.svg"


def test_the_recording_ends_with_the_whole_story() -> None:
    rows = texts(PROMISE)
    assert tuple(row[2:] for row in rows if row.startswith("$ ")) == pictures.COMMANDS
    again = rows.index(f"$ {pictures.COMMANDS[1]}", 1)
    assert re.match(r"train 3\d\d/600 ", rows[again - 2])
    assert rows[again - 1] == "Killed"  # below the bar, which is as wide as the terminal
    assert sum("CONTINUING the run in a from step-00000300 " in row for row in rows) == 1
    assert sum("FINISHED: epoch 18, step-00000600 in " in row for row in rows) == 2
    assert notes(PROMISE)[0].startswith("← kill -9 ")
    assert [note[2:] for note in notes(PROMISE)[1:]] == [*pictures.NOTES.values()]


def test_the_digests_of_the_recording_are_equal() -> None:
    found = [row.split() for row in texts(PROMISE) if re.match(r"[0-9a-f]{40} ", row)]
    files = ("model.safetensors", "optimizer.safetensors")
    assert [path for _, path in found] == [
        f"{run}/checkpoints/step-00000600/{file}" for run in "ab" for file in files
    ]
    assert sorted(Counter(digest for digest, _ in found).values()) == [2, 2]


def test_the_recording_is_what_the_script_makes_of_a_screen() -> None:
    rows = texts(PROMISE)
    killed = notes(PROMISE)[0][2:]
    shown = pictures.story(rows, killed)
    assert [row.text for row in shown] == rows
    assert [row.note for row in shown if row.note] == notes(PROMISE)


def test_the_recording_needs_nothing_but_itself_and_stands_still_where_that_is_wanted() -> None:
    svg = PROMISE.read_text(encoding="utf-8")
    assert svg.startswith("<svg xmlns=")
    assert len(svg.encode()) < 60_000
    assert not re.search(r"<script|href|url\(|@font-face|@import", svg)
    assert screens._STYLE in svg
    assert "@media (prefers-reduced-motion:reduce)" in svg


# --- what draws ------------------------------------------------------------------------------


def test_a_recording_begins_with_its_last_frame_and_ends_with_it() -> None:
    made = screens.moving(FRAMES, columns=20)
    assert f".m{{animation:{2 + screens.HOLD_SECONDS:.2f}s step-end -2.00s 2}}" in made
    (shift,) = re.findall(r"\.m\{animation:(\S+)s step-end -(\S+)s 2\}", PROMISE.read_text())
    assert float(shift[0]) - float(shift[1]) == pytest.approx(screens.HOLD_SECONDS)


def test_a_row_is_visible_from_when_it_came_to_when_it_went(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text(screens.moving(FRAMES, columns=20), encoding="utf-8")
    assert texts(path) == ["$ a", "2/2"]
    assert texts(path, everything=True) == ["$ a", "1/2", "2/2"]
    assert notes(path) == ["a note"]
    steps = re.findall(r"@keyframes f\d+\{(.*)\}", path.read_text(encoding="utf-8"))
    assert steps == [
        "0.00%{visibility:visible}",
        "0%{visibility:hidden}11.11%{visibility:visible}22.22%{visibility:hidden}",
        "0%{visibility:hidden}22.22%{visibility:visible}",
    ]


def test_what_is_left_out_is_one_mark_for_each_command() -> None:
    first, again, *_ = pictures.COMMANDS
    screen = [
        f"$ {first}",
        "card",
        "more",
        "1 [300] saved x",
        "other",
        "train 3/6Killed",
        f"$ {again}",
    ]
    assert pictures.story(screen, "kill -9 7") == [
        Row(f"$ {first}"),
        Row("⋮"),
        Row("1 [300] saved x"),
        Row("train 3/6Killed", "← kill -9 7"),
        Row(f"$ {again}", "← the same command"),
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shape(bar: str) -> str:
    """A progress bar without its numbers, and how full it is."""
    return re.sub(r"[━╸╺]+", "━", re.sub(r"\d[\d.:]*|-:--:--", "0", bar))


def test_the_progress_bars_of_the_pages_are_like_the_one_of_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = [row for path in (PROMISE, DOCS / "live.svg") for row in texts(path)]
    shown += [line for text in blocks("looking", "text") for line in text.splitlines()]
    bars = [line for line in shown if line.startswith("train ")]
    assert len(bars) == 3

    drawn, screen = _Terminal(), pyte.Screen(pictures.COLUMNS, 3)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(pictures.COLUMNS))
    monkeypatch.setattr(sys, "stderr", drawn)
    with progress_bar(400, 600) as show:
        numbers = {"train/loss": 0.5432109, "train/lr": 0.002, "speed/steps_per_second": 319.0}
        show(completed=520, description=words(numbers))
        pyte.Stream(screen).feed(drawn.getvalue())
    today = next(line for line in screen.display if line.startswith("train "))
    assert {shape(bar)[:50] for bar in bars} == {shape(today)[:50]}


# --- stills ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["live", "ls"])
def test_the_pictures_of_terminals_fit_their_frame(name: str) -> None:
    path = DOCS / f"{name}.svg"
    columns = pictures.TABLE_COLUMNS if name == "ls" else pictures.COLUMNS
    assert all(len(row) <= columns for row in texts(path))
    assert len(texts(path)) > 7
