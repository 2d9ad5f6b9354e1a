"""Who comes from Parakeet: scripts without `main`, and runs whose files are its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import paddle
import pytest
from test_readme import SCRIPT, blocks
from tiny import Tiny, make, metrics, run_script, trained, training_config

from expbase import Config, ConfigError, default_argument_parser, main
from expbase.state.checkpoint import CheckpointError
from expbase.state.weights import WeightsError, read_pdopt


class Tuned(Tiny):
    """One with a section of its own."""

    @classmethod
    def default_config(cls) -> Config:
        config = training_config()
        config.optim = Config({"lr": 0.1})
        return config


def by_hand(*words: str, merges: bool = True, **training: Any) -> Any:
    """What the habit of Parakeet's scripts makes of a command line."""
    args = default_argument_parser().parse_args([*words, "--device", "cpu"])
    config = Tuned.default_config()
    if args.config and merges:
        config.merge_from_file(args.config)
    if args.opts and merges:
        config.merge_from_list(args.opts)
    config.training.update(training)
    exp = Tuned(config, args)
    exp.setup()
    exp.run()
    return exp


# --- a script without main ---------------------------------------------------------------------


def test_options_do_in_a_script_without_main_what_they_do_in_main(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", f"{tmp_path}/lr{{optim.lr}}", "optim.lr=0.3"]
    exp = by_hand(*words, "--opts", "training.seed", "4")
    assert exp.output_dir == tmp_path / "lr0.3"
    assert (exp.config.optim.lr, exp.config.training.seed) == (0.3, 4)
    before = sorted(exp.output_dir.rglob("*"))
    capsys.readouterr()
    looking = by_hand(*words, "training.seed=4", "--evaluate", "step-4")
    assert '"loader": "valid_loader"' in capsys.readouterr().out
    assert looking.iteration == 4
    assert sorted(exp.output_dir.rglob("*")) == before


def test_a_checkpoint_that_is_not_there_is_told_before_the_data_is_built(tmp_path: Path) -> None:
    class Slow(Tiny):
        def setup_dataloader(self) -> None:
            raise AssertionError

    trained(Tiny, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"step-00000077: does not exist \(77\)"):
        trained(Slow, tmp_path / "run", {"evaluate": "77"})


def test_a_loop_by_hand_does_not_train_what_is_only_looked_at(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run")
    exp = make(Tiny, tmp_path / "run", {"evaluate": "last"})
    exp.setup()
    with pytest.raises(RuntimeError, match=r"--evaluate or --export only look; expected exp.run"):
        exp.going_on()
    exp.resume_or_load()  # as some of Parakeet's scripts have it before run()
    exp.run()
    assert exp.iteration == 6


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--smoke"], r"--smoke: is done by main\(Experiment\), which this script does not call"),
        (["--print_config"], r"--print_config: is done by main\(Experiment\)"),
        (["--nprocs", "2"], r"--nprocs: is done by main\(Experiment\)"),
        (["--restarts", "2"], r"--restarts: is done by main\(Experiment\)"),
        (
            ["optim.lr=0.3"],
            r"optim\.lr=0\.3: given as an option, and the config has 0\.1",
        ),
        (["--opts", "optim.lr", "0.3"], r"config\.merge_from_list\(args\.opts\) in this script"),
        (["--evaluate", "last", "--fresh"], "--fresh: given with --evaluate"),
    ],
)
def test_an_option_that_would_have_no_effect_without_main_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        by_hand("--output", "run", *words, merges=False)
    assert not Path("run").exists()


def test_a_script_may_change_what_it_merged_and_have_options_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("optim: {lr: 0.3}\ntraining: {max_iteration: 9}\n")
    exp = by_hand("--output", "run", "--config", "c.yaml", max_iteration=2)
    assert exp.iteration == 2
    own = {"smoke": True, "opts": "x", "config": "x.json", "nprocs": 3, "evaluate": False}
    assert trained(Tiny, tmp_path / "own", own, max_iteration=2).iteration == 2


def test_a_mistyped_option_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(Tiny, argv=["--outptu", "run"])
    assert "unrecognized arguments: --outptu. Did you mean '--output'?" in capsys.readouterr().err


def test_a_script_without_the_guard_whose_ranks_cannot_be_forked_is_told_in_one_line(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, time\nfrom tiny import Tiny\nfrom expbase import main\n"
        "threading.Thread(target=time.sleep, args=[60], daemon=True).start()\nmain(Tiny)\n"
    )
    result = run_script(script, "--output", "run", "--nprocs", "2", "--device", "cpu")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.count('expected `if __name__ == "__main__":` before it.') == 1


