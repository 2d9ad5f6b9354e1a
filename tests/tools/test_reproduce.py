"""`python -m expbase reproduce`: the same bits are told, and so is what is not as it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forks
import pytest
from pages import PAIRS, code_of
from repository import GIT, commit, git, new_repository
from tiny import PYTHONPATH, ledger

from expbase.__main__ import main
from expbase.checkpoint import storage

SCRIPT = """
import nets  # beside it
from pathlib import Path
from tiny import Helped
from expbase import main

class Experiment(Helped):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.update(max_iteration=7, save_interval=2, valid_interval=3, log_interval=1)
        return config

    def setup_model(self):
        import late  # when the checksums of the others are noted
        super().setup_model()

    def train_batch(self):
        super().train_batch()
        self.log(scale=nets.SCALE * float(Path("data/scale.txt").read_text()))

    def on_train_end(self):
        with open("data/ended.txt", "a") as file:
            file.write("x")

if __name__ == "__main__":
    main(Experiment)
"""
SAME = "reproduced: 4 iterations, the same bits (step-00000004, "
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _nobody(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**GIT, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(name, value)


def train(folder: Path, *words: str, code: int = 0, script: Sequence[str] = ("train.py",)) -> Path:
    """Makes a run in a folder, as one types it there; returns its directory."""
    command = [sys.executable, *script, "--device=cpu", "--output=runs/a", *words]
    variables = {"PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore", "FLAGS_benchmark": "0"}
    result = forks.run(command, cwd=folder, env={**os.environ, **GIT, **variables})
    assert result.returncode == code, result.stderr
    return folder / "runs/a"


def new_project(folder: Path) -> Path:
    """A folder with a script, a module beside it, and data."""
    (folder / "data").mkdir(parents=True)
    (folder / "data/scale.txt").write_text("2")
    (folder / "nets.py").write_text("SCALE = 1\n")
    (folder / "late.py").touch()
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without git, and a run of it."""
    folder = new_project(tmp_path_factory.mktemp("projects") / "plain")
    train(folder)
    return folder


