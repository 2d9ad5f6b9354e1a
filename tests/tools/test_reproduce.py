"""`python -m expbase reproduce`: the same bits are told, and so is what is not as it was."""

from __future__ import annotations

import json
import os
import random
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
from expbase.base.processor import processor
from expbase.checkpoint import layout
from expbase.engine import run_digest
from expbase.tools import reproduce
from expbase.tools.run_parts import Stretch

SCRIPT = """
import nets  # beside it
import paddle
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
        scale = nets.SCALE * float(Path("data/scale.txt").read_text())
        self.log(scale=paddle.to_tensor([scale]))  # of shape [1]

    def on_train_end(self):
        with open("data/ended.txt", "a") as file:
            file.write("x")

if __name__ == "__main__":
    main(Experiment)
"""
# Three checkpoints are kept, of iterations 4, 6 and 7. Logged are loss, scale and learning rate of
# seven lines, and three validations, in two files.
WHOLE = "reproduced: iterations 1 to 7 in 3 parts, the same bits (3 checkpoints, 27 logged numbers)"
ONE = "reproduced: iterations 1 to 7 of 7, the same bits (3 checkpoints, 27 logged numbers)"
TO_THE_END = ("--to", "7")  # at once
NO_MORE = "NOT REPRODUCED: iterations 1 to 7: "
OTHER_CODE = f"{NO_MORE}this is not the code of the run"
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
    return out if code in (0, 1, 125) else err.splitlines()[-1]


def shape(said: str) -> str:
    """What is said, without its numbers and checksums."""
    return re.sub(r"\b(?=\d*[a-f])[\da-f]{8}\b|\d[\d.e-]*", "0", said).strip()


PART = "iterations 0 to 0: "
YES = f"{PART}the same bits (step-0, 0 logged numbers)\n" * 3
YES += "reproduced: iterations 0 to 0 in 0 parts, the same bits (0 checkpoints, 0 logged numbers)"
NO = f"NOT REPRODUCED: {PART}train/loss at iteration 0 differs: 0 then, 0 now "
NO += "(0 of 0 parts are not the same). Not as it was: config.training.seed: 0 → 0, "
NO += "first_batch: 0 → 0"


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


@pytest.mark.long
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
    words = ["--record", str(tmp_path / "receipt.json"), "--jobs", "2"]
    said = reproduced(capfd, str(moved), *words, code=0)
    assert said.splitlines()[-1] == WHOLE
    assert shape(said) == YES
    (folder / "data/ended.txt").write_text("x")  # which is linked, and its last part has ended
    assert {*tree(top)} == {*before}
    assert all(tree(top)[path][0] == before[path][0] for path in before)
    assert len(git(top, "worktree", "list").splitlines()) == 1
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["result"] == WHOLE
    assert receipt["reproduced"] is True
    assert receipt["git"]["commit"] == git(top, "rev-parse", "HEAD~")
    assert [(part["first"], part["last"]) for part in receipt["parts"]] == [(0, 4), (4, 6), (6, 7)]
    part = receipt["parts"][0]
    assert part["then"]["numbers"]["train/scale at iteration 2"] == 24
    assert part["then"] == part["now"]
    saved = part["now"]["saved"]["step-00000004"]
    assert saved["model.safetensors"].startswith("sha256 ")
    assert part["now"]["facts"]["loaders"] == {
        "self.train_loader": "10 batches",
        "self.valid_loader": "10 samples",
    }
    assert len(part["now"]["facts"]["first_batch"]) == 8
    said = reproduced(capfd, str(moved), "--receipts", words[1], code=0)
    assert said.strip() == WHOLE.replace(" in 3 parts", ", by the receipts of 3 parts")
    (folder / "nets.py").write_text("SCALE = 5\n")
    said = reproduced(capfd, str(moved), *TO_THE_END, code=1)
    assert said.startswith(f"{OTHER_CODE}. Not as it was: sources")
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
    change(copied / "runs/a", "start", lambda one: one["packages"].update(numpy="0.1"))
    words = ["--to", "6", "--", "training.hang_seconds=900"]  # the last one is for the script
    said = reproduced(capfd, "runs/a", *words, code=0)
    assert said.startswith("reproduced: iterations 1 to 6 of 7, the same bits (")
    # Told though the bits are the same.
    assert "). Not as it was: config.training.hang_seconds: " in said
    assert " → 900, packages.numpy: 0.1 → " in said
    assert (copied / "data/ended.txt").read_text() == "x"  # of the run: nothing had ended here
    (copied / "nets.py").write_text("SCALE = 2\n")
    said = reproduced(capfd, "runs/a", *TO_THE_END, "--record", "receipt.json", code=1)
    assert said.startswith(f"{OTHER_CODE}. Not as it was: sources.nets.py")
    assert "train.py" not in said
    receipt = json.loads((copied / "receipt.json").read_text())
    assert receipt["reproduced"] is False
    (part,) = receipt["parts"]
    assert {*part["not as it was"]} == {"sources.nets.py", "packages.numpy"}
    assert part["now"]["numbers"] == {}  # nothing was trained


