"""docs/recipes_around.md: what each script beside a run is for. The page: test_recipes.py."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import forks
import numpy as np
import paddle
import pytest
from test_recipes import DOCS, experiment_of, module_of, run
from tiny import TESTS, curve, ledger, metrics, run_ranks, same_bits

from expbase import ExperimentBase, __main__
from expbase.checkpoint.named import find_at

RECIPES = DOCS / "recipes"
STANDINS = TESTS / "standins"

# A script in place of that of a recipe, in which one process kills itself once.
KILLED = """
import os, signal
import {recipe}

DUE = "step-{iteration:08d}"[:-1] + "0"

class Killed({recipe}.{cls}):
    def on_checkpoint_written(self, path):
        super().on_checkpoint_written(path)
        (self.output_dir / f"told-{{path.name}}").touch()

    def on_train_batch_end(self):
        if self.rank == 0 and self.iteration == {iteration} and not os.path.exists("killed"):
            self.internals.wait_for_checkpoint()  # which tells of it, too
            if (self.output_dir / f"told-{{DUE}}").exists() and {condition}:
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    {then}
"""


def standin(name: str, as_name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in of a library, where a recipe imports the library from."""
    spec = importlib.util.spec_from_file_location(as_name, STANDINS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, as_name, module)
    if as_name == "optuna":
        monkeypatch.setitem(sys.modules, "optuna.trial", module)
    spec.loader.exec_module(module)
    return module


def environment(folder: Path) -> dict[str, str]:
    """Of a process: the recipes and what is in the folder can be imported."""
    paths = os.pathsep.join(map(str, (folder, RECIPES, TESTS)))
    return {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}


def points(lines: list[dict[str, Any]], name: str) -> dict[int, float]:
    """A curve as a tracker has it: of equal steps the first one counts."""
    drawn: dict[int, float] = {}
    for line in lines:
        if line["what"] == "log" and name in line["data"]:
            drawn.setdefault(line["step"], line["data"][name])
    return drawn


# --- trackers ----------------------------------------------------------------------------------

WORDS = ["training.max_iteration=40", "training.log_interval=5", "training.valid_interval=20"]
WORDS += ["training.save_interval=10"]


@pytest.mark.long
def test_wandb_gets_one_curve_from_rank_zero_however_often_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(STANDINS / "tracker.py", tmp_path / "wandb.py")
    then = "from expbase import main; main(Killed)"
    script = tmp_path / "train.py"
    script.write_text(
        KILLED.format(recipe="tracking", cls="Tracked", iteration=27, condition=True, then=then)
    )
    monkeypatch.chdir(tmp_path)
    command = [str(script), "--output", "run", "--device=cpu", *WORDS]
    path = environment(tmp_path)["PYTHONPATH"]
    first, _ = run_ranks([command] * 2, PYTHONPATH=path)
    assert first.returncode == -signal.SIGKILL
    again = run_ranks([command] * 2, PYTHONPATH=path)
    assert [process.returncode for process in again] == [0, 0], again[0].stderr
    sent = standin("tracker", "wandb", monkeypatch).lines()
    assert len({line["id"] for line in sent}) == 1
    assert [line["what"] for line in sent if line["step"] is None] == ["init", "init", "finish"]
    # What comes again after the kill is late, and the same; nothing that is new is late.
    again_sent = [line for line in sent if line["what"] == "late"]
    assert {20, 25} == {line["step"] for line in again_sent}
    for line in again_sent:
        for name, number in line["data"].items():
            assert name.startswith("speed/") or number == points(sent, name)[line["step"]]
    drawn = points(sent, "train/loss")
    assert drawn == curve(Path("run"), "train/loss")
    assert [*drawn] == [*range(5, 41, 5)]
    assert points(sent, "valid/accuracy") == curve(Path("run"), "valid/accuracy")


