"""The README says only what is true: its script, its table, its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny import run_script

from expbase import ExperimentBase, default_argument_parser, get_default_training_config
from expbase.__main__ import main as tools

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_script_of_the_readme_trains_and_continues(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks("python")[0])
    assert len(script.read_text().splitlines()) <= 36
    words = ["--output", str(tmp_path / "run"), "training.save_interval=100"]
    for end in ("150", "300"):
        result = run_script(script, *words, f"training.max_iteration={end}")
        assert result.returncode == 0, result.stderr
    assert "CONTINUING the run in" in result.stderr
    assert "--fresh starts over and keeps the old run" in result.stderr
    assert float(re.findall(r"valid/error=(\S+)", result.stderr)[-1]) < 0.1


def test_digits_reaches_what_the_readme_promises(tmp_path: Path) -> None:
    command = next(block for block in blocks("bash") if "digits" in block).split("&& ")[1].split()
    assert command[0] == "python"
    command = [sys.executable, *command[1:-1], str(tmp_path / "run")]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    promised = next(block for block in blocks("text") if "FINISHED: epoch 18" in block)
    lines = [line.split(" ", 1)[1] for line in result.stderr.splitlines()[-7:]]
    shown = "\n".join(lines).replace(str(tmp_path / "run"), "runs/digits")
    assert re.sub(r"\d[\d.]*", "0", shown) == re.sub(r"\d[\d.]*", "0", promised.strip())
    assert float(re.findall(r"accuracy=(\S+)", shown)[0]) > 0.96
    assert "best        accuracy=0.9" in shown
    assert len((tmp_path / "run" / "test.jsonl").read_text().splitlines()) == 360


def test_a_metric_is_replaced_in_five_lines_and_right_over_ranks(tmp_path: Path) -> None:
    script = ROOT / "experiments/digits/macro_f1.py"
    body = script.read_text().split("class MacroF1")[1].split("\n\n")[0].splitlines()
    assert len(body) <= 5
    words = ["--device", "cpu", "training.max_iteration=40", "training.valid_interval=40"]
    printed = []
    for nprocs in ("1", "2"):
        run = ["--output", str(tmp_path / "run"), "--nprocs", nprocs]
        if nprocs == "1":
            assert run_script(script, *run, *words).returncode == 0
        result = run_script(script, *run, "--evaluate", "last")
        assert result.returncode == 0, result.stderr
        printed.append(json.loads(result.stdout.splitlines()[-1]))
    assert printed[0] == printed[1]
    assert 0.2 < printed[0]["macro_f1"] < 1


def test_the_accumulation_of_the_readme_trains(tmp_path: Path) -> None:
    line, accumulating = blocks("python")[0], blocks("python")[1]
    script = tmp_path / "train.py"
    script.write_text(
        line.split("if __name__")[0] + accumulating + "\nif __name__ == '__main__':\n"
        "    main(Accumulating)\n"
    )
    words = ["training.accumulation_steps=2", "training.max_iteration=200"]
    result = run_script(script, "--output", str(tmp_path / "run"), *words)
    assert result.returncode == 0, result.stderr
    assert "2 batches of 20 samples, 40 together" in result.stderr
    assert float(re.findall(r"valid/error=(\S+)", result.stderr)[-1]) < 0.5


def test_a_run_is_looked_at_and_drawn_as_the_readme_says(tmp_path: Path) -> None:
    line = next(block for block in blocks("python") if "class Line" in block)
    drawing = next(block for block in blocks("python") if "def draw" in block)
    imported, method = drawing.split("\n\n\n")
    body, main = line.split("\n\n\nif __name__")
    script = f"{imported}\n{body}\n\n{textwrap.indent(method, '    ')}\n\nif __name__{main}"
    (tmp_path / "train.py").write_text(script)
    settings = ["training.max_iteration=500", "training.valid_interval=500", "--device=cpu"]
    run_in(tmp_path, "train.py", "--output", "runs/line", *settings)
    look = next(block for block in blocks("bash") if "--evaluate last" in block).splitlines()
    for command in look:
        result = run_in(tmp_path, *shlex.split(command)[1:])
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1])["iteration"] == 500
    from visualdl import LogReader

    tags = LogReader(file_path=str(tmp_path / "runs/line/vdlrecords.run.log")).get_tags()
    assert (tags["image"], tags["histogram"]) == (["line"], ["line/values"])


def test_the_table_of_keys_holds_the_defaults() -> None:
    defaults = get_default_training_config()
    table = README.split("| `training.` key")[1]
    rows = re.findall(r"^\| ([a-z_, ]+) \| (.+?) \|", table, re.MULTILINE)
    assert len(rows) >= 7
    for names, values in rows:
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            assert str(defaults[name]) == value.strip('"'), name


def test_every_method_that_the_readme_names_exists() -> None:
    table = README.split("## What to implement")[1].split("## ")[0]
    names = re.findall(r"`([a-z_]+)`", table) + re.findall(r"`([a-z_ ]+)`", table)
    for name in {word for group in names for word in group.split()} - {"setup_"}:
        known = hasattr(ExperimentBase, name) or name in {"train_loader", "self"}
        assert known or name in {"state_dict", "set_state_dict", "load_state_dict"}, name


def test_every_test_that_the_readme_names_exists() -> None:
    named = re.findall(r"`(test_[a-z]+\.py)(?:::(test_\w+))?`", README)
    assert len(named) > 10
    for file, function in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text if function else text, (file, function)


def test_every_option_that_the_readme_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps = default_argument_parser().format_help()
    for tool in ("verify", "ls", "plot", "show", "replay", "run"):
        with pytest.raises(SystemExit):
            tools([tool, "--help"])
        helps += capsys.readouterr().out
    for option in set(re.findall(r"(?<![\w-])--[a-z_]+", README)) - {
        "--logdir",
        "--disable",  # -telemetry, of visualdl
        "--nproc_per_node",
    }:
        assert option in helps, option


def test_the_commands_that_look_at_runs_work_as_the_readme_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = next(block for block in blocks("python") if "class Line" in block)
    failing = line.replace("self.log(loss=loss)", "assert self.iteration < 30, 'too far'")
    settings = ["training.max_iteration=40", "--device=cpu"]
    for name, script in (("line", failing), ("other", line)):
        (tmp_path / "train.py").write_text(script)
        run_in(tmp_path, "train.py", "--output", f"runs/{name}", *settings)
    (tmp_path / "train.py").write_text(failing)
    smoke, many, wrong = (
        next(block for block in blocks("bash") if word in block).splitlines()
        for word in ("--smoke", "expbase ls", "expbase replay")
    )
    assert run_in(tmp_path, *shlex.split(smoke[0])[1:]).returncode == 0
    for command in [*many, wrong[0]]:
        if "board" not in command:  # which goes on: tests/test_board.py has it
            assert tools(shlex.split(command.removeprefix("python -m expbase "))) == 0, command
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert not (tmp_path / "runs/smoke").exists()


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=False,
    )  # fmt: skip
