"""`reproduce` of a run that somebody sends starts nothing but code of the work tree."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import GIT, commit, git, new_repository
from tiny import PYTHONPATH

from expbase.__main__ import main
from expbase.checkpoint import layout, storage
from expbase.config import ConfigError
from expbase.tools import command_checks, remake_part
from expbase.tools.run_parts import History, Stretch

START: dict[str, Any] = {
    "event": "start", "time": 1.0, "iteration": 0, "ranks": 1, "experiment": "Tiny",
    "command": ["train.py", "--output", "pack/a"], "script": 0, "directory": "",
    "sources": {}, "environment": {}, "config": {}, "resumed": None,
}  # fmt: skip
EVIL = "open('harm', 'w')\n"
Capture = pytest.CaptureFixture[str]
Edit = Callable[[dict[str, Any]], object]


def command(*words: str, script: int | None = None, directory: str = "") -> Edit:
    """Makes words the command of a start; its script is the first one that ends in .py."""
    number = next((n for n, word in enumerate(words) if word.endswith(".py")), 0)
    place = number if script is None else script
    return lambda start: start.update(command=[*words], script=place, directory=directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which somebody has put a run that was sent, with files beside it."""
    top = new_repository(tmp_path_factory.mktemp("sent") / "top")
    (top / "train.py").write_text("raise SystemExit(5)\n")
    (top / "package").mkdir()
    (top / "package/train.py").write_text("raise SystemExit(5)\n")
    (top / "plan.yaml").touch()
    commit(top, "one")
    run = top / "pack/a"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"iteration": 1, "train/loss": 0.5}\n')
    for name in ("pack/evil.py", "pack/a/evil.py", "pack/package.py", "../evil.py"):
        (top / name).write_text(EVIL)
    (top / "pack/evil.yaml").touch()
    (top / "link.py").symlink_to("pack/a/evil.py")
    return top