@pytest.mark.long
def test_a_run_goes_on_from_the_bucket_where_the_disk_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(STANDINS / "bucket.py", tmp_path / "boto3.py")
    script = tmp_path / "train.py"
    sent = "not self.thread.submit(int).result()"  # what was to be sent before
    then = "from expbase import main; main(Killed)"
    fill = {"recipe": "mirror", "cls": "Mirrored", "iteration": 27, "then": then}
    script.write_text(KILLED.format(condition=sent, **fill))
    command = [sys.executable, str(script), "--output", "run", "--device=cpu", *WORDS]
    options: dict[str, Any] = {"cwd": tmp_path}
    env = environment(tmp_path) | {"BUCKETS": str(tmp_path / "buckets")}
    killed = forks.run([*command, "training.keep_last=1"], env=env, **options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    shutil.rmtree(tmp_path / "run")
    half = tmp_path / "buckets/my-runs/run/step-00000030/config.yaml"
    half.parent.mkdir()
    half.touch()
    again = forks.run([*command, "training.keep_last=1"], env=env, **options)
    assert again.returncode == 0, again.stderr
    assert "from step-00000020" in again.stderr
    command[command.index("run")] = "straight"
    assert forks.run(command, env=env, **options).returncode == 0
    same_bits(*(tmp_path / run / "checkpoints/step-00000040" for run in ("run", "straight")))
    for name in ("train/loss", "valid/weight"):
        assert curve(tmp_path / "run", name) == curve(tmp_path / "straight", name)


class Interrupted(Exception):
    """What a test ends a run by, in its middle."""


def interrupted(experiment: Any) -> Any:
    """The same, and its first start ends after 27 iterations."""

    class Ending(experiment):  # type: ignore[misc]
        is_first = True

        def on_train_batch_end(self) -> None:
            if self.iteration == 27 and Ending.is_first:
                Ending.is_first = False
                raise Interrupted

    return Ending


@pytest.mark.long
def test_swanlab_is_another_import_and_a_fresh_run_another_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    library = standin("tracker", "swanlab", monkeypatch)
    text = (RECIPES / "tracking.py").read_text()
    assert "import wandb  # or: import swanlab as wandb" in text
    recipe = ModuleType("of_swanlab")
    exec(text.replace("import wandb  # or: ", ""), vars(recipe))
    words = ["training.max_iteration=10", "training.log_interval=5"]
    run(recipe.Tracked, tmp_path / "run", *words)
    assert points(library.lines(), "train/loss") == curve(tmp_path / "run", "train/loss")
    run(recipe.Tracked, tmp_path / "run", "--fresh", *words)
    assert len({line["id"] for line in library.lines()}) == 2


@pytest.mark.long
def test_sound_and_pictures_come_with_the_numbers_of_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(RECIPES)
    library = standin("tracker", "wandb", monkeypatch)
    recipe = module_of("tracking_media")
    run(recipe.Seen, tmp_path / "run", "training.max_iteration=20", "training.valid_interval=10")
    sys.modules.pop("tracking")
    sent = [line for line in library.lines() if "zero" in (line["data"] or {})]
    assert [line["step"] for line in sent] == [10, 20]
    assert sent[0]["data"] == {"zero": [8, 8], "tone": [6400, 8000]}
    assert [*points(library.lines(), "valid/accuracy")] == [10, 20]


@pytest.mark.long
def test_tensorboard_hides_what_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, int, float]] = []

    class SummaryWriter:
        def __init__(self, logdir: str, *, purge_step: int) -> None:
            assert logdir == str(tmp_path / "tensorboard")
            written[:] = [point for point in written if point[1] < purge_step]
            self.waiting: list[tuple[str, int, float]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.waiting.append((tag, global_step, scalar_value))

        def flush(self) -> None:
            written.extend(self.waiting)
            self.waiting.clear()

        def close(self) -> None:
            assert not self.waiting  # a kill comes without it

    library = ModuleType("tensorboardX")
    vars(library)["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", library)
    experiment = interrupted(experiment_of("tensorboard_curves"))
    with pytest.raises(Interrupted):
        run(experiment, tmp_path, *WORDS)
    assert max(step for _, step, _ in written) == 25
    run(experiment, tmp_path, *WORDS)
    for name in ("train/loss", "valid/accuracy"):
        # A validation that comes again stands twice, with one number.
        drawn = {(step, number) for tag, step, number in written if tag == name}
        assert sorted(drawn) == [*curve(tmp_path, name).items()]


def starts(output: Path) -> list[int]:
    """The iterations from which it was started."""
    return [record["iteration"] for record in ledger(output) if record["event"] == "start"]


# --- a search ----------------------------------------------------------------------------------

SHORT = ["--device=cpu", "training.max_iteration=40", "training.save_interval=10"]


@pytest.mark.long
def test_the_trial_that_was_killed_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(STANDINS / "optuna.py", tmp_path)
    then = "study.WarmUp, study.NUM_TRIALS = Killed, 3; study.search()"
    script = tmp_path / "search.py"
    text = KILLED.format(
        recipe="study", cls="WarmUp", iteration=27, condition="'trial-1' in self.args.output",
        then=then,
    )  # fmt: skip
    script.write_text(text)
    words = [sys.executable, str(script), *SHORT]
    killed = forks.run(words, cwd=tmp_path, env=environment(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    library = standin("optuna", "optuna", monkeypatch)
    study = library.Study(tmp_path / "runs/study/study.db")
    states = library.TrialState
    assert [t.state for t in study.get_trials()] == [states.COMPLETE, states.RUNNING]
    lr = study.get_trials()[1].params["lr"]
    again = forks.run(words, cwd=tmp_path, env=environment(tmp_path))
    assert again.returncode == 0, again.stderr
    assert [t.state for t in study.get_trials()] == [states.COMPLETE] * 3
    assert study.get_trials()[1].params == {"lr": lr}
    for trial in study.get_trials():
        run_of_trial = tmp_path / f"runs/study/trial-{trial.number}"
        assert trial.value == [*curve(run_of_trial, "valid/accuracy").values()][-1]
        assert starts(run_of_trial) == ([0, 20] if trial.number == 1 else [0])
    assert f"best: {study.best_params}" in again.stdout


def test_a_trial_without_a_rate_or_with_a_loss_that_is_not_finite_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(RECIPES)
    library = standin("optuna", "optuna", monkeypatch)
    recipe = module_of("study")
    recipe.FOLDER.mkdir(parents=True)
    storage = f"sqlite:///{recipe.FOLDER}/study.db"
    study = library.create_study(
        storage=storage, study_name="digits", direction="maximize", load_if_exists=True
    )
    study.ask()  # and a kill: it has no rate yet
    study.ask().suggest_float("lr", 0.1, 1, log=True)

    def accuracy(number: int, lr: float) -> float:
        if number == 1:
            raise FloatingPointError
        return lr

    monkeypatch.setattr(recipe, "accuracy", accuracy)
    monkeypatch.setattr(recipe, "NUM_TRIALS", 1)
    recipe.search()
    assert [trial.state.name for trial in study.get_trials()] == ["FAIL", "FAIL", "COMPLETE"]


@pytest.mark.long
def test_the_ramp_finds_a_rate_that_trains_better_than_others(tmp_path: Path) -> None:
    recipe = module_of("learning_rates")
    run(recipe.Ramp, tmp_path / "ramp")
    rates = curve(tmp_path / "ramp", "train/lr")
    assert list(rates.values()) == sorted(rates.values())
    assert rates[1] == pytest.approx(1e-6 * 1e7**0.01)
    text = (tmp_path / "ramp/worker_0.log").read_text()
    assert "STOPPED by the learning rate is too high" in text
    assert not (tmp_path / "ramp/checkpoints").exists() or find_at(tmp_path / "ramp") is None
    (found,) = re.findall(r"try lr=(\S+)", text)

    def loss_with(rate: float) -> float:
        class Digits(recipe.Digits):  # type: ignore[misc]
            def train_batch(self) -> None:
                self.optimizer.set_lr(rate)
                super().train_batch()

        output = tmp_path / f"{rate}"
        words = ["training.max_iteration=30", "training.valid_interval=0"]
        run(Digits, output, *words)
        return metrics(output)[-1]["train/loss"]

    assert loss_with(float(found)) < min(loss_with(float(found) / 30), loss_with(float(found) * 30))


# --- folds -------------------------------------------------------------------------------------


@pytest.mark.long
def test_folds_that_were_killed_in_the_fourth_end_with_the_same_table_and_bits(
    tmp_path: Path,
) -> None:
    tables = {}
    then = "folds.Fold = Killed; folds.cross_validate()"
    fill = {"recipe": "folds", "cls": "Fold", "iteration": 27, "then": then}
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        script = tmp_path / name / "train.py"
        script.write_text(KILLED.format(condition="self.config.data.fold == 3", **fill))
        words = [sys.executable, str(script), *SHORT]
        options: dict[str, Any] = {"cwd": script.parent, "env": environment(tmp_path)}
        if name == "straight":
            (script.parent / "killed").touch()
        else:
            killed = forks.run(words, **options)
            assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
        done = forks.run(words, **options)
        assert done.returncode == 0, done.stderr
        tables[name] = done.stdout
    assert tables["killed"] == tables["straight"]
    folders = [[tmp_path / name / f"runs/folds/fold{n}" for name in tables] for n in range(5)]
    for straight, again in folders:
        same_bits(*(run / "checkpoints/step-00000040" for run in (straight, again)))
    assert [starts(again) for _, again in folders] == [[0, 40]] * 3 + [[0, 20], [0]]
    found = [curve(straight, "valid/accuracy")[40] for straight, _ in folders]
    lines = [f"fold {n}  {accuracy:.4f}\n" for n, accuracy in enumerate(found)]
    mean, deviation = np.mean(found), np.std(found, ddof=1)
    assert tables["killed"] == "".join(lines) + f"mean    {mean:.4f} ± {deviation:.4f}\n"


@pytest.mark.long
def test_folds_on_two_processes_have_their_table_too(tmp_path: Path) -> None:
    words = [sys.executable, str(RECIPES / "folds.py"), "--nprocs", "2", "--device=cpu"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment(tmp_path)}
    done = forks.run([*words, "training.max_iteration=2"], **options)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(fold \d  0\.\d+\n){5}mean    0\.\d+ ± 0\.\d+\n", done.stdout)


@pytest.mark.long
def test_the_table_in_pandas_has_each_run_what_was_tried_and_the_means_over_seeds(
    tmp_path: Path,
) -> None:
    recipe = module_of("pandas_table")
    words = ["training.max_iteration=3", "optim.warmup_iterations=1"]
    for lr in (0.01, 0.1):
        for seed in (1, 2):
            more = [f"optim.lr={lr}", f"training.seed={seed}"]
            run("warmup", tmp_path / f"lr{lr}-{seed}", *words, *more)
    diverged = json.loads((tmp_path / "lr0.1-2/metrics.jsonl").read_text().splitlines()[-1])
    diverged["valid/accuracy"] = "nan"
    with (tmp_path / "lr0.1-2/metrics.jsonl").open("a") as file:
        print(json.dumps(diverged), file=file)
    table = recipe.table(str(tmp_path))
    assert [*table.columns] == [
        "name", "state", "iteration", "config.training.seed", "config.optim.lr",
        "metrics.valid/accuracy",
    ]  # fmt: skip
    assert [*table["name"]] == ["lr0.01-1", "lr0.01-2", "lr0.1-1", "lr0.1-2"]
    assert {*table["state"], *table["iteration"]} == {"finished", 3}
    one, two, three = (curve(tmp_path / name, "valid/accuracy")[3] for name in [*table["name"]][:3])
    means = recipe.means(table, "optim.lr")
    assert means.loc[0.01].tolist() == pytest.approx(
        [2, (one + two) / 2, np.std([one, two], ddof=1)]
    )
    assert means.loc[0.1].tolist()[:2] == [1, three]  # of a nan there is no mean


# --- messages, means, counts -------------------------------------------------------------------


@pytest.mark.parametrize(("end", "text"), [
    ("finished", "run: finished, at iteration 5"),
    ("stopped", "run: signal: SIGTERM, at iteration 3"),
    ("failed", "run: failed: Interrupted(), at iteration 3"),
])  # fmt: skip
def test_a_chat_is_told_how_a_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, text: str
) -> None:
    class Told(experiment_of("told")):  # type: ignore[misc]
        def on_train_batch_end(self) -> None:
            if self.iteration == 3 and end == "stopped":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.iteration == 3 and end == "failed":
                raise Interrupted

    sent: list[Any] = []

    def urlopen(request: Any, timeout: float) -> Any:
        sent.append((request.full_url, json.loads(request.data)))
        raise OSError("the chat is away")  # which is no failure of the run

    monkeypatch.setenv("WEBHOOK", "http://127.0.0.1/chat")
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with contextlib.suppress(Interrupted, SystemExit):
        run(Told, tmp_path / "run", "training.max_iteration=5")
    assert sent == [("http://127.0.0.1/chat", {"text": text})]
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "no message was sent: the chat is away" in log
    if end == "finished":
        run(Told, tmp_path / "run", "--evaluate", "last")
        assert len(sent) == 1


def epoch_losses(output: Path) -> dict[int, float]:
    from visualdl import LogReader

    records = LogReader(file_path=str(output / "vdlrecords.run.log"))
    return {point.id: point.value for point in records.get_data("scalar", "epoch/loss")}


@pytest.mark.long
def test_the_mean_over_an_epoch_is_that_of_all_its_samples_however_it_was_killed(
    tmp_path: Path,
) -> None:
    class Noting(experiment_of("epoch_means")):  # type: ignore[misc]
        def log(self, **scalars: Any) -> None:
            if self.internals.phase == "train":
                noted.append(scalars["loss"].item())
            super().log(**scalars)

    noted: list[float] = []
    words = [*WORDS, "training.max_epoch=2", "training.max_iteration=0"]
    run(Noting, tmp_path / "straight", *words)
    sizes = [50] * 29 + [47]  # of the batches of 1497 samples
    expected = [np.average(noted[start:][:30], weights=sizes) for start in (0, 30)]
    assert [*epoch_losses(tmp_path / "straight").values()] == pytest.approx(expected, rel=1e-5)
    experiment = interrupted(experiment_of("epoch_means"))
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "killed", *words)
    run(experiment, tmp_path / "killed", *words)
    assert epoch_losses(tmp_path / "killed") == epoch_losses(tmp_path / "straight")


def test_counts_add_up_over_batches_and_ranks(tmp_path: Path) -> None:
    recipe = module_of("counted")
    labels = paddle.to_tensor([0, 1, 2, 2, 1])
    logits = paddle.nn.functional.one_hot(paddle.to_tensor([0, 1, 1, 2, 1]), 3)
    whole, *parts = (recipe.Confusion(3) for _ in range(4))  # the last rank has no batch
    whole.add(labels, logits)
    for part, rows in zip(parts, (slice(0, 2), slice(2, 5)), strict=False):
        part.add(labels[rows], logits[rows])
    expected = {
        "accuracy": 0.8,
        "macro_f1": (1 + 4 / 5 + 2 / 3) / 3,  # one 2 is taken for a 1
        "confused": 1,
    }
    assert whole.results(lambda counts: [counts]) == pytest.approx(expected)
    assert parts[0].results(lambda _: [part.counts for part in parts]) == pytest.approx(expected)
    run(recipe.Counted, tmp_path, "training.max_iteration=100", "training.valid_interval=100")
    assert curve(tmp_path, "valid/macro_f1")[100] > 0.8


@pytest.mark.long
def test_the_weights_of_all_epochs_stay_and_are_the_same_however_it_was_killed(
    tmp_path: Path,
) -> None:
    words = ["training.max_epoch=3", "training.keep_last=1", "training.save_interval=10"]
    run("kept_weights", tmp_path / "straight", *words)
    experiment = interrupted(experiment_of("kept_weights"))
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "killed", *words)
    exp = run(experiment, tmp_path / "killed", *words)
    folders = [tmp_path / name / "weights" for name in ("straight", "killed")]
    files = [{f.name: f.read_bytes() for f in sorted(folder.iterdir())} for folder in folders]
    assert files[0] == files[1]
    assert [*files[0]] == [f"epoch-000{epoch}.safetensors" for epoch in (1, 2, 3)]
    begun = ["--init_model_path", str(folders[1] / "epoch-0003.safetensors")]
    tuned = run("kept_weights", tmp_path / "tuned", *begun, "training.max_iteration=1")
    for one, other in zip(exp.model.parameters(), tuned.model.parameters(), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=0.011)  # a step of Adam
    assert len([*(tmp_path / "killed/checkpoints").iterdir()]) == 1


