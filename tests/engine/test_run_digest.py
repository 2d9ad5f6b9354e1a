"""The digest of a finished run: what binds it, and what of it is another one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from tiny import PYTHONPATH, TESTS, Helped, Tiny, ledger, metrics, trained

from expbase.checkpoint import layout
from expbase.engine import run_digest
from expbase.ranks import hang
from expbase.record import git, sources
from expbase.record.starts_and_ends import sessions

KEPT = {"monitor": "accuracy", "keep_every": 1, "keep_last": 2, "max_iteration": 8}
SCRIPT = """
import os
import signal
import net  # beside it
from pathlib import Path
from tiny import Helped
from expbase import main

class Experiment(Helped):
    def setup_model(self):
        super().setup_model()
        self.rate = net.RATE

    def on_train_batch_end(self):
        super().on_train_batch_end()
        killed = Path(f"killed at {self.iteration}")
        if self.iteration in (3, 7) and "KILL" in os.environ and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(Experiment)
"""


class Fragile(Helped):
    """Helped, which fails, is stopped, or saves, where a test says so; that is no part of it."""

    def on_train_batch_end(self) -> None:
        super().on_train_batch_end()
        if self.iteration == FAILS.get("at"):
            FAILS.clear()
            raise ArithmeticError("once")
        if self.iteration == FAILS.get("saves"):
            self.save()


FAILS: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _nothing_fails() -> None:
    FAILS.clear()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished, of two starts with other configs."""
    run = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # So that it keeps its sources: these are all tests that the process has loaded.
        patch.setattr(git, "top_of", lambda folder: None)
        patch.setattr(sources, "_MOST_BYTES", 1 << 30)
        trained(Fragile, run, **KEPT | {"max_iteration": 4})
        trained(Fragile, run, {"force": True}, **KEPT | {"accumulation_steps": 2})
    return run


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished, of one start."""
    run = tmp_path_factory.mktemp("straight") / "run"
    trained(Fragile, run, **KEPT)
    return run


def digest_of(run: Path) -> str:
    digest = run_digest.read(run).digest
    assert run_digest.problems(run, digest) == []
    return digest


def test_the_digest_is_of_a_text_whose_lines_anybody_can_check(finished: Path) -> None:
    above, _, below = (finished / "digest.txt").read_text().partition("\n\n")
    digest = hashlib.sha256(f"{above}\n".encode()).hexdigest()
    assert digest == digest_of(finished)
    assert ledger(finished)[-2]["digest"] == digest
    assert ledger(finished)[-2]["event"] == "digest"
    assert f"digest      {digest}\n" in (finished / "worker_0.log").read_text()
    first, *lines = above.splitlines()
    assert first == "expbase run digest 1"
    bound = dict(line.rsplit(" ", 1) for line in lines)
    model = (finished / "checkpoints/step-00000008/model.safetensors").read_bytes()
    name = "checkpoint step-00000008 model.safetensors"
    assert bound[name] == hashlib.sha256(model).hexdigest()
    starts = [one for one in ledger(finished) if one["event"] == "start"]
    versions = hashlib.sha256(starts[0]["versions"].encode()).hexdigest()
    assert bound["start 0 versions"] == bound["start 4 versions"] == versions
    losses = [[line["iteration"], line["train/loss"]] for line in metrics(finished)
              if "train/loss" in line]  # fmt: skip
    numbers = hashlib.sha256(json.dumps(losses).encode()).hexdigest()
    assert bound["metrics.jsonl train/loss"] == numbers
    assert not any("speed/" in name or "time" in name for name in bound)
    kept = {int(name.split()[1][5:]) for name in bound if name.startswith("checkpoint")}
    assert kept == {2, 4, 6, 8} | {int(run_digest.best.best_of(finished)[0][0])}
    assert below == ""


@pytest.mark.parametrize("how", ["failed", "saved"])
def test_how_often_a_run_was_started_or_has_saved_is_not_bound(
    straight: Path, tmp_path: Path, how: str
) -> None:
    FAILS[{"failed": "at", "saved": "saves"}[how]] = 7
    if how == "failed":
        with pytest.raises(ArithmeticError):
            trained(Fragile, tmp_path / "deep/other", **KEPT)
    trained(Fragile, tmp_path / "deep/other", **KEPT)
    assert digest_of(tmp_path / "deep/other") == digest_of(straight)
    others = run_digest.read(tmp_path / "deep/other").others
    assert any(name.startswith("checkpoint step-00000007") for name in others) is (how == "saved")
    shutil.rmtree(step(tmp_path / "deep/other", 7), ignore_errors=True)  # it need not be sent
    assert digest_of(tmp_path / "deep/other") == digest_of(straight)


def test_another_config_has_another_digest(straight: Path, tmp_path: Path) -> None:
    trained(Fragile, tmp_path / "other", **KEPT | {"hang_seconds": 700})  # of the same bits
    lines, others = (run_digest.read(run).bound for run in (straight, tmp_path / "other"))
    assert {name for name in lines if lines[name] != others[name]} == {"config"}
    assert digest_of(tmp_path / "other") != digest_of(straight)


def test_a_run_that_goes_on_has_no_digest_from_its_first_save_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(Fragile, run, max_iteration=4, save_interval=2)
    before = digest_of(run)
    trained(Fragile, run, max_iteration=4, hang_seconds=700)  # has nothing to do
    assert digest_of(run) == before
    FAILS["at"] = 5
    with pytest.raises(ArithmeticError):
        trained(Fragile, run, max_iteration=8, save_interval=2)
    assert (run / "digest.txt").exists()  # nothing is saved yet
    FAILS["at"] = 7
    with pytest.raises(ArithmeticError):
        trained(Fragile, run, max_iteration=8, save_interval=2)
    with pytest.raises(ValueError, match=r"run: holds no digest\.txt; expected that of a run whi"):
        run_digest.read(run)
    assert [session.digest for session in sessions(run)] == [before, "", "", ""]
    trained(Fragile, run, max_iteration=8, save_interval=2)
    assert digest_of(run) != before


def test_a_digest_that_cannot_be_written_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_digest, "write_single_file", refuse)
    trained(Tiny, tmp_path / "run", max_iteration=2)
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "digest.txt: not written, and the run has no digest: [Errno 28] No space left" in log
    assert ledger(tmp_path / "run")[-1]["reason"] == "finished"


def test_a_digest_that_takes_long_is_no_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Callable[[], dict[str, Any]]] = []
    moves: list[bool] = []

    def watching(_: float, progress: Callable[[], dict[str, Any]], *__: Any, **___: Any) -> Any:
        watched.append(progress)
        return contextlib.nullcontext()

    def has_moved(*_: Any) -> str:
        moves.append(watched[0]() != watched[0]())
        return "0" * 64

    class Ending(Tiny):
        def on_train_end(self) -> None:
            has_moved()

    monkeypatch.setattr(hang, "watching", watching)
    monkeypatch.setattr(run_digest, "write", has_moved)
    trained(Ending, tmp_path / "run", max_iteration=2)
    assert moves == [False, True]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("one", "b340d1048d687a9333bcc0ee4c72711547724c4302446d1906ef7ff23f20503a"),
        ("shares", "124941ac702a9e077b05c5db5a4b2e900467a692490009067bb12907edb137d7"),
    ],
)
def test_what_the_form_binds_stays(tmp_path: Path, name: str, digest: str) -> None:
    run = shutil.copytree(TESTS / "runs/1.0" / name, tmp_path / "run")
    assert run_digest.write(run) == digest  # docs/stable.md: of the same files in each 1.x
    assert (run / "digest.txt").read_text().startswith("expbase run digest 1\n")


# --- what is planted ---------------------------------------------------------------------------


def lines(run: Path, name: str, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes the lines of a file of the run."""
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    edit(found)
    (run / name).write_text("".join(f"{json.dumps(one)}\n" for one in found))


