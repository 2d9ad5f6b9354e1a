"""How a run was made, for a person, and the commands that make it again in a fresh clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
import paddle
import pytest
from repository import GIT, commit, new_repository
from tiny import TESTS, Tiny, ledger, make, trained

from expbase.__main__ import main
from expbase.checkpoint import storage
from expbase.record import provenance
from expbase.record.starts_and_ends import Session, flat
from expbase.tools.runs import RunFacts
from expbase.tools.show import lines_about

SCRIPT = """
from tiny import Tiny
from expbase import main


class Experiment(Tiny):
    batch_size = 4


if __name__ == "__main__":
    main(Experiment)
"""
CHANGED = SCRIPT.replace("= 4", "= other.size").replace("from tiny", "import other\nfrom tiny")
START = {
    "event": "start", "time": 1.7e9, "iteration": 0, "ranks": 1, "resumed": None,
    "command": ["train.py", "--output", "runs/a"], "directory": ".", "config": {},
    "git": {"commit": "b2e08ebe439b", "branch": "trunk", "dirty": False, "state": None},
    "packages": {"mine": "1", "numpy": "2.0", "paddlepaddle": "3.3"}, "local_packages": ["mine"],
    "environment": {}, "device": "cpu", "python": "3.11.2",
    "platform": "Linux", "host": "here", "pid": 7,
}  # fmt: skip
END = {"event": "end", "time": 1.7e9 + 90, "iteration": 6, "reason": "finished", "exit_code": 0}
Capture = pytest.CaptureFixture[str]


def run_with(folder: Path, *records: dict[str, Any]) -> Path:
    """The directory of a run that noted these records."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("training: {max_iteration: 6, monitor: accuracy}\n")
    (folder / "ledger.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return folder


def shown(run: Path, capsys: Capture, *words: str) -> str:
    capsys.readouterr()
    assert main(["show", str(run), *words]) == 0
    return capsys.readouterr().out


def refused(run: Path, capsys: Capture, *words: str) -> str:
    capsys.readouterr()
    assert main(["show", str(run), *words]) == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


# --- a run that was made, and made again -------------------------------------------------------


def call(folder: Path, *command: str, **environment: str) -> None:
    variables = {**os.environ, **GIT, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"}
    result = forks.run(command, cwd=folder, env=variables | environment)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, and in it a run: begun with clean code, continued with other code."""
    folder = tmp_path_factory.mktemp("shown") / "repository"
    new_repository(folder)
    script = folder / "deep/train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    commit(folder, "two")
    words = [sys.executable, "train.py", "--output", "runs/a b", "--device", "cpu"]
    words += ["training.save_interval=1", "training.keep_last=0"]
    call(script.parent, *words, "training.max_iteration=2")
    script.write_text(CHANGED)
    (script.parent / "other.py").write_text("size = 5\n")
    call(script.parent, *words, "training.max_iteration=4", FLAGS_benchmark="0")
    return folder


@pytest.fixture
def run(repository: Path) -> Path:
    return repository / "deep/runs/a b"


def test_a_run_and_what_changed_between_its_sessions_is_shown(run: Path, capsys: Capture) -> None:
    first, second = (record for record in ledger(run) if record["event"] == "start")
    body = shown(run, capsys).split("\n", 1)[1]
    plain = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, \d:\d\d:\d\d", "WHEN", body)
    head, *sections = plain.split("\n\n")
    assert head.startswith("state: finished, 4 iterations of 4\n")
    assert head.split("\n")[1] == "checkpoints: 4, the newest step-00000004"
    assert [section.splitlines()[0] for section in sections] == [
        "session 1 of 2: WHEN, iterations 0 to 2",
        "session 2 of 2: WHEN, iterations 2 to 4",
    ]
    commit, state = first["git"]["commit"], second["git"]["state"]
    assert f"git.commit: {commit}\ngit.branch: trunk\ngit.dirty: False\n" in sections[0]
    words = "--device cpu training.save_interval=1 training.keep_last=0 training.max_iteration"
    for section, end in zip(sections, (2, 4), strict=True):
        assert f"command: python train.py --output 'runs/a b' {words}={end}\n" in section
    assert f"\nhost: {first['host']}\ndevice: cpu\n" in sections[0]
    assert f"git.dirty: False → True\ngit.state: {state}\n" in sections[1]
    assert (run / f"sources/{state}.diff").exists()
    assert "resumed: step-00000002\n" in sections[1]
    assert "config.training.max_iteration: 2 → 4\n" in sections[1]
    assert "environment.FLAGS_benchmark: 0\n" in sections[1]
    assert "environment" not in sections[0]
    assert re.findall("packages.*", plain) == [f"packages.paddlepaddle: {paddle.__version__}"]


# --- a checkpoint ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return trained(Tiny, folder / "run", max_iteration=2, seed=7).output_dir


@pytest.fixture
def small(trained_run: Path, tmp_path: Path) -> Path:
    """A run of two updates, to change."""
    return Path(shutil.copytree(trained_run, tmp_path / "run", symlinks=True))


def test_a_copied_checkpoint_has_its_config_and_versions(small: Path, capsys: Capture) -> None:
    checkpoint = small / "checkpoints/step-00000002"
    assert shown(small / "last", capsys) == shown(checkpoint, capsys)  # by its name
    path = checkpoint.rename(small.parent / "elsewhere")
    shutil.rmtree(small)
    lines = shown(path, capsys).splitlines()
    assert lines[:3] == [str(path), "iteration: 2", f"versions: {provenance.versions()}"]
    expected = flat(make(Tiny, small, max_iteration=2, seed=7).config)
    assert lines[3:] == [f"config.{key}: {expected[key]}" for key in sorted(expected)]
    assert "config.training.seed: 7" in lines
    assert str(small.parent) not in (path / "manifest.json").read_text()


def test_a_checkpoint_with_another_kind_of_config_is_damaged_and_resumed(
    small: Path, capsys: Capture
) -> None:
    path = small / "checkpoints/step-00000002"
    manifest = storage.read_manifest(path)
    for config in (None, 3, "x", [1], [["a", 1]]):
        manifest["info"]["config"] = config
        parts = [manifest[part] for part in ("iteration", "files", "info")]
        (path / "manifest.json").write_bytes(storage._manifest_bytes(*parts))
        assert "manifest.json: damaged, or not of expbase" in refused(path, capsys), config
    assert trained(Tiny, small, max_iteration=3, seed=7).iteration == 3


def test_a_checkpoint_without_a_config_and_a_damaged_one_are_shown(
    tmp_path: Path, capsys: Capture
) -> None:
    files = {"model.safetensors": [b"abc"]}
    path = storage.write(tmp_path, 5, files)
    assert shown(path, capsys).splitlines() == [str(path), "iteration: 5", "versions: None"]
    (path / "model.safetensors").write_bytes(b"abd")
    assert "model.safetensors: its content has changed" in refused(path, capsys)


# --- for a person ------------------------------------------------------------------------------


def test_how_sessions_ended_is_shown(tmp_path: Path, capsys: Capture) -> None:
    crashed = {**END, "reason": "ArithmeticError('no')", "exit_code": 1}
    other_rank = {**END, "reason": "rank 1", "exit_code": 1}
    run = run_with(tmp_path / "run", START, crashed, START, START, END, other_rank)
    text = shown(run, capsys)
    assert "ended: ArithmeticError('no'), exit code 1\n" in text
    assert re.search(r"session 2 of 4: .*, from iteration 0, killed: it noted no end\n", text)
    assert re.search(r"session 3 of 4: .*, 0:01:30, iterations 0 to 6\nended: finished, exit", text)
    assert re.search(r"session 4 of 4: failed before it began, .*\nended: rank 1, exit", text)


def test_what_differs_between_sessions_is_shown_and_no_more(
    tmp_path: Path, capsys: Capture
) -> None:
    other = {**START, "packages": {"mine": "1", "new": "3", "numpy": "2.1"}, "ranks": 2}
    other["environment"] = {"NCCL_DEBUG": "INFO"}
    text = shown(run_with(tmp_path / "run", START, END, other, END, other, END), capsys)
    lines = text.splitlines()
    for change in (
        "ranks: 1 → 2", "packages.new: 3", "packages.numpy: 2.0 → 2.1",
        "packages.paddlepaddle: 3.3 → not there", "environment.NCCL_DEBUG: INFO",
    ):  # fmt: skip
        assert lines.count(change) == 1
    assert lines.count("command: python train.py --output runs/a") == 3
    assert text.count("host: here") == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ({"note": "not in a git repository"}, "git.note: not in a git repository\n"),
        ({"commit": "b2e08ebe", "dirty": True, "note": "git refuses: x\n.bin"},
         "git.commit: b2e08ebe\ngit.dirty: True\ngit.note: git refuses: x\\n.bin\n"),
    ],
)  # fmt: skip
def test_what_is_not_known_of_the_code_is_shown(
    tmp_path: Path, capsys: Capture, code: dict[str, Any], expected: str
) -> None:
    run = run_with(tmp_path / "run", {**START, "git": {"state": None, **code}}, END)
    assert expected in shown(run, capsys)


def test_a_run_that_never_began_is_shown(tmp_path: Path, capsys: Capture) -> None:
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    exp.close()
    text = shown(tmp_path / "run", capsys)
    assert "state: new, 0 iterations of 6\n" in text
    assert "checkpoints: none\n" in text


def test_a_run_that_is_running_is_shown(tmp_path: Path) -> None:
    # Its lock tells that to every other process.
    lines = list(lines_about(tmp_path, RunFacts("run", "running", sessions=[Session(START)])))
    assert any(re.match("session 1 of 1: .*, from iteration 0, is running", x) for x in lines)


def test_damaged_lines_are_left_out_and_the_rest_is_shown(tmp_path: Path, capsys: Capture) -> None:
    run = run_with(tmp_path / "run", START, END)
    text = (run / "ledger.jsonl").read_text()
    (run / "ledger.jsonl").write_text('{"event": "start", "ti\n\n' + text + "[1]\n")
    (run / "config.yaml").write_text("a: [")
    text = shown(run, capsys)
    assert "not YAML" in text
    assert "session 1 of 1: " in text


def test_looking_changes_nothing(small: Path, capsys: Capture) -> None:
    files = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in small.rglob("*")}
    small.chmod(0o555)
    try:
        shown(small, capsys)
    finally:
        small.chmod(0o755)
    assert files == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in small.rglob("*")}


def test_a_record_with_something_else_in_it_is_a_line_and_the_rest_is_shown(
    tmp_path: Path, capsys: Capture
) -> None:
    for damage in ({"time": None}, {"time": 1e300}, {"command": [3]}, {"packages": []}):
        damaged = {name: value for name, value in {**START, **damage}.items() if value is not None}
        folder = tmp_path / f"{damage}"
        run = run_with(folder / "run", damaged, END, START, END)
        text = shown(run, capsys)
        assert "session 2 of 2: 2023" in text, damage
        told = text.count("its record in ledger.jsonl is damaged: ")
        assert told == ("packages" not in damage), damage
        assert main(["ls", str(folder)]) == 0, damage
        assert main(["ls", "--json", str(folder)]) == 0, damage


# --- the digest ----------------------------------------------------------------------------------


def test_show_checks_the_files_of_a_run_by_its_digest_or_by_one_that_is_given(
    tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=2)
    text = shown(run, capsys)
    (digest,) = {line[8:] for line in text.splitlines() if line.startswith("digest: ")}
    assert text.count(digest) == 2  # of the run, and of the session in which it has finished
    assert json.loads(listed(run, capsys))["digest"] == digest
    for words in ([], [digest]):
        said = shown(run, capsys, "--digest", *words)
        assert re.fullmatch(rf"digest: {digest}, and each of its \d+ lines is as bound\n", said)
    assert main(["show", str(run), "--digest", other := "0" * 64]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"digest.txt: another one, whose digest is {digest}"
    assert lines[1:] == [f"NOT the files of digest {other}"]
    (run / "metrics.jsonl").write_text("")
    assert main(["show", str(run), "--digest"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "metrics.jsonl train/loss: not here"
    assert lines[-1] == f"NOT the files of digest {digest}"
    text = (run / "digest.txt").read_text()
    (run / "digest.txt").write_text(text.replace("config ", "config\x1b[2J "))  # it clears a screen
    assert main(["show", str(run), "--digest"]) == 1
    assert "config\\x1b[2J: not here" in capsys.readouterr().out
    said = refused(run, capsys, "--digest", digest[:8])
    assert (
        f"--digest: '{digest[:8]}' given; expected the 64 digits that the run has printed" in said
    )
    (run / "digest.txt").unlink()
    assert "run: holds no digest.txt; expected that of a run" in refused(run, capsys, "--digest")
    assert json.loads(listed(run, capsys))["digest"] == ""
    assert "digest: " not in shown(run, capsys).partition("session 1")[0]


def listed(run: Path, capsys: Capture) -> str:
    capsys.readouterr()
    assert main(["ls", str(run), "--json"]) == 0
    return capsys.readouterr().out