# --- the rest ----------------------------------------------------------------------------------


@pytest.mark.long
def test_ten_iterations_are_profiled_and_the_bits_are_those_without(tmp_path: Path) -> None:
    class Plain(experiment_of("profiled")):  # type: ignore[misc]
        on_train_begin = ExperimentBase.on_train_begin
        on_train_batch_end = ExperimentBase.on_train_batch_end
        on_train_end = ExperimentBase.on_train_end

    words = ["training.max_iteration=30"]
    run("profiled", tmp_path / "profiled", *words)
    run(Plain, tmp_path / "plain", *words)
    same_bits(*(find_at(tmp_path / name) for name in ("profiled", "plain")))
    (trace,) = (tmp_path / "profiled/profile-0").glob("*.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    steps = {name.partition("[")[0] for name in names if name.startswith("ProfileStep#")}
    assert steps == {f"ProfileStep#{number}" for number in range(10, 20)}
    assert any("adam" in name for name in names)


DOMAINS = """
import domains
from expbase import main
from expbase.extras.all_events import AllEvents

class Counted(AllEvents, domains.Domains):
    def on_valid_batch_end(self, batch, indices):
        with open(f"batches-{self.rank}", "a") as file:
            print(len(batch[1]), file=file)

if __name__ == "__main__":
    main(Counted)
"""


@pytest.mark.long
def test_each_domain_is_averaged_over_its_samples_also_where_a_rank_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(DOMAINS)
    command = [str(script), "--output", "run", "--device=cpu", "training.max_iteration=20"]
    ranks = run_ranks([command] * 2, PYTHONPATH=environment(tmp_path)["PYTHONPATH"])
    assert [process.returncode for process in ranks] == [0, 0], ranks[0].stderr
    batches = [Path(f"batches-{rank}").read_text().split() for rank in range(2)]
    assert batches == [["50"] * 4 + ["50", "7"], ["50"] * 4 + ["40"]]
    exp = run("domains", Path("run"), "--evaluate", "last")
    with_two = {
        name: number for name, number in metrics(Path("run"))[-1].items() if "valid" in name
    }
    with_one = {f"valid/{name}": number for name, number in exp.evaluate().items()}
    assert with_two == pytest.approx(with_one, rel=1e-9)
    assert with_two["valid/worst"] == min(with_two.values())


@pytest.mark.long
def test_the_tests_of_an_experiment_are_collected_and_pass(tmp_path: Path) -> None:
    for name in ("warmup", "test_warmup"):
        shutil.copy(RECIPES / f"{name}.py", tmp_path)
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-k", "not killed", "test_warmup.py"]
    done = forks.run([sys.executable, *words], cwd=tmp_path, env=environment(tmp_path))
    assert "3 passed, 1 deselected" in done.stdout, done.stdout


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_they_find_a_state_that_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    recipe = module_of("test_warmup")
    before, after = (RECIPES / "warmup.py").read_text().split("\n    def train_batch")
    script = tmp_path / "warmup.py"
    line = 'self.exclude_from_state("schedule")'
    script.write_text(f"{before}        {line}\n    def train_batch{after}")
    monkeypatch.setattr(recipe, "SCRIPT", script)

    def run_here(command: list[str], **options: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "expbase"]
        code = __main__.main(command[3:])
        return SimpleNamespace(returncode=code, stdout=capsys.readouterr().out.encode())

    monkeypatch.setattr(recipe.subprocess, "run", run_here)
    with pytest.raises(AssertionError, match="NOT IDENTICAL"):
        recipe.test_it_survives_being_killed(tmp_path)