def start_of(records: list[dict[str, Any]], number: int = 0) -> dict[str, Any]:
    return [one for one in records if one["event"] == "start"][number]


def step(run: Path, iteration: int) -> Path:
    return run / layout.FOLDER / layout.name_of(iteration)


def moved(run: Path, source: int, target: int) -> None:
    shutil.rmtree(step(run, target))
    shutil.copytree(step(run, source), step(run, target))


def replaced(run: Path, iteration: int, name: str, old: bytes, new: bytes) -> None:
    file = step(run, iteration) / name
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def edit(event: str, number: int, **facts: Any) -> Callable[[Path], None]:
    """Writes facts into a record of the ledger."""

    def change(records: list[dict[str, Any]]) -> None:
        [one for one in records if one["event"] == event][number].update(facts)

    return lambda run: lines(run, "ledger.jsonl", change)


def config(run: Path, number: int, **values: Any) -> None:
    lines(run, "ledger.jsonl", lambda all_: start_of(all_, number)["config"].update(values))


def number(name: str, key: str, value: Any) -> Callable[[Path], None]:
    """Writes another number into the first line that has a key."""

    def change(found: list[dict[str, Any]]) -> None:
        next(line for line in found if key in line)[key] = value

    return lambda run: lines(run, name, change)


def without_start(run: Path, number: int) -> None:
    lines(run, "ledger.jsonl", lambda all_: all_.remove(start_of(all_, number)))