def test_an_error_names_the_option_as_it_was_written_and_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--output={tmp_path}/run", "--device=cpu", "training.max_iteration=2"]
    main(Tiny, argv=words)
    with pytest.raises(SystemExit, match=r"error: --output: '.*' holds a run of another config"):
        main(Tiny, argv=[*words, "training.seed=1"])
    with pytest.raises(ConfigError, match=r"^args.output: '.*' holds a run of another config"):
        trained(Tiny, tmp_path / "run", seed=1)
    with pytest.raises(SystemExit, match="--device: 'tpu' given"):
        main(Tiny, argv=[f"--output={tmp_path}/other", "--device=tpu"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"training\.monitor: 'f1' given"):
        main(Tiny, argv=[f"--output={tmp_path}/monitored", *words[1:], "training.monitor=f1"])
    assert "ERROR" not in capsys.readouterr().err  # python prints the line when it ends
    assert "ended by ConfigError" in (tmp_path / "monitored/worker_0.log").read_text()


# --- Parakeet's files --------------------------------------------------------------------------


def step(model: Any, optimizer: Any, x: Any) -> None:
    loss = paddle.nn.functional.mse_loss(model(x), 3 * x + 1)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.step()


def old_run(folder: Path, optimizer_of: Any, layers: int = 1) -> dict[str, Any]:
    """Saves at iteration 24 as Parakeet does; returns the weights at iteration 40."""
    paddle.seed(5)
    model = paddle.nn.Sequential(*(paddle.nn.Linear(1, 1) for _ in range(layers)))
    model = model if layers > 1 else model[0]
    optimizer = optimizer_of(model.parameters())
    x = paddle.linspace(-1, 1, 200).reshape([-1, 1])
    folder.mkdir(parents=True)
    for iteration in range(1, 41):
        step(model, optimizer, x)
        if iteration in (9, 24):
            paddle.save(model.state_dict(), str(folder / f"step-{iteration}.pdparams"))
            paddle.save(optimizer.state_dict(), str(folder / f"step-{iteration}.pdopt"))
    (folder / "checkpoint").write_text("9:step-9\n24:step-24\n")
    (folder.parent / "config.yaml").write_text("training:\n  max_iteration: 40\n")
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def recipe(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The class of the page, on a single batch: the order of the old data is not known."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "page"}
    for code in (SCRIPT, *blocks("moving", "python")):
        exec(code, names)  # the documentation's own

    class Same(names["Moved"]):  # type: ignore[misc]
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            data = self.train_loader.dataset
            self.train_loader = paddle.io.DataLoader(data, batch_size=200)

    return Same


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_recipe_of_the_page_goes_on_with_an_old_run_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduled: bool
) -> None:
    def optimizer_of(parameters: Any) -> Any:
        rate = paddle.optimizer.lr.StepDecay(0.02, step_size=5, gamma=0.7) if scheduled else 0.02
        return paddle.optimizer.Adam(rate, parameters=parameters)

    expected = old_run(tmp_path / "runs/old/checkpoints", optimizer_of)

    class Continued(recipe(monkeypatch, tmp_path)):  # type: ignore[misc]
        def setup_model(self) -> None:
            self.judge = paddle.nn.Linear(1, 1)  # automatic names are others than in the old run
            self.model = paddle.nn.Linear(1, 1)
            self.optimizer = optimizer_of(self.model.parameters())
            self.exclude_from_state("judge")

        def train_batch(self) -> None:
            super().train_batch()
            if scheduled:
                self.optimizer._learning_rate.step()

    settings = {"save_interval": 4, "log_interval": 1}
    trained(Continued, Path("runs/new"), max_iteration=30, **settings)
    exp = trained(Continued, Path("runs/new"), max_iteration=40, **settings)  # a start of its own
    assert [line["iteration"] for line in metrics(Path("runs/new")) if "train/loss" in line] == [
        *range(25, 41)
    ]
    for name, tensor in exp.model.state_dict().items():
        assert (tensor.numpy() == expected[name]).all(), name


def test_a_pdopt_that_is_not_the_layer_s_is_an_error(tmp_path: Path) -> None:
    old_run(tmp_path / "old", lambda p: paddle.optimizer.Adam(0.1, parameters=p), layers=2)
    with pytest.raises(WeightsError, match=r"pdopt: 'linear_\d+\.w_0_moment1_0' is of no param"):
        read_pdopt(tmp_path / "old/step-24", paddle.nn.Linear(1, 1))
    with pytest.raises(WeightsError, match=r"step-7: cannot be read: .*No such file"):
        read_pdopt(tmp_path / "old/step-7", paddle.nn.Linear(1, 1))


def test_a_directory_of_parakeet_is_an_error_that_names_the_way_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "runs/old"
    old_run(old / "checkpoints", lambda p: paddle.optimizer.Adam(0.1, parameters=p))
    line = recipe(monkeypatch, tmp_path).__mro__[2]  # the class of the README
    way = r"holds a run of Parakeet.*--init_model_path .*step-24\. To go on .*docs/moving\.md"
    with pytest.raises(ConfigError, match=f"'{old}' cannot be continued here. It {way}"):
        trained(line, old)
    for path in (old, old / "checkpoints", old / "checkpoints/step-24"):
        with pytest.raises(CheckpointError, match=way):
            trained(line, tmp_path / "new", {"checkpoint_path": str(path)})
        shutil.rmtree(tmp_path / "new")
    with pytest.raises(CheckpointError, match=way):
        trained(line, old, {"evaluate": "last"})
    path = str(old / "checkpoints/step-9")
    exp = make(line, tmp_path / "new", {"init_model_path": path})
    exp.setup()
    exp.resume_or_load()
    assert (exp.model.weight.numpy() == paddle.load(f"{path}.pdparams")["weight"].numpy()).all()
    exp.close()
    assert trained(line, old, {"fresh": True}, max_iteration=2).iteration == 2
    assert (tmp_path / "runs/old.old-1/checkpoints/step-24.pdopt").exists()