@pytest.mark.parametrize("page", PAIRS["reproduce"])
def test_its_pages_show_what_it_says(page: Path) -> None:
    assert [*map(shape, code_of(page.read_text(), "text"))] == [YES, NO]


IN_A_RANK = pytest.param(["--restarts", "1"], marks=pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize("words", [[], IN_A_RANK], ids=["here", "in a rank"])
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
    assert reproduced(capfd, "runs/a", *TO_THE_END, code=0).strip() == ONE


def test_a_part_ends_at_any_iteration_and_begins_at_a_checkpoint(
    copied: Path, capfd: Capture
) -> None:
    said = reproduced(capfd, "runs/a", "--from", "4", "--to", "5", "--updates", code=0)
    updates, result = said.splitlines()
    assert updates.startswith("[5] loss=")
    assert re.search(r" scale=2 samples \d+(,\d+)*$", updates)
    numbers = "the same bits (no checkpoints, 3 logged numbers)\n"
    assert result + "\n" == f"reproduced: iterations 5 to 5 of 7, {numbers}"
    said = reproduced(capfd, "runs/a", "--from", "5", code=78)
    assert "--from 5 given, and the state of that iteration is not kept; expected one of" in said
    assert said.endswith("one of 0, 4, 6, 7.")
    assert "expected 1 to 7" in reproduced(capfd, "runs/a", "--to", "8", code=78)
    assert "are one part" in reproduced(capfd, "runs/a", "--to", "7", "--parts", "2", code=78)
    assert "without --parts" in reproduced(capfd, "runs/a", "--seed", "2", code=78)


def test_some_parts_are_taken_at_random_and_their_receipts_tell_what_is_missing(
    copied: Path, capfd: Capture
) -> None:
    words = ["--parts", "1", "--seed", "3", "--record", "one.json"]
    said = reproduced(capfd, "runs/a", *words, code=0)
    assert said.endswith(" --parts 1 --seed 3 takes these\n")
    (part,) = json.loads(Path("one.json").read_text())["parts"]
    missing = part["last"] + 1 if part["first"] == 0 else 1
    said = reproduced(capfd, "runs/a", "--receipts", "one.json", code=1)
    assert said.startswith(f"NOT REPRODUCED: no receipt of the iterations from {missing} on")
    assert "is no receipt" in reproduced(capfd, "runs/a", "--receipts", "train.py", code=78)


@pytest.mark.long
def test_of_a_digest_all_readers_make_the_same_parts_of_the_files_that_it_binds(
    copied: Path, capfd: Capture
) -> None:
    run = train(copied, "--fresh", "training.keep_every=2", "training.save_interval=1")
    assert layout.name_of(5) in {path.name for path in (run / "checkpoints").iterdir()}  # not bound
    digest = run_digest.read(run).digest
    words = ["runs/a", "--digest", digest]
    said = reproduced(capfd, *words, "--parts", "1", "--record", "receipt.json", code=0)
    assert said.endswith(f"; the files are those of digest {digest}, and --parts 1 takes these\n")
    receipt = json.loads(Path("receipt.json").read_text())
    assert receipt["digest"] == digest
    (part,) = receipt["parts"]
    made = Stretch(part["first"], part["last"])
    bound = [Stretch(0, 2), Stretch(2, 4), Stretch(4, 6), Stretch(6, 7)]
    assert [made] == random.Random(digest).sample(bound, 1)  # by nobody's choice
    said = reproduced(capfd, *words, "--from", "5", code=78)
    assert said.endswith("expected one of 0, 2, 4, 6, 7.")
    assert "--seed: given with --digest" in reproduced(capfd, *words, "--seed", "1", code=78)
    assert "expected the 64 digits" in reproduced(capfd, "runs/a", "--digest", "1f", code=78)

    # A checkpoint that is not bound would make other parts.
    shutil.copytree(run / "checkpoints/step-00000004", run / "checkpoints/step-00000003")
    said = reproduced(capfd, *words, code=1)
    assert said.startswith(f"NOT REPRODUCED: not the files of digest {digest}: checkpoint step-")
    assert "step-00000003 model.safetensors: here, and not in digest.txt (one of 3; `show" in said
    shutil.rmtree(run / "checkpoints/step-00000003")
    other = "0" * 64
    said = reproduced(capfd, "runs/a", "--digest", other, "--receipts", "receipt.json", code=1)
    assert (
        said == f"NOT REPRODUCED: not the files of digest {other}: digest.txt: another one, "
        f"whose digest is {digest}\n"
    )
    (run / "digest.txt").unlink()
    assert "holds no digest.txt; expected that" in reproduced(capfd, *words, code=78)


# --- by the code of now ----------------------------------------------------------------------


def test_the_code_of_now_is_the_same_if_it_computes_the_same_and_may_log_more(
    copied: Path, capfd: Capture
) -> None:
    text = SCRIPT.replace("super().train_batch()", "super().train_batch(); self.log(more=1)")
    (copied / "train.py").write_text(
        text.replace("self.log(scale=", "# As well.\n        self.log(scale=")
    )
    said = reproduced(capfd, "runs/a", *TO_THE_END, "--here", "--record", "receipt.json", code=0)
    *new, result = said.splitlines()
    assert new == [f"new: train/more at iteration {at}: 1.0" for at in range(1, 8)]
    assert result.startswith(ONE.replace("reproduced", "the same by the code of now"))
    assert ". Not as it was: sources.train.py: " in result
    (part,) = json.loads((copied / "receipt.json").read_text())["parts"]
    assert part["new"]["train/more at iteration 3"] == 1
    (copied / "nets.py").write_text("SCALE = 3\n")
    said = reproduced(capfd, "runs/a", "--from", "6", "--here", code=1)
    no = "NOT THE SAME BY THE CODE OF NOW: iterations 7 to 7: train/scale at iteration 7 differs: "
    assert said.splitlines()[-1].startswith(no)


@pytest.mark.long
def test_the_code_of_now_gets_the_keys_that_have_left_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    folder = new_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    text = SCRIPT.replace("return config", "config.old = 7; config.gone = 8; return config")
    text = text.replace("self.log(scale=", "self.log(old=self.config.get('old')); self.log(scale=")
    (folder / "train.py").write_text(text)
    train(folder, "old=9")
    (folder / "train.py").write_text(text.replace("config.old = 7; config.gone = 8; ", ""))
    capfd.readouterr()
    assert main(["reproduce", "runs/a", *TO_THE_END, "--here"]) == 0
    out, err = capfd.readouterr()
    line = "the run: default_config has no such keys any more; the run's values hold: old=9, gone=8"
    assert err.count(line) == 1
    assert "the same by the code of now: iterations 1 to 7" in out


@pytest.mark.long
def test_a_run_of_two_processes_is_reproduced_and_with_shares_on_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    folder = new_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    train(folder, "--nprocs=2", "training.shares=2")
    said = reproduced(capfd, "runs/a", "--from", "4", "--updates", code=0)
    assert [line.count("samples") for line in said.splitlines()] == [2, 2, 2, 0]
    said = reproduced(capfd, "runs/a", *TO_THE_END, "--", "--nprocs=1", code=0)
    assert said.startswith(f"{ONE[:36]}")
    assert "ranks: 2 → 1" in said


# --- a run of several starts -----------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_was_killed_and_continued_otherwise_is_reproduced_start_by_start(
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
    train(folder, "training.max_iteration=9", "training.keep_last=2")
    said = reproduced(capfd, "runs/a", code=0)
    # The second part begins with the code and config of one start, and ends with those of another.
    assert [path.name[-1] for path in layout.listed(folder / "runs/a/checkpoints")] == ["8", "9"]
    numbers = "the same bits (2 checkpoints, 33 logged numbers)"
    assert said.splitlines()[-1] == f"reproduced: iterations 1 to 9 in 2 parts, {numbers}"


@pytest.mark.long
def test_a_loop_and_a_save_of_one_s_own_are_called_as_in_the_run(
    copied: Path, capfd: Capture
) -> None:
    own = """
    saves = 0

    def save(self):
        self.saves += 1
        super().save()

    def train(self):
        while self.going_on():
            Experiment.train_batch(self)
            self.end_iteration()

    def on_train_end("""
    (copied / "train.py").write_text(SCRIPT.replace("\n    def on_train_end(", own))
    train(copied, "--output=runs/b")
    said = reproduced(capfd, "runs/b", *TO_THE_END, "--updates", code=0).splitlines()
    assert [line[:3] for line in said[:-1]] == [f"[{number}]" for number in range(1, 8)]
    assert said[-1] == ONE


@pytest.mark.long
def test_where_other_code_goes_on_what_was_logged_before_it_is_compared(
    copied: Path, capfd: Capture
) -> None:
    train(copied, "training.max_iteration=9")
    train(copied, "training.max_iteration=9", "training.log_interval=2")  # it has finished already
    assert shape(reproduced(capfd, "runs/a", "--from", "7", code=0)).startswith("reproduced: ")
    for iteration in (7, 9):
        path = copied / "runs/a/metrics.jsonl"
        text = path.read_text()
        path.write_text(re.sub(rf'("iteration": {iteration}, .*"train/loss": )', r"\g<1>9", text))
        first = "0" if iteration == 7 else "8"
        said = reproduced(capfd, "runs/a", "--from", first, "--to", str(iteration), code=1)
        assert f"train/loss at iteration {iteration} differs: 9" in said
        path.write_text(text)


@pytest.mark.long
def test_a_checkpoint_from_after_its_validation_begins_a_part_too(
    copied: Path, capfd: Capture
) -> None:
    saving = """
    def on_evaluate_end(self, results):
        self.save()
        super().on_evaluate_end(results)

    def on_train_end("""
    words = ["--output=runs/b", "training.monitor=accuracy"]
    (copied / "train.py").write_text(SCRIPT.replace("\n    def on_train_end(", saving))
    train(copied, *words, "training.save_interval=0")
    assert reproduced(capfd, "runs/b", code=0).splitlines()[-1].startswith("reproduced: ")
    path = copied / "runs/b/validations.jsonl"
    path.write_text(re.sub(r'"best": \[\[6, ', '"best": [[6, 9', path.read_text()))
    said = reproduced(capfd, "runs/b", code=1)
    assert "best at iteration 6 of validations.jsonl differs: [[6, 9" in said


# --- what is not the same --------------------------------------------------------------------


def test_the_first_difference_is_told_with_its_iteration(copied: Path, capfd: Capture) -> None:
    path = copied / "runs/a/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["train/loss"] += 0.25
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    path = copied / "runs/a/validations.jsonl"
    path.write_text(re.sub(r'(\n{"iteration": 7, .*accuracy": )', r"\g<1>9", path.read_text()))
    said = reproduced(capfd, "runs/a", code=1).splitlines()
    assert said[0].startswith("iterations 1 to 4: train/loss at iteration 2 differs: ")
    assert said[1].startswith("iterations 5 to 6: the same bits (step-00000006, ")
    text = "iterations 7 to 7: valid/accuracy at iteration 7 of validations.jsonl differs: 9"
    assert said[2].startswith(text)
    text = "NOT REPRODUCED: iterations 1 to 4: train/loss at iteration 2 differs: "
    assert said[-1].startswith(text)
    assert said[-1].endswith(" now (2 of 3 parts are not the same)")


def test_each_checkpoint_that_is_kept_is_compared(copied: Path, capfd: Capture) -> None:
    train(copied, "--output=runs/b", "training.seed=1")
    kept = copied / "runs/a/checkpoints/step-00000006"
    shutil.rmtree(kept)
    shutil.copytree(copied / "runs/b/checkpoints/step-00000006", kept)
    said = reproduced(capfd, "runs/a", "--from", "4", "--to", "7", code=1)
    assert said.startswith("NOT REPRODUCED: iterations 5 to 7: ")
    assert " of step-00000006 differs: " in said
    with (kept / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    said = reproduced(capfd, "runs/a", *TO_THE_END, code=1)
    assert said.endswith("model.safetensors: its content has changed since it was written\n")


def test_other_data_and_another_processor_are_told_beside_the_difference(
    copied: Path, capfd: Capture
) -> None:
    change(copied / "runs/a", "start", lambda record: record["processor"].update(model="8088"))
    change(copied / "runs/a", "data", lambda record: record.update(first_batch="00000000"))
    (copied / "data/scale.txt").write_text("3")
    said = reproduced(capfd, "runs/a", *TO_THE_END, code=1)
    assert said.startswith(f"{NO_MORE}train/scale at iteration 1 differs: 2.0 then, 3.0 now")
    model = processor()["model"]
    assert f". Not as it was: processor.model: 8088 → {model}, first_batch: 00000000 → " in said


def test_other_first_weights_and_another_file_of_an_option_or_of_the_config_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    folder = new_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    fill = "self.model[0].bias.detach().fill_(float(Path(self.args.data).read_text()))"
    text = SCRIPT.replace("super().setup_model()", f"super().setup_model(); {fill}")
    (folder / "train.py").write_text(text)
    (folder / "data/bias.txt").write_text("0.5")
    (folder / "config.yaml").write_text("training: {seed: 1}\n")
    train(folder, "--data=data/bias.txt", "--config=config.yaml")
    (folder / "data/bias.txt").write_text("0.25")
    said = reproduced(capfd, "runs/a", *TO_THE_END, code=1)
    assert ". Not as it was: began_from.--data: sha256 " in said
    assert ", model: sha256 " in said
    (folder / "config.yaml").write_text("training: {seed: 2}\n")
    said = reproduced(capfd, "runs/a", "--from", "4", code=1)  # it goes on, under another config
    assert said.startswith("NOT REPRODUCED: iterations 5 to 7: train/")
    assert ". Not as it was: config.training.seed: 1 → 2" in said


@pytest.mark.long
def test_of_a_script_of_several_experiments_the_run_s_own_is_made_again(
    copied: Path, capfd: Capture
) -> None:
    two = """
    for kind in (Experiment, type("Second", (Experiment,), {})):
        output = f"{default_argument_parser().parse_args().output}_{kind.__name__}"
        exp = kind(kind.default_config(), argparse.Namespace(output=output, device="cpu"))
        exp.setup()
        exp.run()
"""
    text = SCRIPT.replace("\n    main(Experiment)\n", two).replace("import main", "import *")
    text = f"import argparse\nfrom expbase import default_argument_parser\n{text}"
    (copied / "train.py").write_text(text)
    train(copied)
    assert ONE in reproduced(capfd, "runs/a_Experiment", *TO_THE_END, code=0)
    assert "ended with code 1" in reproduced(capfd, "runs/a_Second", *TO_THE_END, code=1)


def test_a_command_that_fails_is_told_with_its_code(copied: Path, capfd: Capture) -> None:
    (copied / "data/scale.txt").unlink()
    said = reproduced(capfd, "runs/a", *TO_THE_END, code=1)
    assert said.startswith(f"{NO_MORE}the command ended with code 1")


def test_code_of_now_that_does_not_come_to_an_update_is_no_answer_for_a_bisection(
    copied: Path, capfd: Capture
) -> None:
    words = ("runs/a", *TO_THE_END, "--here")
    (copied / "train.py").write_text("def main(\n")
    assert "ended with code 1" in reproduced(capfd, *words, code=125)
    failing = "super().train_batch(); 1 / (2 - self.iteration)"
    (copied / "train.py").write_text(SCRIPT.replace("super().train_batch()", failing))
    assert "ended with code 1" in reproduced(capfd, *words, code=1)


def test_what_cannot_be_made_again_is_a_mistake(copied: Path, capfd: Capture) -> None:
    run = copied / "runs/a"

    def by_nobody(start: dict[str, Any]) -> None:
        start["command"] = None

    def nothing_is_said(*words: str) -> str:
        said = reproduced(capfd, "runs/a", *words, code=78)
        assert said.startswith("python -m expbase reproduce: error: runs/a: ")
        return said

    shutil.rmtree(run / "checkpoints")
    assert "expected --to N, at most 7, the last line." in nothing_is_said()
    for file in ("metrics.jsonl", "validations.jsonl"):
        (run / file).unlink()
    text = "has no line and no checkpoint of an iteration: there is nothing to reproduce."
    for words in ([], ["--to", "2"]):
        assert text in nothing_is_said(*words)
    change(run, "start", by_nobody)
    text = "holds no run of a script, made by this version of expbase."
    assert text in nothing_is_said()
    shutil.rmtree(run)
    assert "holds no run of a script" in nothing_is_said()


def test_without_git_another_folder_is_told_where_to_give_the_command(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for folder in (copied / "runs/a", copied / "data"):
        monkeypatch.chdir(folder)
        said = reproduced(capfd, os.path.relpath(copied / "runs/a"), code=78)
        assert said.endswith(
            f"`python train.py …` is not started: it is no code of {folder}. Give the command in "
            "the folder where the run was started."
        )


def test_without_its_config_a_run_is_not_made_again_in_parts(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    (copied / "runs/a/config.yaml").unlink()
    assert reproduced(capfd, "runs/a", *TO_THE_END, code=0).startswith(ONE)
    monkeypatch.setattr(reproduce, "make", None)  # nothing is trained
    said = reproduced(capfd, "runs/a", code=78)
    assert "error: runs/a/config.yaml: no such file; expected that of the run, with which" in said


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