def source(run: Path) -> None:
    path = next((run / "sources").rglob("*.py"))
    path.write_text(f"{path.read_text()}\n# another\n")


def replaced_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def other_seed(run: Path) -> None:
    trained(Fragile, run.with_name("seed"), **KEPT | {"seed": 1})
    shutil.rmtree(step(run, 8))
    shutil.copytree(step(run.with_name("seed"), 8), step(run, 8))


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "the weights of another iteration in the last": (
        lambda run: shutil.copy(step(run, 6) / "model.safetensors", step(run, 8)),
        "checkpoint step-00000008 model.safetensors: another one"),
    "another iteration's checkpoint under the name of the last": (
        lambda run: moved(run, 6, 8), "checkpoint step-00000008 model.safetensors: another one"),
    "the best checkpoint swapped": (
        lambda run: moved(run, 8, best_of(run)), "model.safetensors: another one"),
    "a checkpoint of a run with another seed": (
        other_seed, "checkpoint step-00000008 optimizer.safetensors: another one"),
    "one bit of the optimizer": (
        lambda run: flipped(step(run, 4) / "optimizer.safetensors"),
        "checkpoint step-00000004 optimizer.safetensors: another one"),
    "a value of the state": (
        lambda run: replaced(run, 4, "state.json", b'"iteration": 4', b'"iteration": 5'),
        "checkpoint step-00000004 values of state.json: another one"),
    "a checkpoint is gone": (
        lambda run: shutil.rmtree(step(run, 2)),
        "checkpoint step-00000002 model.safetensors: not here"),
    "a manifest that is damaged": (
        lambda run: flipped(step(run, 4) / "manifest.json"), "step-00000004/manifest.json"),
    "a checkpoint more": (
        lambda run: shutil.copytree(step(run, 8), step(run, 9)),
        "checkpoint step-00000009 model.safetensors: here, and not in digest.txt"),
    "one number of metrics.jsonl": (
        number("metrics.jsonl", "train/loss", 0.5), "metrics.jsonl train/loss: another one"),
    "one validation of metrics.jsonl": (
        number("metrics.jsonl", "valid/accuracy", 1.0),
        "metrics.jsonl valid/accuracy: another one"),
    "one number of validations.jsonl": (
        number("validations.jsonl", "valid/accuracy", 1.0),
        "validations.jsonl valid/accuracy: another one"),
    "the best score": (
        number("validations.jsonl", "best", [[8, 2.0]]), "validations.jsonl best: another one"),
    "a line is gone": (
        lambda run: lines(run, "metrics.jsonl", lambda found: found.pop(0)),
        "metrics.jsonl train/loss: another one"),
    "the config of the last start": (
        lambda run: config(run, 1, **{"training.hang_seconds": 1}), "config: another one"),
    "the config of an earlier start": (
        lambda run: config(run, 0, **{"training.seed": 9}), "start 0 config: another one"),
    "config.yaml": (
        lambda run: replaced_in(run / "config.yaml", "seed: 0", "seed: 9"),
        "config.yaml: another one than in ledger.jsonl, which differs in training.seed"),
    "config.yaml is gone": (
        lambda run: (run / "config.yaml").unlink(), "config.yaml: not here"),
    "config.yaml is damaged": (
        lambda run: (run / "config.yaml").write_text("- a"), "config.yaml: holds no mapping"),
    "a source file": (source, ": another one"),
    "the checksum of a source file": (
        edit("start", 0, sources={"train.py": "00000000"}),
        "start 0 checksums of sources: another one"),
    "another commit": (
        edit("start", 1, git={"commit": "b2e08ebe"}),
        "start 4 commit: here, and not in digest.txt"),
    "another version of paddle": (
        edit("start", 1, versions="paddle 9"), "start 4 versions: another one, paddle 9"),
    "the first batch": (
        edit("data", 0, first_batch="00000000"), "first batch: another one, 00000000"),
    "the weights after setup": (
        edit("start", 0, model="sha256 0"), "weights after setup: another one, sha256 0"),
    "the number of samples": (
        edit("start", 0, samples={"self.train_loader": 7}),
        "samples of self.train_loader: another one, 7"),
    "what it began from": (
        edit("start", 0, began_from={"--data": "sha256 0"}),
        "began from --data: here, and not in digest.txt"),
    "a start with another config is gone": (
        lambda run: without_start(run, 0), "start 0 config: not here"),
    "the last start is gone": (
        lambda run: without_start(run, 1), "start 4 config: not here"),
    "a ledger with something else in it": (
        edit("start", 0, config=[1]), "ledger.jsonl: damaged"),
    "something else in its last start": (
        edit("start", 1, config={"training.keep_best": "a"}), "config: another one"),
    "a line of digest.txt": (
        lambda run: flipped_line(run), "digest.txt: another one, whose digest is "),
}  # fmt: skip


