"""The output directory: one run at a time, its config, making room."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import forks
import paddle
import pytest
from tiny import Tiny, make, refusing, trained

from expbase import Config, ConfigError, main
from expbase.base.json_lines import json_lines
from expbase.checkpoint import storage
from expbase.checkpoint.layout import CheckpointError
from expbase.engine import run_dir
from expbase.engine.run_dir import MAY_CHANGE, RunDirectory
from expbase.record.starts_and_ends import flat

CONFIG = Config({"optim": {"lr": 0.1}, "training": {"seed": 0, "max_iteration": 4}})
# Takes the lock as a run does, and says so; ends when its stdin does.
HOLDER = """
import sys
from expbase.engine.run_dir import RunDirectory
output = RunDirectory(sys.argv[1])
output.make()
output.lock(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def output(tmp_path: Path) -> Iterator[RunDirectory]:
    """A directory that is claimed for a run, which has begun."""
    output = RunDirectory(tmp_path / "runs" / "one")
    output.claim(CONFIG, fresh=False, force=False)
    output.dump(CONFIG)
    (output.path / "metrics.jsonl").write_text("{}\n")
    yield output
    output.release()


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a process that holds a directory."""
    holders = []

    def start(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(path)]
        holder = forks.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def is_free(path: Path) -> bool:
    """Whether another process could take the lock."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(path)]
    return forks.run(command).returncode == 0


def changed(**values: object) -> Config:
    config = CONFIG.clone()
    config.merge_from_list([f"{key.replace('__', '.')}={value}" for key, value in values.items()])
    return config


def claimed(path: Path, config: Config = CONFIG, **options: bool) -> Path | None:
    """Claims and releases, as a run that ends at once."""
    output = RunDirectory(path)
    try:
        return output.claim(config, **{"fresh": False, "force": False, **options})
    finally:
        output.release()


def refusal(path: Path, config: Config = CONFIG, **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        claimed(path, config, **options)
    text = str(caught.value)
    assert text.startswith(f"--output: {str(path)!r} ")
    return text


def test_a_second_experiment_in_the_process_is_refused_until_the_first_is_released(
    output: RunDirectory,
) -> None:
    for options in ({}, {"fresh": True}, {"force": True}):
        assert "in use by a running experiment" in refusal(output.path, **options)
    other_rank = RunDirectory(output.path)
    other_rank.lock(rank=1)
    other_rank.release()
    output.release()
    output.release()
    assert claimed(output.path) is None


def test_another_name_of_the_directory_does_not_get_round_the_lock(
    output: RunDirectory, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(output.path)
    for path in (link, output.path / ".." / "one"):
        assert "in use by a running experiment" in refusal(path)


def test_another_process_is_refused_until_the_holder_is_dead(
    output: RunDirectory, hold: Callable[[Path], subprocess.Popen[str]]
) -> None:
    output.release()
    holder = hold(output.path)  # what was released is free for another process, too
    assert "in use by a running experiment" in refusal(output.path)
    assert "in use by a running experiment" in refusal(output.path, fresh=True)
    assert not output.path.with_name("one.old-1").exists()
    holder.kill()  # -9: it can clean up nothing
    holder.wait()
    assert claimed(output.path) is None


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def lockf(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPERM])
def test_a_file_system_that_refuses_a_lock_is_named(
    output: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    output.release()
    refuse_locks(monkeypatch, number)
    text = refusal(output.path)
    assert f"cannot be locked: {os.strerror(number)}. A lock keeps two" in text
    assert "in use" not in text


def test_without_locks_a_run_goes_on_and_each_start_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_locks(monkeypatch, errno.ENOLCK)
    for last in (1, 2):
        trained(Tiny, tmp_path, max_iteration=last)
        text = "cannot be locked: No locks available; nothing keeps a second process from this run"
        assert capsys.readouterr().err.count(text) == 1


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"event": "end"}, ""),
        ({"event": "start", "host": "here", "pid": 1 << 30}, ""),  # killed
        ({"event": "start", "host": "here", "pid": "?"}, ""),  # damaged
        ({"event": "start", "host": "here", "pid": "parent", "time": 1.0}, ""),  # has its id since
        ({"event": "start", "host": "here", "pid": "parent"}, "is in use by a running experiment"),
        (
            {"event": "start", "host": "node7", "pid": 41},
            "has a start that has not ended: process 41 on 'node7'. Wait for it, or stop it; if it "
            "was killed, give --force.",
        ),
    ],
)
def test_without_locks_the_ledger_is_asked_who_runs(
    output: RunDirectory, monkeypatch: pytest.MonkeyPatch, record: dict[str, object], answer: str
) -> None:
    output.release()
    monkeypatch.setattr("platform.node", lambda: "here")
    refuse_locks(monkeypatch, errno.ENOLCK)
    record = {"time": time.time(), **record}
    record["pid"] = os.getppid() if record.get("pid") == "parent" else record.get("pid")
    (output.path / "ledger.jsonl").write_text(json.dumps(record) + "\n")
    if answer:
        assert answer in refusal(output.path)
        assert answer in refusal(output.path, fresh=True)
    else:
        assert claimed(output.path) is None
    output.lock(1)  # of another rank the ledger says nothing
    if record.get("host") == "node7":
        assert claimed(output.path, force=True) is None