@pytest.fixture
def top(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That repository; it is the working directory."""
    for name, value in {**GIT, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(made)
    return made


def made_again(top: Path, edit: Edit, capfd: Capture, *words: str) -> tuple[int, str]:
    """The exit code, and what is said, of `reproduce` with a record that somebody has edited."""
    start = json.loads(json.dumps(START)) | {"git": {"commit": git(top, "rev-parse", "HEAD")}}
    edit(start)
    (top / "pack/a/ledger.jsonl").write_text(f"{json.dumps(start)}\n")
    try:
        code = main(["reproduce", "pack/a", "--to", "1", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capfd.readouterr()
    assert not (top / "harm").exists()
    return code, out + err


LAUNCH = ("-m", "paddle.distributed.launch")
REFUSED: dict[str, Edit] = {
    "code in the command": command("-c", "open('harm', 'w')", script=1),
    "code before the script": command("-c", "open('harm', 'w')", "train.py", script=0),
    "no script": command("-", script=0),
    "a prompt": command("-i", "train.py"),
    "other bytes of the modules": command("-X", "pycache_prefix=pack/a", "train.py"),
    "a module of a warning": command("-W", "error::evil.Evil", "train.py"),
    "a script in the run": command("pack/a/evil.py"),
    "a script beside the run": command("pack/evil.py"),
    "a link to the run": command("link.py"),
    "a script elsewhere": command("../evil.py"),
    "another program": command(os.path.abspath(json.__file__)),
    "a module of Python": command("-m", "pip", "install", "evil", script=1),
    "a module beside the run": command("-m", "package", script=1, directory="pack"),
    "a module of the tools": command("-m", "expbase.tools.new", "harm", script=1),
    "a file for run": command("-m", "expbase", "run", "pack/evil.yaml", script=1),
    "a folder elsewhere": command("evil.py", directory=".."),
    "other machines": command(*LAUNCH, "--master", "evil.example:80", "train.py"),
    "two machines": command(*LAUNCH, "--nnodes=2", "train.py"),
    "servers": command(*LAUNCH, "--servers", "evil.example:80", "train.py"),
    "a script of the launcher": command(*LAUNCH, "pack/evil.py"),
    "no such place": command("train.py", script=7),
    "the last place": command("train.py", script=-1),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_code_of_the_work_tree_is_not_started(kind: str, top: Path) -> None:
    start = dict(START)
    REFUSED[kind](start)
    places = command_checks.Places(top / start["directory"], top, top, top / "pack/a")

    def check() -> None:
        command_checks.check(start)
        command_checks.check_place(start, start["command"], places)

    with pytest.raises(ConfigError, match=r" is not started: .* what you trust, start by hand\.$"):
        check()


@pytest.mark.parametrize("words", [["--here"], []])
def test_nothing_of_it_has_run_when_it_is_refused(
    words: list[str], top: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    real = subprocess.Popen.__init__

    def begin(self: Any, words: Any, *args: Any, **options: Any) -> None:
        assert words[0] == "git"
        real(self, words, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", begin)
    for kind in ("code in the command", "a script in the run", "a link to the run"):
        code, said = made_again(top, REFUSED[kind], capfd, *words)
        assert code == 78, said
        assert "python -m expbase reproduce: error: `python " in said


BROKEN: dict[str, Edit] = {
    "iteration": lambda start: start.pop("iteration"),
    "environment": lambda start: start.update(environment=["LD_PRELOAD=evil.so"]),
    "command": lambda start: start.update(command=[["-c", "1"]]),
    "script": lambda start: start.update(script="0"),
    "git.commit": lambda start: start.update(git={"commit": "--force"}),
    "git.state": lambda start: start["git"].update(state="../../../evil"),
    "config": lambda start: start.update(config=None),
}


def test_a_record_that_lacks_something_is_told_with_its_name(top: Path, capfd: Capture) -> None:
    for name, edit in BROKEN.items():
        code, said = made_again(top, edit, capfd)
        assert code == 78
        assert said.startswith("python -m expbase reproduce: error: pack/a/ledger.jsonl: start 1: ")
        assert f" for {name!r}, so it cannot be made again; expected the record that a run" in said


def test_one_line_says_what_will_run_and_of_which_code(
    top: Path, forked: None, capfd: Capture
) -> None:
    def changed(start: dict[str, Any]) -> None:
        diff = (
            "--- a/train.py\n+++ b/train.py\n@@ -1 +1,2 @@\n-raise SystemExit(5)\n+import os, sys\n"
        )
        (top / "pack/a/sources").mkdir()
        script = "+sys.exit(6 + sum(name in os.environ for name in ('LD_PRELOAD', 'EVIL')))\n"
        (top / "pack/a/sources/0a1b2c3d4e5f.diff").write_text(diff + script)
        start["git"]["state"] = "0a1b2c3d4e5f"
        start["environment"] = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "evil.so", "EVIL": "1"}

    commit_name = git(top, "rev-parse", "HEAD")[:12]
    code, said = made_again(top, changed, capfd)
    assert code == 1
    line = (
        f"reproduce: runs python train.py, commit {commit_name} with 3 changed lines in 1 files, "
    )
    assert f"{line}of the run's own diff; without its variables LD_PRELOAD, EVIL\n" in said
    assert "NOT REPRODUCED: iterations 1 to 1: the command ended with code 6\n" in said
    code, said = made_again(top, command(*LAUNCH[:1], "package.train", script=1), capfd, "--here")
    assert f"reproduce: runs python -m package.train, the code of now in {top}\n" in said
    assert ": iterations 1 to 1: the command ended with code 5\n" in said


HOSTILE_VARIABLES = {
    "PYTHONPATH": "pack/a", "LD_PRELOAD": "evil.so", "PYTHONSTARTUP": "evil.py", "PATH": "pack",
    "FLAGS_lapack_dir": "pack", "FLAGS_mklml_dir": "pack", "FLAGS_tracer_profile_fname": "harm",
    "NCCL_NET_PLUGIN": "evil", "NCCL_DEBUG_FILE": "harm", "NCCL_COMM_ID": "evil.example:80",
    "CUBLAS_LOGDEST_DBG": "harm", "FLAGS_x": "pack/a", "OMP_NUM_THREADS": ["1"],
}  # fmt: skip


def test_of_variables_those_count_that_a_run_notes_and_that_name_no_file() -> None:
    fine = {
        "OMP_NUM_THREADS": "1",
        "FLAGS_cudnn_deterministic": "True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "allreduce:ring;broadcast:tree",
        "NCCL_SOCKET_IFNAME": "^docker0,lo",
    }
    for name, value in HOSTILE_VARIABLES.items():
        given, left_out = command_checks.variables_of({"environment": {**fine, name: value}})
        assert given == {n: v for n, v in fine.items() if n != name}
        assert left_out == [name]


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("-u", "-W", "ignore", "-X", "faulthandler", "train.py"),
        (*LAUNCH, "--nproc_per_node", "2", "--log_dir=log", "--devices", "0,1", "train.py"),
    ],
)
def test_what_a_run_is_started_with_is_made_again(words: tuple[str, ...], top: Path) -> None:
    start = dict(START)
    command(*words)(start)
    command_checks.check(start)
    places = command_checks.Places(top, top, top, top / "pack/a")
    command_checks.check_place(start, words, places)
    found = command_checks.with_log_dir(words, start["script"], Path("/folder"))
    assert [word.replace("/folder", "log") for word in found] == [*words]


def test_modules_and_files_of_the_work_tree_are_made_again(top: Path) -> None:
    places = command_checks.Places(top, top, top, top / "pack/a")
    for words in (
        ("-m", "package.train"),
        ("-m", "expbase", "run", "--output", "runs", "plan.yaml"),
        ("-m", "expbase.experiments.line.train"),
    ):
        start = dict(START)
        command(*words, script=1)(start)
        command_checks.check(start)
        command_checks.check_place(start, words, places)


def test_of_a_checkpoint_what_its_manifest_names_is_copied(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / layout.FOLDER).mkdir(parents=True)
    (run / "config.yaml").touch()
    path = storage.write(run / layout.FOLDER, 2, {"a": [b"b"]}, {"validations_bytes": 0})
    (path / "endless").symlink_to("/dev/zero")
    history = History(run, [{"iteration": 0}], [2], has_kept_first=False)
    remake_part._begin(history, Stretch(2, 3), tmp_path / "0")
    (copied,) = (tmp_path / "0" / layout.FOLDER).iterdir()
    assert {file.name for file in copied.iterdir()} == {"a", "manifest.json"}
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    with pytest.raises(OSError, match="no regular file"):
        remake_part._begin(history, Stretch(2, 3), tmp_path / "1")


def test_a_manifest_without_what_is_read_of_it_is_a_damaged_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / layout.FOLDER).mkdir(parents=True)
    storage.write(run / layout.FOLDER, 2, {}, {})
    history = History(run, [{"iteration": 0}], [2], has_kept_first=False)
    with pytest.raises(layout.CheckpointError, match=r"manifest\.json: damaged"):
        remake_part._begin(history, Stretch(2, 3), tmp_path / "0")


def test_a_record_of_a_command_is_shown_without_its_options() -> None:
    with pytest.raises(ConfigError, match=r"^`python train.py …` is not started"):
        command_checks.check_place(
            START, START["command"], command_checks.Places(*map(Path, ("/", "/", "/", "/run")))
        )