@pytest.fixture
def copied(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One to change; it is the working directory."""
    folder = shutil.copytree(project, tmp_path / "copied")
    monkeypatch.chdir(folder)
    return folder


def reproduced(capfd: Capture, *words: str, code: int) -> str:
    """What the tool says."""
    capfd.readouterr()
    try:
        answered = main(["reproduce", *words])
    except SystemExit as end:
        answered = int(end.code or 0)
    out, err = capfd.readouterr()
    assert answered == code, out + err
    return out if code in (0, 1) else err.splitlines()[-1]


def shape(said: str) -> str:
    """What is said, without its numbers."""
    return re.sub(r"\d[\d.e-]*", "0", said).strip()


YES = "reproduced: 0 iterations, the same bits (step-0, 0 logged numbers)"
NO = "NOT REPRODUCED: train/loss at iteration 0 differs: 0 then, 0 now. Not as it was: "
NO += "config.optim.lr: 0 → 0"


def change(run: Path, event: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the first record of an event says."""
    found = ledger(run)
    edit(next(record for record in found if record["event"] == event))
    (run / "ledger.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in found))


def tree(folder: Path) -> dict[Path, Any]:
    """All that there is but what git notes of itself, with contents and times."""
    found = (path for path in folder.rglob("*") if ".git" not in path.parts and path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


# --- what is the same ------------------------------------------------------------------------


def test_a_run_whose_checkout_was_dirty_and_has_changed_since_is_reproduced_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    top = new_repository(tmp_path / "top")
    folder = new_project(top / "deep")
    (top / ".gitignore").write_text("runs\ndata\n__pycache__\n")
    (folder / "nets.py").unlink()
    commit(top, "two")
    (folder / "train.py").write_text(SCRIPT.replace("nets.SCALE", "3 * nets.SCALE"))
    (folder / "nets.py").write_text("SCALE = 4\n")  # git does not know it
    run = train(folder)
    (folder / "train.py").write_text("raise SystemExit('the code of today')\n")
    git(top, "add", "deep/train.py")
    git(top, "commit", "--quiet", "-m", "three")
    moved = run.rename(tmp_path / "moved")
    monkeypatch.chdir(top)
    before = tree(top)
    said = reproduced(capfd, str(moved), "--record", str(tmp_path / "receipt.json"), code=0)
    assert said.startswith(SAME)
    assert "Not as it was" not in said
    assert tree(top) == before
    assert len(git(top, "worktree", "list").splitlines()) == 1
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["result"] == said.strip()
    assert receipt["reproduced"] is True
    assert receipt["git"]["commit"] == git(top, "rev-parse", "HEAD~")
    assert receipt["then"]["numbers"]["train/scale at iteration 2"] == 24
    assert receipt["then"] == receipt["now"]
    assert receipt["now"]["saved"]["model.safetensors"].startswith("sha256 ")
    assert receipt["now"]["facts"]["loaders"] == {
        "self.train_loader": "10 batches",
        "self.valid_loader": "10 samples",
    }
    assert len(receipt["now"]["facts"]["first_batch"]) == 8
    (folder / "nets.py").write_text("SCALE = 5\n")
    said = reproduced(capfd, str(moved), code=1)
    assert said.startswith("NOT REPRODUCED: this is not the code of the run. Not as it was: sou")
    assert "sources.nets.py: " in said


def test_a_run_of_another_commit_needs_a_repository_that_has_it(
    copied: Path, capfd: Capture
) -> None:
    def edit(start: dict[str, Any]) -> None:
        start["git"] = {"commit": "b2e08ebe439b" * 3, "state": None}

    change(copied / "runs/a", "start", edit)
    said = reproduced(capfd, "runs/a", code=78)
    assert f"{copied}: in no git repository; expected one with b2e08ebe439b" in said
    git(copied, "init", "--quiet")
    said = reproduced(capfd, "runs/a", code=78)
    assert f"{copied}: `git worktree add" in said


def test_without_git_the_files_of_now_must_be_the_run_s(copied: Path, capfd: Capture) -> None:
    assert reproduced(capfd, "runs/a", code=0).startswith(SAME)
    assert (copied / "data/ended.txt").read_text() == "x"  # of the run: nothing had ended here
    (copied / "nets.py").write_text("SCALE = 2\n")
    said = reproduced(capfd, "runs/a", "--record", "receipt.json", code=1)
    assert said.startswith("NOT REPRODUCED: this is not the code of the run. Not as it was: sou")
    assert "train.py" not in said
    receipt = json.loads((copied / "receipt.json").read_text())
    assert receipt["reproduced"] is False
    assert next(iter(receipt["not as it was"])) == "sources.nets.py"
    assert receipt["now"]["numbers"] == {}  # nothing was trained


@pytest.mark.parametrize("page", PAIRS["reproduce"])
def test_its_pages_show_what_it_says(page: Path) -> None:
    assert [*map(shape, code_of(page.read_text(), "text"))] == [YES, NO]


@pytest.mark.parametrize("words", [[], ["--restarts", "1"]], ids=["here", "in a rank"])
def test_a_run_of_a_module_is_reproduced_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture, words: list[str]
) -> None:
    folder = new_project(tmp_path / "plain")
    (folder / "package").mkdir()
    for name in ("nets", "late", "train"):
        (folder / f"{name}.py").rename(folder / f"package/{name}.py")
    script = SCRIPT.replace("import nets", "from . import nets").replace("import late", "pass")
    (folder / "package/train.py").write_text(script)
    run = train(folder, *words, script=["-m", "package.train"])
    assert ledger(run)[0]["command"][:2] == ["-m", "package.train"]
    monkeypatch.chdir(folder)
    assert reproduced(capfd, "runs/a", code=0).startswith(SAME)


def test_to_its_end_all_that_was_logged_and_saved_is_compared(copied: Path, capfd: Capture) -> None:
    said = reproduced(capfd, "runs/a", "--iterations", "7", code=0)
    # Loss, scale and learning rate of seven lines; three validations, in two files.
    assert said == "reproduced: 7 iterations, the same bits (step-00000007, 27 logged numbers)\n"
    assert shape(said) == YES
    assert (copied / "data/ended.txt").read_text() == "xx"


def test_an_iteration_without_a_checkpoint_is_compared_by_its_numbers(
    copied: Path, capfd: Capture
) -> None:
    said = reproduced(capfd, "runs/a", "--iterations", "3", code=0)
    assert said.startswith("reproduced: 3 iterations, the same bits (no checkpoint of it is kept, ")


def test_a_run_of_two_processes_is_reproduced_and_with_shares_on_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    folder = new_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    train(folder, "--nprocs=2", "training.shares=2")
    assert reproduced(capfd, "runs/a", code=0).startswith(SAME)
    said = reproduced(capfd, "runs/a", "--", "--nprocs=1", code=0)
    assert said.startswith(SAME)
    assert ", ranks: 2 → 1" in said


# --- a run of several starts -----------------------------------------------------------------


def test_a_run_that_was_killed_and_continued_is_reproduced_from_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    folder = new_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    text = SCRIPT.replace("super().train_batch()", "super().train_batch(); nets.end(self)")
    (folder / "train.py").write_text(text)
    ending = (
        "import os\nSCALE = 1\ndef end(self):\n    os.path.exists('end') and self.iteration == 3"
    )
    (folder / "nets.py").write_text(f"{ending} and os.kill(os.getpid(), 9)\n")
    (folder / "end").touch()
    train(folder, code=-9)
    (folder / "end").unlink()
    train(folder)
    assert reproduced(capfd, "runs/a", code=0).startswith(SAME)
    train(folder, "training.max_iteration=9", "training.keep_last=1")
    said = reproduced(capfd, "runs/a", "--iterations", "9", code=0)
    assert said.startswith("reproduced: 7 iterations, the same bits (no checkpoint of it is kept")
    ended = "From there on it was continued with other config.training.max_iteration, "
    assert said.strip().endswith(f". {ended}config.training.keep_last")


# --- what is not the same --------------------------------------------------------------------


def test_the_first_difference_is_told_with_its_iteration(copied: Path, capfd: Capture) -> None:
    path = copied / "runs/a/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["train/loss"] += 0.25
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = reproduced(capfd, "runs/a", code=1)
    assert said.startswith("NOT REPRODUCED: train/loss at iteration 2 differs: ")
    assert said.endswith(" now\n")


def test_other_data_are_told_beside_the_difference(copied: Path, capfd: Capture) -> None:
    change(copied / "runs/a", "data", lambda record: record.update(first_batch="00000000"))
    (copied / "data/scale.txt").write_text("3")
    said = reproduced(capfd, "runs/a", code=1)
    assert said.startswith("NOT REPRODUCED: train/scale at iteration 1 differs: 2.0 then, 3.0 now")
    assert ". Not as it was: first_batch: 00000000 → " in said


def test_other_first_weights_and_another_file_of_an_option_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    folder = new_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    fill = "self.model[0].bias.detach().fill_(float(Path(self.args.data).read_text()))"
    text = SCRIPT.replace("super().setup_model()", f"super().setup_model(); {fill}")
    (folder / "train.py").write_text(text)
    (folder / "data/bias.txt").write_text("0.5")
    train(folder, "--data=data/bias.txt")
    (folder / "data/bias.txt").write_text("0.25")
    said = reproduced(capfd, "runs/a", code=1)
    assert ". Not as it was: model: sha256 " in said
    assert ", began_from.--data: sha256 " in said


def test_another_version_of_paddle_is_told_though_the_bits_are_the_same(
    copied: Path, capfd: Capture
) -> None:
    checkpoint = copied / "runs/a/checkpoints/step-00000004"
    manifest = storage.read_manifest(checkpoint)
    manifest["info"]["versions"] = "paddle 2.9"
    parts = [manifest[part] for part in ("iteration", "files", "info")]
    (checkpoint / "manifest.json").write_bytes(storage._manifest_bytes(*parts))
    said = reproduced(capfd, "runs/a", code=0)
    assert said.startswith(SAME)
    assert ". Not as it was: versions: paddle 2.9 → expbase" in said


def test_a_command_that_fails_is_told_with_its_code(copied: Path, capfd: Capture) -> None:
    (copied / "data/scale.txt").unlink()
    said = reproduced(capfd, "runs/a", code=1)
    assert said.startswith("NOT REPRODUCED: the command ended with code 1")


@pytest.mark.parametrize(
    ("edit", "words", "expected"),
    [
        (lambda run: shutil.rmtree(run), [], "holds no run of a script"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "expected --iterations N"),
        (lambda run: change(run, "start", lambda one: one.update(command=None)), [],
         "holds no run of a script, made by this version of expbase."),
        (lambda run: (shutil.rmtree(run / "checkpoints"), (run / "metrics.jsonl").unlink(),
                      (run / "validations.jsonl").unlink()), ["--iterations", "2"],
         "has no number and no checkpoint until iteration 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_again_is_a_mistake(
    copied: Path, capfd: Capture, edit: Callable[[Path], object], words: list[str], expected: str
) -> None:
    edit(copied / "runs/a")
    said = reproduced(capfd, "runs/a", *words, code=78)
    assert said.startswith("python -m expbase reproduce: error: runs/a: ")
    assert expected in said


def test_ctrl_c_leaves_no_work_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    top = new_project(tmp_path / "top")
    git(top, "init", "--quiet")
    (top / ".gitignore").write_text("runs\n__pycache__\n")
    commit(top, "one")
    train(top)
    monkeypatch.chdir(top)
    real = subprocess.Popen.wait

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if "--output=runs/a" in self.args:
            assert len(git(top, "worktree", "list").splitlines()) == 2
            monkeypatch.setattr(subprocess.Popen, "wait", real)
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    reproduced(capfd, "runs/a", code=130)
    assert len(git(top, "worktree", "list").splitlines()) == 1