def test_who_gets_the_lock_of_a_directory_that_was_just_moved_aside_does_not_own_the_new_one(
    output: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start with --fresh, between the moments when this one opens and takes the lock."""
    output.release()
    lockf = fcntl.lockf

    def late(file: object, operation: int) -> None:
        output.path.rename(output.path.with_name("aside"))
        output.path.mkdir()
        (output.path / ".lock-0").touch()
        lockf(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "lockf", late)
    assert "is in use by a running experiment" in refusal(output.path)


def test_fresh_holds_the_lock_until_the_old_run_is_moved(output: RunDirectory) -> None:
    output.release()
    move, seen = RunDirectory.move_aside, []

    def watched(self: RunDirectory) -> Path | None:
        seen.append(is_free(output.path))
        return move(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunDirectory, "move_aside", watched)
        claimed(output.path, fresh=True)
    assert seen == [False]


def test_fresh_moves_each_old_run_to_a_number_of_its_own(output: RunDirectory) -> None:
    (output.path / "weights").write_text("first")
    output.release()
    assert claimed(output.path, fresh=True) == output.path.with_name("one.old-1")
    assert (output.path.with_name("one.old-1") / "weights").read_text() == "first"
    again = RunDirectory(output.path)
    again.claim(CONFIG, fresh=False, force=False)
    again.dump(CONFIG)
    again.release()
    assert claimed(output.path, fresh=True) == output.path.with_name("one.old-2")
    assert not (output.path / "config.yaml").exists()


def test_one_that_cannot_be_moved_aside_is_told(
    output: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, output.path.name)  # a disk is mounted there, as in a container
    with pytest.raises(ConfigError, match=r"cannot be moved aside to .*\.old-1': Device or resou"):
        output.move_aside()


def test_a_directory_without_a_run_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    assert claimed(tmp_path, fresh=True) is None
    assert (tmp_path / "notes").read_text() == "mine"


def test_the_config_of_the_first_start_stays(output: RunDirectory) -> None:
    text = (output.path / "config.yaml").read_text()
    output.dump(changed(optim__lr=0.5))
    assert (output.path / "config.yaml").read_text() == text
    assert [path.name for path in output.path.glob("*config*")] == ["config.yaml"]


def test_a_start_that_failed_before_anything_was_kept_gives_way_to_another_config(
    output: RunDirectory,
) -> None:
    (output.path / "metrics.jsonl").write_text("")
    output.release()
    output.claim(changed(optim__lr=0.5), fresh=False, force=False)
    output.dump(changed(optim__lr=0.5))
    output.release()
    assert "lr: 0.5" in (output.path / "config.yaml").read_text()
    assert [path.name for path in output.path.parent.iterdir()] == ["one"]
    (output.path / "checkpoints/step-00000001").mkdir(parents=True)  # it has begun
    assert "optim.lr: 0.5 there, 0.1 now" in refusal(output.path)


def test_a_run_without_its_config_is_compared_with_its_ledger(output: RunDirectory) -> None:
    (output.path / "checkpoints/step-00000001").mkdir(parents=True)
    (output.path / "config.yaml").unlink()
    start = {"event": "start", "config": flat(CONFIG)}
    (output.path / "ledger.jsonl").write_text(f"{json.dumps(start)}\n")
    output.release()
    assert "optim.lr: 0.1 there, 0.5 now" in refusal(output.path, changed(optim__lr=0.5))
    output.claim(CONFIG, fresh=False, force=False)
    output.dump(CONFIG)
    output.release()
    assert "lr: 0.1" in (output.path / "config.yaml").read_text()
    (output.path / "config.yaml").unlink()
    assert claimed(output.path, fresh=True) == output.path.with_name("one.old-1")
    assert not (output.path / "checkpoints").exists()


def test_another_config_is_refused_with_the_keys_and_the_ways_on(output: RunDirectory) -> None:
    output.release()
    text = refusal(output.path, changed(optim__lr=0.5, training__seed=3, training__max_iteration=9))
    assert "optim.lr: 0.1 there, 0.5 now" in text
    assert "training.seed: 0 there, 3 now" in text
    assert "max_iteration" not in text
    assert all(option in text for option in ("--output", "--fresh", "--force"))
    text = refusal(output.path, Config({**CONFIG, "data": {"root": "x"}}))
    assert "data.root: not there, 'x' now" in text
    rest = {key: value for key, value in CONFIG.items() if key != "optim"}
    assert "optim.lr: 0.1 there, not here now" in refusal(output.path, Config(rest))


def test_the_refusal_says_first_how_to_go_on_with_the_runs_own_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sized(Tiny):
        @classmethod
        def default_config(cls) -> Config:
            config = super().default_config()
            config.data = Config({"size": 40})
            return config

    output = tmp_path / "a run"
    words = ["--output", str(output), "--device=cpu", "training.max_iteration=2"]
    main(Sized, argv=[*words, "training.seed=2", "data.size=320"])
    words[-1] = "training.max_iteration=4"
    with pytest.raises(SystemExit):
        main(Sized, argv=words)
    first_way = r" now\nTo go on with the run's own values, give (--config '.*') as the last"
    found = re.search(first_way, capsys.readouterr().err)
    assert found
    exp = main(Sized, argv=[*words[:-1], *shlex.split(found[1]), words[-1]])
    assert (exp.iteration, exp.config.training.seed, exp.config.data.size) == (4, 2, 320)


class Wandering(Tiny):
    """Tiny, whose libraries change the directory of the process, twice."""

    input_spec = (paddle.static.InputSpec([None, 4]),)

    def prepare(self) -> None:
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")

    def setup_model(self) -> None:
        super().setup_model()
        os.chdir("/")


@pytest.mark.parametrize("option", ["checkpoint_path", "init_model_path"])
def test_a_change_of_directory_in_setup_changes_no_path_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(Tiny, Path("other"), max_iteration=2)
    monkeypatch.chdir(tmp_path)
    args = {option: "other"}
    monitored = {"monitor": "accuracy", "max_iteration": 4, "save_interval": 2}
    exp = trained(Wandering, Path("run"), args, **monitored)
    assert (exp.output_dir, exp.output_dir.is_absolute()) == (tmp_path / "run", True)
    exp.load_checkpoint("best")
    exp.save_model(exp.output_dir / "final.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "other", "run"}
    assert not [*(tmp_path / "elsewhere").iterdir()]
    run = tmp_path / "run"
    files = {path.name for path in run.iterdir() if path.is_file()}
    assert files == {*OWN, "final.safetensors"} - {"STOP"}
    for name in ("worker_0.log", "ledger.jsonl", "metrics.jsonl", "config.yaml"):
        assert str(tmp_path) not in (run / name).read_text()
    monkeypatch.chdir(tmp_path)
    trained(Wandering, Path("run"), {"export": "last"}, **monitored)
    assert [*run.glob("export/step-00000004/model.*")]
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_what_may_change_does_and_force_lets_the_rest_pass(output: RunDirectory) -> None:
    output.release()
    assert claimed(output.path, changed(training__max_iteration=9)) is None
    assert claimed(output.path, changed(optim__lr=0.5), force=True) is None
    assert claimed(output.path, changed(optim__lr=0.5), fresh=True) is not None


def test_what_is_computed_may_not_change() -> None:
    keys = {"seed", "deterministic", "accumulation_steps", "shares"}
    assert not {f"training.{key}" for key in keys} & MAY_CHANGE
    may = ("max_iteration", "valid_interval", "save_seconds", "hang_action", "skip_updates")
    assert {f"training.{key}" for key in may} <= MAY_CHANGE


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    assert re.search("cannot be made a directory: (File ex|Not a d)", refusal(tmp_path / place))


def test_a_disk_without_room_for_a_new_run_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, parts: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_dir, "write_single_file", full)
    with pytest.raises(SystemExit) as caught:
        main(Tiny, argv=["--output", str(tmp_path / "run")])
    text = r"error: --output: .*/run' cannot be written to: No space left on device\. Make room"
    assert re.search(text, str(caught.value))
    assert caught.value.code == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be locked: Permission denied" in refusal(tmp_path)
    assert "cannot be made a directory: Permission denied" in refusal(tmp_path / "below")
    tmp_path.chmod(0o700)


def gone(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    gone(path)
    path.mkdir()
    (path / ".lock-0").touch()


@pytest.mark.parametrize("change", [gone, replaced, shutil.rmtree])
def test_a_directory_that_is_not_the_one_that_was_locked_is_told(
    output: RunDirectory, change: Callable[[Path], object]
) -> None:
    output.check()
    change(output.path)
    text = r"is not the directory any more that this run has locked: it was moved, removed or rep"
    with pytest.raises(ConfigError, match=text):
        output.check()
    output.release()
    output.check()


def test_a_directory_that_was_moved_and_linked_is_the_same(output: RunDirectory) -> None:
    gone(output.path)
    output.path.symlink_to("elsewhere")
    output.check()


@pytest.mark.parametrize("saves", [0, 1])
def test_a_run_whose_directory_is_gone_ends_and_makes_nothing_anew(
    tmp_path: Path, saves: int
) -> None:
    """At its next save, and when it asks whether to stop."""

    class Moved(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                gone(self.output_dir)

    endless = {"max_iteration": 10**6, "valid_interval": 0, "save_interval": saves}
    with pytest.raises(ConfigError, match="is not the directory any more"):
        trained(Moved, tmp_path / "run", **endless)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    last = [*json_lines(tmp_path / "elsewhere/ledger.jsonl")][-1]
    assert (last["event"], last["exit_code"]) == ("end", 78)


def test_a_checkpoint_or_a_model_makes_no_run_anew(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        storage.write(tmp_path / "run/checkpoints", 1, {"model": [b"x"]})
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    gone(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not the directory any more"):
        exp.save_model(tmp_path / "run/model.safetensors")
    with pytest.raises(ConfigError, match="is not the directory any more"):
        exp.run()  # with its first line in the ledger
    assert not (tmp_path / "run").exists()


OWN = (
    *("config.yaml", ".lock-0", "metrics.jsonl", "validations.jsonl", "ledger.jsonl", "STOP"),
    *("digest.txt", "doctor.json", "worker_0.log", "vdlrecords.run.log"),
)


def test_something_else_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """A pipe would be waited for, and a link may lead to somebody else's file."""
    kinds: list[Callable[[Path], object]] = [os.mkdir, os.mkfifo, partial(os.symlink, "nowhere")]
    for place, make_ in itertools.product(map(tmp_path.joinpath, OWN), kinds):
        make_(place)
        text = f"holds {place.name}, which is a link, a directory, a pipe or a device; expected"
        assert f"{text} a file." in refusal(tmp_path)
        place.rmdir() if place.is_dir() else place.unlink()


def test_only_the_folder_of_checkpoints_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").symlink_to("nowhere")  # no file of a run
    (tmp_path / "large disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("large disk")
    assert claimed(tmp_path) is None
    (tmp_path / "large disk").rmdir()
    assert "holds checkpoints, no directory; expected one." in refusal(tmp_path)


def test_the_folder_of_runs_is_refused_and_a_run_in_a_run_is_not(tmp_path: Path) -> None:
    def claim(*names: str) -> None:
        directory = RunDirectory(tmp_path.joinpath(*names))
        directory.claim({}, fresh=False, force=False)
        directory.dump({})
        directory.release()

    for names in (("runs", "a"), ("runs", "a", "teacher"), ("runs", "a")):
        claim(*names)
    with pytest.raises(ConfigError, match=r"runs' is no run itself, and holds one, 'a'; .*runs/NA"):
        claim("runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_a_directory_to_which_others_may_write_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "any user of this machine may write to it, and so change what the run loads"
    trained(Tiny, tmp_path / "run")
    assert told not in capsys.readouterr().err
    (tmp_path / "run").chmod(0o777)
    trained(Tiny, tmp_path / "run")
    assert told in capsys.readouterr().err


def test_fresh_on_a_link_leaves_the_link_and_the_disk(output: RunDirectory, tmp_path: Path) -> None:
    output.release()
    link = tmp_path / "link"
    link.symlink_to(output.path)
    assert claimed(link, fresh=True) == output.path.with_name("one.old-1")
    assert link.is_symlink()
    assert [path.name for path in output.path.iterdir()] == [".lock-0"]