def best_of(run: Path) -> int:
    return run_digest.best.best_of(run)[0][0]


def flipped_line(run: Path) -> None:
    """Makes a line right for another number, as who has replaced it would."""
    number("metrics.jsonl", "train/loss", 0.5)(run)
    run_digest.write(run)


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_named(finished: Path, tmp_path: Path, planted: str) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    plant, named = PLANTED[planted]
    digest = digest_of(run)
    plant(run)
    found = run_digest.problems(run, digest)
    assert [one for one in found if named in one] != [], found


def test_of_a_ledger_without_starts_everything_is_not_here(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "ledger.jsonl").write_text("")
    assert any("start 0" in problem for problem in run_digest.problems(run))


# --- in processes ------------------------------------------------------------------------------


def run_script(
    folder: Path, *words: str, script: str = SCRIPT, kill: bool = False, code: int = 0
) -> str:
    """Makes a run in a folder, and returns its digest."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "net.py").write_text("RATE = 1\n")
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}
    environment |= {"KILL": "1"} if kill else {}
    command = [sys.executable, "train.py", "--device=cpu", "--output=runs/a"]
    command += ["training.max_iteration=9", "training.save_interval=2", "training.valid_interval=3"]
    command += ["training.monitor=accuracy", "training.keep_every=2", "training.log_interval=1"]
    done = forks.run([*command, *words], cwd=folder, env=environment)
    assert done.returncode == code, done.stderr
    return "" if code else digest_of(folder / "runs/a")


@pytest.mark.long
def test_a_run_that_was_killed_twice_in_another_directory_has_the_same_digest(
    tmp_path: Path,
) -> None:
    straight = run_script(tmp_path / "straight")
    for _ in range(2):
        run_script(tmp_path / "deep/other", kill=True, code=-signal.SIGKILL)
    assert run_script(tmp_path / "deep/other", kill=True) == straight
    assert len(sessions(tmp_path / "deep/other/runs/a")) == 3


@pytest.mark.long
def test_a_run_with_shares_has_the_same_digest_on_two_ranks(tmp_path: Path) -> None:
    one = run_script(tmp_path / "one", "training.shares=2")
    assert run_script(tmp_path / "two", "training.shares=2", "--nprocs=2") == one
    assert run_script(tmp_path / "other", "training.shares=4") != one


@pytest.mark.long
def test_a_run_that_went_on_with_other_code_has_another_digest(tmp_path: Path) -> None:
    straight = run_script(tmp_path / "straight")
    run_script(tmp_path / "other", "training.max_iteration=4")
    folder = tmp_path / "other"
    other = run_script(folder, script=SCRIPT.replace("RATE\n", "RATE  # the same bits\n"))
    assert other != straight
    names = [name for name in run_digest.read(folder / "runs/a").bound if " source " in name]
    assert names == [f"start {n} source {file}" for n in (0, 4) for file in ("net.py", "train.py")]
