"""docs/jumped.md: the batch at which a loss jumped is found, looked at and left out, as it says.

All of it is long: the run of the page has 5,000 updates. A short one is made again in any case.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import forks
import pytest
from pages import blocks
from tiny import metrics

from expbase import __main__

SCRIPT, LOOK, BREAK = blocks("jumped", "python")
TRAIN, FIND, CLOSER, LEAVE_OUT = "".join(blocks("jumped", "bash")).splitlines()
FOUND, LOOKED = blocks("jumped", "text")
BAD = "7493"


def changed(*pairs: tuple[str, str]) -> str:
    """The script of the page, with other lines in the places of some."""
    script = SCRIPT
    for old, new in pairs:
        assert script.count(old) == 1
        script = script.replace(old, new)
    return script


def do(command: str, folder: Path, *, code: int = 0, typed: str = "", **variables: str) -> Any:
    """Gives a command of the page in a folder; returns what it has written."""
    words = [sys.executable, *shlex.split(command)[1:]]
    # Paddle reads its flags when it is imported, so that a fork would know nothing of them.
    environment = {**os.environ, **(variables or {"PYTHONWARNINGS": "ignore"})}
    done = forks.run(words, typed, cwd=folder, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.usefixtures("forked")
def test_the_command_of_the_page_shows_each_update_of_a_short_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    do(f"{TRAIN} --device=cpu training.max_iteration=20 training.save_interval=10", tmp_path)
    short = FIND.replace("4000", "10").replace("4020", "20")
    capfd.readouterr()
    assert __main__.main(shlex.split(short)[3:]) == 0
    *updates, result = capfd.readouterr().out.splitlines()
    form = re.compile(r"\[\d+\] loss=\S+ samples \d+,\d+")
    assert len(updates) == 10
    assert [line for line in updates + FOUND.splitlines()[:-1] if not form.fullmatch(line)] == []
    assert result.startswith("reproduced: iterations 11 to 20 of 20, the same bits ")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the page."""
    folder = tmp_path_factory.mktemp("prices")
    (folder / "train.py").write_text(SCRIPT)
    do(f"{TRAIN} --device=cpu", folder)
    return folder


def shape(said: str) -> list[str]:
    """The lines without what depends on the kernels of a CPU."""
    return re.sub(r"=[\d.e+-]+", "=0", said).splitlines()


@pytest.mark.long
def test_the_curve_jumps_where_the_page_says(project: Path) -> None:
    losses = {line["iteration"]: line["train/loss"] for line in metrics(project / "runs/prices")}
    late = {iteration: loss for iteration, loss in losses.items() if iteration > 1000}
    assert [iteration for iteration, loss in late.items() if loss > 1] == [4020]


@pytest.mark.long
def test_one_command_names_the_update_and_the_bad_sample(project: Path) -> None:
    said = do(FIND, project).stdout
    assert len(said.splitlines()) == 21
    assert shape(said)[14:] == shape(FOUND)
    losses = {float(loss): line for line in said.splitlines() for loss in loss_of(line)}
    update, *_, samples = losses[max(losses)].split()
    assert update == "[4017]"
    assert BAD in samples.split(",")
    assert f"y[{BAD}] *= 1000" in SCRIPT


def loss_of(line: str) -> list[str]:
    return re.findall(r" loss=(\S+)", line)


@pytest.mark.long
def test_a_closer_look_is_shown_to_be_harmless_and_another_loss_is_not(project: Path) -> None:
    start, end = SCRIPT.index("    def train_batch"), SCRIPT.index("\n\nif __name__")
    closer = SCRIPT[:start] + textwrap.indent(LOOK, "    ") + SCRIPT[end:]
    (project / "train.py").write_text(closer)
    said = do(CLOSER, project).stdout
    assert [line for line in shape(LOOKED) if line not in shape(said)] == []
    (jump,) = (line for line in said.splitlines() if line.startswith("[4017]"))
    first, second = (float(re.findall(rf"{name}=(\S+)", jump)[0]) for name in ("first", "second"))
    assert second > 1e6 > first
    assert jump.endswith(f",{BAD}")
    assert re.search(r"^new: train/grad_norm at iteration 4020: \d", said, re.M)
    assert "the same by the code of now: iterations 4001 to 4020 of 5000, the same bits" in said
    (project / "train.py").write_text(closer.replace("errors.mean()", "errors.sum()"))
    said = do(CLOSER, project, code=1).stdout
    assert "NOT THE SAME BY THE CODE OF NOW: iterations 4001 to 4020: train/loss at" in said


@pytest.mark.long
def test_a_breakpoint_is_reached_and_the_numbers_stay_the_same(project: Path) -> None:
    line = "        self.backward(loss)\n"
    stop = textwrap.indent(BREAK, " " * 8)
    (project / "train.py").write_text(changed((line, line + stop)))
    done = do(CLOSER, project, typed="p self.iteration\np y\nc\n")
    assert "(Pdb) 4017\n" in done.stderr
    assert re.search(r"\(Pdb\) Tensor\(shape=\[2, 1\].*\n.*\n.*-?2567", done.stderr)
    assert "the same by the code of now: iterations 4001 to 4020 of 5000" in done.stdout


@pytest.mark.long
def test_the_check_of_paddle_names_the_operation_and_changes_nothing(tmp_path: Path) -> None:
    nan = "loss = (self.model(x) - y - 1e30 * (self.iteration == 17)).square().mean()"
    script = changed(("loss = paddle.nn.functional.mse_loss(self.model(x), y)", nan))
    (tmp_path / "train.py").write_text(script)
    short = "training.max_iteration=20 training.save_interval=10"
    do(f"{TRAIN} --device=cpu training.nonfinite=warn {short}", tmp_path)
    find = "python -m expbase reproduce runs/prices --updates --here --from 10 --to"
    assert " the same bits " in do(f"{find} 20", tmp_path).stdout
    done = do(f"{find} 20", tmp_path, code=1, FLAGS_check_nan_inf="1")
    *_, last, result = done.stdout.splitlines()
    assert last.startswith("[16] ")
    assert result.startswith("NOT THE SAME BY THE CODE OF NOW: iterations 11 to 20: the command e")
    assert "environment.FLAGS_check_nan_inf: None → 1" in result
    assert nan in done.stderr
    assert re.search(r"There are NAN or INF .*op=\w+", done.stderr)
    # The default: the run has ended, and its own command fails at the operation.
    do(f"{TRAIN}/ended --device=cpu {short}", tmp_path, code=1)
    done = do(f"{TRAIN}/ended --device=cpu {short}", tmp_path, code=1, FLAGS_check_nan_inf="1")
    assert "CONTINUING the run" in done.stderr
    assert re.search(r"There are NAN or INF .*op=\w+", done.stderr)


@pytest.mark.long
def test_the_batch_is_left_out_in_a_run_that_goes_on_from_before(project: Path) -> None:
    (project / "train.py").write_text(SCRIPT)
    said = do(f"{LEAVE_OUT} --device=cpu", project).stderr
    assert "left out" in said
    assert max(line["train/loss"] for line in metrics(project / "runs/better")) < 1
    ledger = (project / "runs/better/ledger.jsonl").read_text().splitlines()
    assert json.loads(ledger[0])["config"]["training.skip_updates"] == [4017]
