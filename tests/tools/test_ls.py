"""A table of runs."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forks
import pytest
from rich.cells import cell_len
from tiny import Broken, Dataless, Tiny, make, trained

from expbase.__main__ import main
from expbase.record.metrics import metric_lines
from expbase.tools.runs import find, read_run
from expbase.tools.seeds import mean_text


class Stopping(Tiny):
    def train_batch(self) -> None:
        super().train_batch()
        self.stop()


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["ls", str(folder), "--json"]) == 0
    return {run["name"]: run for run in map(json.loads, capsys.readouterr().out.splitlines())}


def add_end(run: Path, text: str) -> None:
    """Replaces the last record of the ledger."""
    lines = (run / "ledger.jsonl").read_text().splitlines()[:-1]
    (run / "ledger.jsonl").write_text("\n".join([*lines, text]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, which differ in their seeds."""
    folder = tmp_path_factory.mktemp("made")
    for seed in (1, 2):
        trained(Tiny, folder / f"s{seed}", seed=seed, monitor="accuracy", save_interval=3)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the first one, to change."""
    return Path(shutil.copytree(made / "s1", tmp_path / "run"))


def ended(
    run: Path,
    seed: int,
    accuracy: float | str = 0.5,
    *,
    end: tuple[str, int] = ("finished", 0),
    iteration: int = 100,
    experiment: str = "Digits",
    **config: Any,
) -> None:
    """Writes what a run leaves: its config, a start and an end, and a validation."""
    run.mkdir(parents=True)
    config = {"training.seed": seed, "lr": 0.1, "training.max_iteration": 100, **config}
    start = {"event": "start", "experiment": experiment, "config": config}
    last = {"event": "end", "reason": end[0], "exit_code": end[1]}
    (run / "ledger.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(last)}\n")
    (run / "config.yaml").write_text(f"training: {{seed: {seed}, max_iteration: 100}}\n")
    line = {"iteration": iteration, "valid/accuracy": accuracy, "train/loss": 0.25}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def logged(run: Path, *lines: dict[str, Any]) -> None:
    run.mkdir()
    for name in ("config.yaml", "ledger.jsonl"):
        (run / name).touch()
    text = "".join(json.dumps({"iteration": n, **line}) + "\n" for n, line in enumerate(lines, 1))
    (run / "metrics.jsonl").write_text(text)


def test_the_state_is_that_of_the_ledger_and_the_lock(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("finished", "lost", "preempted", "torn"):
        shutil.copytree(made / "s1", tmp_path / name)
    trained(Stopping, tmp_path / "stopped")
    with pytest.raises(ArithmeticError):
        trained(Broken, tmp_path / "deep/crashed")
    exp = make(Tiny, tmp_path / "new")
    exp.setup()
    exp.close()
    with pytest.raises(ValueError, match="no data"):
        trained(Dataless, tmp_path / "failed")
    add_end(tmp_path / "lost", "")
    add_end(tmp_path / "preempted", '{"event": "end", "exit_code": 143, "reason": "SIGTERM"}\n')
    add_end(tmp_path / "torn", '{"event": "end", "exit_c')
    states = {name: run["state"] for name, run in listed(tmp_path, capsys).items()}
    assert states == {
        "deep/crashed": "crashed", "failed": "failed", "finished": "finished", "lost": "lost",
        "new": "new", "preempted": "preempted", "stopped": "stopped", "torn": "lost",
    }  # fmt: skip


def test_a_run_of_another_process_is_running_and_its_lock_is_not_taken(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import fcntl, sys\n"
        f"file = open({str(run / '.lock-0')!r}, 'ab')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        assert listed(tmp_path, capsys)["run"]["state"] == "running"
        holder.stdin.close()
        holder.wait(forks.LONG_SECONDS)
    assert listed(tmp_path, capsys)["run"]["state"] == "finished"


def test_where_there_are_no_locks_the_ledger_says_whether_a_run_runs_here(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("os.lockf", no_lock)
    assert listed(tmp_path, capsys)["run"]["state"] == "finished"
    for pid, state in {os.getppid(): "running", 1 << 30: "lost"}.items():
        start = {"event": "start", "time": time.time(), "host": platform.node(), "pid": pid}
        with (run / "ledger.jsonl").open("a") as file:
            file.write(json.dumps(start) + "\n")
        assert listed(tmp_path, capsys)["run"]["state"] == state


def test_numbers_and_what_differs(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = listed(made, capsys)
    last = json.loads((made / "s1/metrics.jsonl").read_text().splitlines()[-2])
    assert runs["s1"]["differs"] == {"training.seed": 1}
    assert (runs["s1"]["iteration"], runs["s1"]["max_iteration"]) == (6, 6)
    assert runs["s1"]["loss"] == pytest.approx(last["train/loss"])
    assert 0 <= runs["s1"]["best"] <= 1
    assert main(["ls", str(made)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "run", "experiment", "state", "iteration", "best", "loss", "age", "commit", "differs", "in",
    ]  # fmt: skip
    assert table[2].endswith("training.seed=2")
    assert "\t" not in "".join(table)


def test_looking_changes_nothing_and_works_on_what_cannot_be_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    run.chmod(0o555)
    try:
        assert listed(tmp_path, capsys)["run"]["state"] == "finished"
        assert listed(run, capsys)["."]["state"] == "finished"
    finally:
        run.chmod(0o755)
    assert files == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}


def test_damage_is_noted_and_an_empty_or_wrong_directory_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["ls", str(empty)]) == 0
    assert capsys.readouterr().out == f"no runs in {empty}\n"
    (run / "config.yaml").write_text("a: [")
    (run / "metrics.jsonl").write_bytes(b"\xff\x00not json\n")
    found = listed(tmp_path, capsys)["run"]
    # YAML takes long to read, and the ledger has the config of the last start.
    assert (found["note"], found["state"], found["config"]["training.seed"]) == ("", "finished", 1)
    (run / "ledger.jsonl").write_text("")
    found = listed(tmp_path, capsys)["run"]
    assert "not YAML" in found["note"]
    assert found["state"] == "lost"
    assert main(["ls", str(tmp_path / "no")]) == 78
    assert "no: no such directory" in capsys.readouterr().err


def test_the_commit_and_the_config_are_those_of_the_last_start(
    run: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, run, max_iteration=8, seed=1, monitor="accuracy", save_interval=3)
    shutil.copytree(made / "s1", run.parent / "short")
    runs = listed(run.parent, capsys)
    assert runs["run"]["max_iteration"] == 8
    assert runs["run"]["differs"] == {"training.max_iteration": 8}
    last = run / "ledger.jsonl"
    first, _, _, end, start, *_ = map(json.loads, last.read_text().splitlines())
    for code, shown in (
        ({"commit": "b2e08ebe439bc01c", "dirty": True}, "b2e08eb*"),
        ({"commit": "b2e08ebe439bc01c", "dirty": False}, "b2e08eb"),
        ({"note": "not in a git repository"}, ""),
    ):
        records = [first, end, {**start, "git": code}]
        last.write_text("".join(json.dumps(record) + "\n" for record in records))
        found = listed(run, capsys)["."]
        assert (found["commit"], found["dirty"]) == (code.get("commit"), code.get("dirty", False))
        assert main(["ls", str(run)]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[7:] == shown.split()
    del first["git"]
    last.write_text(json.dumps(first) + "\n")  # of an earlier expbase
    assert listed(run, capsys)["."]["commit"] is None


def test_a_run_whose_config_is_lost_does_not_make_all_values_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2, 3):
        ended(tmp_path / str(seed), seed)
    (tmp_path / "3/config.yaml").write_text("[")
    (tmp_path / "3/ledger.jsonl").write_text("")
    runs = listed(tmp_path, capsys)
    assert [runs[name]["differs"] for name in ("1", "2", "3")] == [
        {"training.seed": 1}, {"training.seed": 2}, {},
    ]  # fmt: skip


def test_what_all_runs_of_an_experiment_share_is_not_repeated_beside_another_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        ended(tmp_path / str(seed), seed)
    ended(tmp_path / "3", 0, experiment="Clipped", clip_norm=1.0)
    runs = listed(tmp_path, capsys)
    assert [runs[name]["differs"] for name in ("1", "2", "3")] == [
        {"training.seed": 1}, {"training.seed": 2}, {},
    ]  # fmt: skip
    assert main(["ls", str(tmp_path)]) == 0
    rows, means = capsys.readouterr().out.split("\n\n")
    experiments = [line.split()[1] for line in rows.splitlines()]
    assert experiments == ["experiment", "Digits", "Digits", "Clipped"]
    assert means.startswith("mean of 2 seeds  Digits")


def test_columns_are_chosen_and_rows_are_sorted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 2), ("b", 10), ("c", 1)):
        ended(tmp_path / name, seed)
    logged(tmp_path / "d")  # without a config
    capsys.readouterr()

    def shown(*words: str) -> list[list[str]]:
        assert main(["ls", str(tmp_path), *words]) == 0
        return [row.split() for row in capsys.readouterr().out.partition("\n\n")[0].splitlines()]

    columns = ["--columns", "training.seed", "run"]
    by_seed = ["--sort", "training.seed"]
    head, *rows = shown(*columns, *by_seed)
    assert (head, rows) == (columns[1:], [["1", "c"], ["2", "a"], ["10", "b"], ["d"]])
    assert shown(*columns, *by_seed, "--reverse")[1:] == [
        ["10", "b"],
        ["2", "a"],
        ["1", "c"],
        ["d"],
    ]
    assert [row[0] for row in shown("--sort", "state")] == ["run", "a", "b", "c", "d"]
    first, *_ = shown("--json", *by_seed, "--reverse")
    assert first[:2] == ['{"name":', '"b",']
    assert main(["ls", str(tmp_path), "--reverse"]) == 78
    assert "--reverse: given without --sort; expected --sort NAME" in capsys.readouterr().err
    for words, name in ((["--sort", "los"], "--sort"), (["--columns", "los"], "--columns")):
        assert main(["ls", str(tmp_path), *words]) == 78
        text = f"{name}: unknown column 'los'. Did you mean 'loss'?"
        assert text in capsys.readouterr().err


def test_a_cell_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        keys = {f"model.number_of_layers_{number}": seed for number in range(5)}
        ended(tmp_path / str(seed), seed, **keys)
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("differs in")
    assert all(row.endswith("…") and len(row) < 150 for row in rows)


def test_columns_begin_below_each_other_also_after_wide_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("种子一", "seed-two", "长" * 80):
        ended(tmp_path / name, 1)
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--columns", "run", "state"]) == 0
    rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    widths = {cell_len(re.split(r"\bstate$|\bfinished$", row)[0]) for row in rows}
    assert widths == {73}  # 70, the mark of what is cut off, and the gap


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    for number in range(3):
        ended(tmp_path / str(number), number)
    command = [sys.executable, "-W", "ignore", "-m", "expbase", "ls", str(tmp_path)]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with forks.Popen(command, **pipes) as process:
        process.stdout.close()  # before the first line: as `| head` after its last one
        assert process.stderr.read() == b""


def test_runs_are_found_by_their_files_also_below_a_run_but_not_in_a_hidden_folder(
    tmp_path: Path,
) -> None:
    for name in ("b", "a/deep", "a/deep/below", "b/checkpoints/c", ".hidden/c", "no"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("config.yaml", "ledger.jsonl")[: 1 if name == "no" else 2]:
            (tmp_path / name / file).touch()
    found = [str(path.relative_to(tmp_path)) for path in find(tmp_path)]
    assert found == ["a/deep", "a/deep/below", "b"]
    assert find(tmp_path / "a/deep/below") == [tmp_path / "a/deep/below"]


def test_a_start_that_only_looks_is_no_start_of_the_run(run: Path) -> None:
    """As every evaluation script does."""
    before = (run / "ledger.jsonl").read_text()
    exp = make(Tiny, run, seed=1, monitor="accuracy", save_interval=3)
    exp.setup()
    exp.resume_or_load()
    assert exp.evaluate()["accuracy"] >= 0
    exp.valid()
    assert (run / "ledger.jsonl").read_text() == before  # a process may end here
    exp.close()
    assert (run / "ledger.jsonl").read_text() == before
    assert read_run(run, "run").state == "finished"


def test_a_line_of_metrics_has_an_iteration_and_no_parts(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"iteration": 1, "a": 2}\n{"iteration": [1]}\n{"a": 1}\n{"iteration": 2, "a": {}}'
    )
    assert [*metric_lines(tmp_path)] == [{"iteration": 1, "a": 2}]


def test_a_pipe_in_a_run_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("config.yaml", "metrics.jsonl", "ledger.jsonl", ".lock-0")
    for name in files:
        run = tmp_path / name
        run.mkdir()
        for file in files:
            os.mkfifo(run / file) if file == name else (run / file).touch()
        assert listed(run, capsys)["."]["state"] in ("new", "lost"), name


def test_each_logged_metric_may_be_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", 0.5), ("b", 0.25)):
        validation = {"valid/accuracy": value}
        training = {"train/accuracy": 0.0, "train/d_loss": value, "train/g_loss": 1}
        logged(tmp_path / name, training, validation, training)
    names = ["run", "valid/accuracy", "accuracy", "d_loss"]
    assert main(["ls", str(tmp_path), "--columns", *names, "--sort", "accuracy"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [["b", *["0.25"] * 3], ["a", *["0.5"] * 3]]
    assert main(["ls", str(tmp_path)]) == 0
    assert "d_loss=0.5 g_loss=1" in capsys.readouterr().out
    assert listed(tmp_path, capsys)["a"]["metrics"]["valid/accuracy"] == 0.5


def test_a_mistyped_column_is_answered_with_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(tmp_path / "a", {"valid/accuracy": 0.5})
    for name, hint in (
        ("acuracy", "Did you mean 'accuracy'?"),
        ("run,loss", "Expected spaces between the names: run loss."),
        ("§", "Expected run, experiment, state, iteration, best, test, loss, age, commit, "
         "differs in, a metric or a config value."),
    ):  # fmt: skip
        assert main(["ls", str(tmp_path), "--columns", name]) == 78
        assert f"unknown column {name!r}. {hint}\n" in capsys.readouterr().err


def test_a_named_column_is_searched_for_to_the_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seldom = {"train/rate": 0.125, "ood/accuracy": 0.75, "text": "train/rate"}
    for name, first in (("a", seldom), ("b", {})):
        logged(tmp_path / name, first, *[{"train/loss": 0.5}] * 9000)
    for columns, cells in (
        (["run", "loss"], [["a", "0.5"], ["b", "0.5"]]),
        (["run", "rate", "ood/accuracy"], [["a", "0.125", "0.75"], ["b"]]),
    ):
        assert main(["ls", str(tmp_path), "--columns", *columns]) == 0
        assert [row.split() for row in capsys.readouterr().out.splitlines()[1:]] == cells
    assert main(["ls", str(tmp_path), "--sort", "accuracy"]) == 0
    assert main(["ls", str(tmp_path), "--sort", "acuracy"]) == 78
    assert "rate" not in json.dumps(listed(tmp_path, capsys)["a"])


def test_a_line_says_what_is_being_done_if_it_takes_long(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, said in ((1e9, ""), (-1, f"reading 2 runs in {made} …\n")):
        monkeypatch.setattr("expbase.tools.ls._SILENT_SECONDS", seconds)
        assert len(listed(made, capsys)) == 2
        assert main(["ls", str(made), "--json"]) == 0
        assert capsys.readouterr().err == said


def test_what_differs_outside_of_the_training_section_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        logged(tmp_path / str(seed), {})
        config = f"training: {{seed: {seed}}}\noptim: {{lr: {seed}}}\n"
        (tmp_path / str(seed) / "config.yaml").write_text(config)
    assert [*listed(tmp_path, capsys)["1"]["differs"]] == ["optim.lr", "training.seed"]


# --- means over seeds ------------------------------------------------------------------------


def means(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert main(["ls", str(folder), "--seeds", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_runs_that_differ_in_their_seed_alone_have_a_row_of_means_below_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, accuracy in enumerate((0.97, 0.98, 0.99)):
        ended(tmp_path / f"a{seed}", seed, accuracy)
        ended(tmp_path / f"b{seed}", seed, accuracy - 0.1, lr=0.2)
    ended(tmp_path / "single", 0, 0.5, lr=0.3)
    columns = ["run", "state", "iteration", "accuracy", "loss", "training.seed", "differs in"]
    assert main(["ls", str(tmp_path), "--columns", *columns]) == 0
    runs, below = capsys.readouterr().out.split("\n\n")
    assert len(runs.splitlines()) == 8
    assert [re.split("  +", row) for row in below.splitlines()] == [
        ["mean of 3 seeds", "finished", "100/100", "0.980 ± 0.010", "0.25", "lr=0.1"],
        ["mean of 3 seeds", "finished", "100/100", "0.880 ± 0.010", "0.25", "lr=0.2"],
    ]
    head, worse, better = means(tmp_path, capsys, "--sort", "accuracy", "--columns", "accuracy")
    assert [head, worse, better] == ["accuracy", "0.880 ± 0.010", "0.980 ± 0.010"]
    found = means(tmp_path, capsys, "--json", "--sort", "accuracy", "--reverse")
    first = json.loads(found[0])
    assert first["mean"] == pytest.approx(
        {"iteration": 100, "valid/accuracy": 0.98, "train/loss": 0.25}
    )
    assert first["deviation"] == pytest.approx(
        {"iteration": 0, "valid/accuracy": 0.01, "train/loss": 0}
    )
    del first["mean"], first["deviation"]
    assert first == {
        "name": "mean of 3 seeds", "runs": ["a0", "a1", "a2"], "unfinished": 0,
        "experiment": "Digits", "differs": {"lr": 0.1},
    }  # fmt: skip
    assert len(listed(tmp_path, capsys)) == 7  # without --seeds each line is a run


def test_what_has_not_come_to_its_end_is_in_no_mean_and_is_counted_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(tmp_path / "1", 1, 0.5)
    assert means(tmp_path, capsys) == [
        f"no finished runs that differ in training.seed alone in {tmp_path}"
    ]
    ended(tmp_path / "2", 2, 0.7, end=("no better for 5 validations", 0), iteration=80)  # stop()
    ended(tmp_path / "3", 3, 0.0, end=("a file named STOP", 0), iteration=10)
    ended(tmp_path / "4", 4, 0.0, end=("SIGTERM", 143), iteration=10)
    ended(tmp_path / "5", 5, 0.0, end=("ValueError('no')", 1), iteration=10)
    columns = ["--columns", "run", "state", "iteration", "accuracy"]
    assert [re.split("  +", row) for row in means(tmp_path, capsys, *columns)[1:]] == [
        ["mean of 2 seeds, 3 unfinished", "90 ± 14/100", "0.60 ± 0.14"]
    ]


def test_of_two_runs_with_the_same_seed_the_newer_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed, accuracy, written in (("b", 1, 0.5, 2), ("a", 1, 0.1, 1), ("c", 2, 0.5, 1)):
        ended(tmp_path / name, seed, accuracy)
        for file in ("metrics.jsonl", "ledger.jsonl"):
            os.utime(tmp_path / name / file, (written, written))
    assert means(tmp_path, capsys, "--columns", "run", "accuracy")[1] == "mean of 2 seeds  0.5"


MEANS = [
    ([0.5, 0.5], "0.5"),
    ([0.97, 0.98, 0.984], "0.9780 ± 0.0072"),
    ([5000, 5600], "5300 ± 424"),
    ([2e-8, 4e-8], "3e-08 ± 1.4e-08"),
    ([4e7, 6e7], "5e+07 ± 1.4e+07"),
    ([0.5, "nan"], "nan"),
    ([0.5, "inf"], "inf"),
    ([0.5, None], ""),
    (["a", "a"], "a"),
    (["a", "b"], ""),
    ([True, False], ""),
]


def test_a_mean_has_as_many_places_as_its_deviation_needs() -> None:
    for values, text in MEANS:
        assert mean_text(values) == text, values
