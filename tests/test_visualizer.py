"""VisualDL made safe: one file, opened late, appended to, closed twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expbase.visualizer import FILE_NAME, Visualizer


def curve(directory: Path, tag: str) -> dict[int, float]:
    from visualdl import LogReader

    records = LogReader(file_path=str(directory / FILE_NAME)).get_data("scalar", tag)
    return {record.id: record.value for record in records}


def test_scalars_are_read_back_from_one_file(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    assert list(tmp_path.iterdir()) == []  # it is opened at its first use
    visualizer.add_scalar("train/loss", 0.5, step=10)
    visualizer.add_scalar("train/loss", 0.25, step=20)
    visualizer.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert curve(tmp_path, "train/loss") == {10: 0.5, 20: 0.25}


def test_a_second_one_goes_on_in_the_same_file_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        visualizer = Visualizer(tmp_path)
        visualizer.add_scalar("loss", 0.5 * step, step)
        visualizer.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert curve(tmp_path, "loss") == {1: 0.5, 2: 1.0}
    assert capfd.readouterr().out == ""


def test_a_curve_is_cut_back_to_a_size_and_goes_on_as_one_line(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    assert visualizer.size() == 0
    visualizer.add_scalar("loss", 1.0, 1)
    size = visualizer.size()
    assert size == (tmp_path / FILE_NAME).stat().st_size > 0
    visualizer.add_scalar("loss", 7.0, 2)
    visualizer.cut(size)
    assert visualizer.size() == size
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"a torn record")
    visualizer.cut(size)
    visualizer.cut(size + 1000)  # nothing to take away
    visualizer.add_scalar("loss", 2.0, 2)
    visualizer.close()
    assert curve(tmp_path, "loss") == {1: 1.0, 2: 2.0}


def test_a_later_chdir_does_not_divert_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    visualizer = Visualizer("run")
    os.chdir(elsewhere)
    visualizer.add_scalar("loss", 1.0, 1)
    os.chdir(tmp_path)
    visualizer.add_scalar("loss", 2.0, 2)
    visualizer.close()
    assert curve(tmp_path / "run", "loss") == {1: 1.0, 2: 2.0}
    assert list(elsewhere.iterdir()) == []


def test_a_percent_sign_in_a_tag_becomes_a_line(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    visualizer.add_scalar("valid/top_5%", 1.0, 1)
    visualizer.close()
    assert curve(tmp_path, "valid/top_5_") == {1: 1.0}


def test_closing_twice_and_closing_what_was_never_used_are_legal(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    visualizer.close()
    visualizer.add_scalar("loss", 1.0, 1)
    visualizer.close()
    visualizer.close()
    assert curve(tmp_path, "loss") == {1: 1.0}


def test_without_a_directory_nothing_is_written_and_nothing_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom expbase.visualizer import Visualizer\nv = Visualizer(None)\n"
        "v.add_scalar('loss', 1.0, 1)\nv.cut(v.size())\nassert v.writer is None\nv.close()\n"
        "assert 'visualdl' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []
