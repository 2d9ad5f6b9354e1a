"""--evaluate, --export and load_checkpoint: they look at a run, and leave it as it is."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from graded import BEST, SETTINGS, Graded, answer, same_run, snapshot, steps
from paddle.io import DataLoader
from tiny import Helped, Notes, Points, Tiny, curve, make, run_ranks, same_bits, trained

from expbase import Config, main, on
from expbase.base.background import Background
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.model_files import read_weights


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run; nothing here may change it."""
    output = tmp_path_factory.mktemp("graded") / "run"
    trained(Graded, output, **SETTINGS)
    return output


class Drawing(Graded):
    """Writes files of its own, by what the template offers for that."""

    def valid(self) -> dict[str, float]:
        self.visualizer.add_scalar("own", 1.0, self.iteration)
        self.logger.info("drawn")
        return super().valid()

    def on_evaluate_end(self, results: Any) -> None:
        self.save()


@pytest.mark.device
def test_evaluate_gives_what_was_logged_then_of_a_run_in_use_and_changes_no_file(
    graded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = make(Graded, graded, **SETTINGS)
    holder.setup()
    with holder.internals.closing():
        with pytest.raises(SystemExit, match="is in use"):
            main(Graded, argv=["--output", str(graded), "training.seed=5"])
        before = snapshot(graded)
        for which, iteration in (("best", BEST), ("last", 6), ("2", 2)):
            given = answer(capsys, Drawing, "--output", str(graded), "--evaluate", which)
            assert snapshot(graded) == before
            names = ("loss", "samples", "score", "rank")
            logged = {name: curve(graded, f"valid/{name}")[iteration] for name in names}
            facts = {"iteration": iteration, "epoch": 1, "loader": "valid_loader"}
            assert given == {**facts, **logged}, which


def test_evaluate_takes_the_runs_own_config_but_for_what_the_command_line_says(
    graded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--output", str(graded), "--evaluate", "last")
    logged = curve(graded, "valid/loss")[6]
    (tmp_path / "c.yaml").write_text("training: {seed: 6}\n")
    config = ("--config", str(tmp_path / "c.yaml"))
    assert answer(capsys, Graded, *words)["loss"] == logged  # the validation draws: by seed 5
    other = answer(capsys, Graded, *words, "training.seed=6")["loss"]
    assert other != logged
    assert answer(capsys, Graded, *words, *config)["loss"] == other
    assert answer(capsys, Graded, *words, *config, "training.seed=5")["loss"] == logged


def test_the_card_of_one_that_looks_names_the_values_that_were_given_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(Tiny, argv=["--output", str(tmp_path), "training.max_epoch=1", "training.seed=3"])
    capsys.readouterr()
    main(Tiny, argv=["--output", str(tmp_path), "--evaluate", "last"])
    rows = re.findall(r" config +(.*)", capsys.readouterr().err)
    assert sorted(rows) == ["training.max_epoch=1", "training.seed=3"]


class Before(Tiny):
    """Its config has a key that leaves."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.stages = [Config({"lr": 0.1}), Config({"lr": 0.2})]
        config.net = Config({"width": 4, "old": 7})
        config.training.update(max_iteration=2)
        return config

    def setup_model(self) -> None:
        assert [stage.lr for stage in self.config.stages] == [0.1, 0.2]
        super().setup_model()


class After(Before):
    """The same class later."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        del config.net["old"]
        return config


def test_a_run_is_looked_at_with_the_keys_that_its_class_has_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(Before, argv=["--output", str(tmp_path / "run"), "net.old=8", "net.width=5"])
    capsys.readouterr()
    exp = main(After, argv=["--output", str(tmp_path / "run"), "--evaluate", "last"])
    assert exp.config.net == {"width": 5, "old": 8}
    line = "config.yaml: default_config has no such keys any more; the run's values hold: net.old=8"
    assert capsys.readouterr().err.count(line) == 1
    argv = ["--output", str(tmp_path / "run"), "--evaluate", "last", "net.odd=8"]
    with pytest.raises(SystemExit, match=r"unknown key 'net\.odd'"):
        main(After, argv=argv)


def test_evaluate_takes_the_test_data_if_there_are_any(
    graded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tested(Graded):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.test_loader = DataLoader(Points(6), batch_size=4)

    given = answer(capsys, Tested, "--output", str(graded), "--evaluate", "best")
    assert (given["loader"], given["samples"], given["iteration"]) == ("test_loader", 6, BEST)


def test_a_number_that_json_does_not_have_is_null_or_text(
    graded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Infinite(Graded):
        def valid(self) -> dict[str, float]:
            return {"nan": math.nan, "infinite": -math.inf}

    main(Infinite, argv=["--output", str(graded), "--evaluate", "last"])
    given = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (given["nan"], given["infinite"]) == ("nan", "-inf")


@pytest.fixture(scope="module")
def unmonitored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a best checkpoint, and in `empty` one without any."""
    output = tmp_path_factory.mktemp("unmonitored") / "run"
    trained(Graded, output, **{**SETTINGS, "monitor": "", "max_iteration": 2})
    trained(Graded, output.with_name("empty"), max_iteration=1, save_interval=0)
    return output


@pytest.mark.parametrize(
    ("run", "option", "which", "text"),
    [
        ("run", "--evaluate", "7", r"step-00000007: does not exist; there are: step-00000002\."),
        (
            "run",
            "--evaluate",
            "best",
            r"no checkpoint is the best one; expected a run whose "
            r"training\.monitor names a metric of valid\(\), and that was validated\.",
        ),
        ("run", "--evaluate", "-1", "'-1' given; expected best, last or an iteration"),
        ("run", "--export", "", "'' given; expected best, last or an iteration"),  # a variable
        ("empty", "--evaluate", "last", "no intact checkpoint there"),
        ("nowhere", "--export", "last", "nowhere' holds no run; expected the directory of one"),
        ("run/checkpoints", "--evaluate", "last", "holds no run; expected the directory of one"),
    ],
)
def test_what_cannot_be_looked_at_is_answered_by_one_line_and_changes_nothing(
    unmonitored: Path,
    capsys: pytest.CaptureFixture[str],
    run: str,
    option: str,
    which: str,
    text: str,
) -> None:
    before = snapshot(unmonitored.parent)
    with pytest.raises(SystemExit, match=text) as caught:
        main(Graded, argv=["--output", str(unmonitored.parent / run), f"{option}={which}"])
    assert caught.value.code == 78
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert snapshot(unmonitored.parent) == before


@pytest.mark.parametrize("option", ["--evaluate", "--export"])
def test_a_fresh_start_is_not_something_that_looks(graded: Path, option: str) -> None:
    before = snapshot(graded.parent)
    with pytest.raises(SystemExit, match="--fresh: given with --evaluate or --export"):
        main(Graded, argv=["--output", str(graded), option, "last", "--fresh"])
    assert snapshot(graded.parent) == before


@pytest.mark.device
def test_an_exported_model_gives_the_outputs_of_its_checkpoint_in_eval_mode(
    graded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(graded, tmp_path / "run")
    given = answer(capsys, Graded, "--output", str(run), "--export", "best")
    assert given["iteration"] == BEST
    assert (run / f"export/step-0000000{BEST}/model") == Path(given["exported"])
    loaded = paddle.jit.load(given["exported"])
    exp = make(Graded, tmp_path / "other")
    exp.setup()
    with exp.internals.closing():
        outputs = {}
        for iteration in (BEST, 6):
            exp.load_model(run / f"checkpoints/step-0000000{iteration}")
            exp.model.eval()
            for size in (1, 5):
                points = paddle.to_tensor(Points(5).points[:size])
                outputs[iteration, size] = exp.model(points).numpy(), loaded(points).numpy()
    for size in (1, 5):
        assert np.allclose(*outputs[BEST, size], atol=1e-6)
        assert not np.allclose(*outputs[6, size], atol=1e-6)


def test_an_export_that_cannot_be_written_is_told_in_a_line(graded: Path, tmp_path: Path) -> None:
    shutil.copytree(graded, tmp_path / "run")
    (tmp_path / "run/export").write_text("in the way")
    with pytest.raises(SystemExit, match=r"/model: cannot be written: Not a directory\."):
        main(Graded, argv=["--output", str(tmp_path / "run"), "--export", "best"])


def test_an_export_for_which_the_disk_has_no_room_is_told_and_writes_nothing(
    graded: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(graded, tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # it needs a little more
    try:
        with pytest.raises(SystemExit, match=r"/model: cannot be written: File too large\."):
            main(Graded, argv=["--output", str(run), "--export", "2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*run.glob("export/*/*")] == []


def test_export_without_an_input_spec_says_what_it_needs(graded: Path, tmp_path: Path) -> None:
    class Without(Graded):
        def setup_model(self) -> None:
            super().setup_model()
            del self.input_spec

    with pytest.raises(SystemExit, match=r"error: export: no input_spec given"):  # and one line
        main(Without, argv=["--output", str(graded), "--export", "last"])
    assert not (graded / "export").exists()
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    with (
        exp.internals.closing(),
        pytest.raises(ValueError, match=r"no input_spec given.*self\.input_spec"),
    ):
        exp.export(tmp_path / "exported/model")
    assert not (tmp_path / "exported").exists()


def test_what_is_no_layer_is_not_written_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    spec = [paddle.static.InputSpec([None, 4])]

    class Called(paddle.nn.Layer):
        """The way that the error names."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, points: Any) -> Any:
            return self.model.features(points)

    class Net(paddle.nn.Linear):
        def features(self, points: Any) -> Any:
            return self(points) + 1.0

    net = Net(4, 1)
    with exp.internals.closing():
        for given, hint in ((net.features, True), (lambda x: x, True), (exp.optimizer, False)):
            for call, write in (
                ("export", lambda layer: exp.export(tmp_path / "e/model", spec, layer)),
                ("save_model", lambda layer: exp.save_model(tmp_path / "e.safetensors", layer)),
            ):
                with pytest.raises(
                    TypeError, match=f"^{call}: .*; expected a paddle.nn.Layer"
                ) as e:
                    write(given)
                assert ("for a function or a method one whose forward" in str(e.value)) == hint
        exp.model = None
        with pytest.raises(TypeError, match=r"export: no self\.model is there, and no layer given"):
            exp.export(tmp_path / "e/model", spec)
        assert not [*tmp_path.glob("e*")]
        exp.export(tmp_path / "e/model", spec, Called(net))
    outputs = paddle.jit.load(str(tmp_path / "e/model"))(paddle.ones([2, 4]))
    assert outputs.tolist() == net.features(paddle.ones([2, 4])).tolist()


def test_load_checkpoint_takes_a_number(graded: Path, tmp_path: Path) -> None:
    output = shutil.copytree(graded, tmp_path / "run")
    exp = make(Graded, output, **SETTINGS)
    exp.setup()
    with exp.internals.closing():
        exp.load_checkpoint(2)
        assert exp.iteration == 2
        with pytest.raises(CheckpointError, match="step-00000003: does not exist"):
            exp.load_checkpoint(3)


@pytest.mark.device
def test_any_layer_can_be_exported_at_any_time_and_that_is_done_in_eval_mode(
    tmp_path: Path,
) -> None:
    class Offset(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.offset = self.create_parameter([4], is_bias=True)  # zeros

        def forward(self, points: Any) -> Any:
            return points + self.offset + (100.0 if self.training else 1.0)

    class Two(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.offset = Offset()

    exp = make(Two, tmp_path / "run")
    exp.setup()
    with exp.internals.closing():
        for number, layer in enumerate((exp.offset, Offset())):  # one does not stand on self
            path = tmp_path / f"exported_{number}/offset"
            exp.export(path, [paddle.static.InputSpec([None, 4])], layer)
            assert layer.training
            outputs = paddle.jit.load(str(path))(paddle.zeros([3, 4]))
            assert outputs.numpy().tolist() == [[1.0] * 4] * 3
            names = {file.name.partition(".")[0] for file in path.parent.iterdir()}
            assert names == {"offset"}  # nothing half written is left


class Testing(Graded):
    """Tests its best weights at the end."""

    __test__ = False  # pytest takes the name for its own

    def on_train_end(self) -> None:
        self.load_checkpoint("best")
        self.best_weights = {n: t.numpy().copy() for n, t in self.model.state_dict().items()}
        self.tested = self.evaluate(self.other)
        self.save()


def test_the_best_checkpoint_can_be_tested_at_the_end_and_the_run_goes_on_from_the_last(
    graded: Path, tmp_path: Path
) -> None:
    shutil.copytree(graded, tmp_path / "plain")
    exp = trained(Testing, tmp_path / "tested", **SETTINGS)
    best = read_weights(graded / f"checkpoints/step-0000000{BEST}")["model"]
    last = read_weights(graded / "checkpoints/step-00000006")["model"]
    assert exp.best_weights.keys() == best.keys()
    for name, array in best.items():
        assert array.data.tobytes() == exp.best_weights[name].tobytes(), name
    assert any(best[name].data.tobytes() != last[name].data.tobytes() for name in best)
    assert (exp.tested["samples"], exp.iteration, exp.finished) == (7, 6, True)
    same_run(tmp_path / "plain", tmp_path / "tested")
    for name in ("plain", "tested"):  # a longer one goes on from the last, not from the best
        trained(Graded, tmp_path / name, **{**SETTINGS, "max_iteration": 7})
    assert steps(tmp_path / "tested")[-1] == "step-00000007"
    same_run(tmp_path / "plain", tmp_path / "tested")


class Annealed(Tiny):
    """From iteration 3 on much is another, and the best checkpoint is that of iteration 2."""

    def setup_model(self) -> None:
        super().setup_model()
        self.factor, self.rates, self.seen = 1.0, {"one": 1.0}, [0]
        self.heads = [paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2)]
        self.active = self.heads[0]
        self.testing = False

    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 3:
            self.factor, self.rates["two"], self.phase, self.active = 5.0, 2.0, 1, self.heads[1]
            self.seen.append(3)
            self.model.slope = 2.0
            self.model[0].weight.stop_gradient = True

    def valid(self) -> dict[str, float]:
        return {"score": -abs(self.iteration - 2)}

    def on_train_end(self) -> None:
        self.testing, self.kept = True, "this"
        self.load_checkpoint("best")


def test_what_has_changed_after_the_best_checkpoint_is_as_it_was_then(tmp_path: Path) -> None:
    exp: Any = trained(
        Annealed, tmp_path, max_iteration=4, valid_interval=1, monitor="score", monitor_mode="max"
    )
    assert (exp.factor, exp.rates, exp.active) == (1.0, {"one": 1.0}, exp.heads[0])
    assert not hasattr(exp, "phase")
    assert not hasattr(exp.model, "slope")
    assert exp.model[0].weight.stop_gradient is False
    assert (exp.testing, exp.kept) == (True, "this")  # on_train_end has set them itself
    log = (tmp_path / "worker_0.log").read_text()
    assert "WARNING: step-00000002: self.seen: not as it was then. Training has changed it" in log
    assert log.count("not as it was then") == 1


@pytest.mark.parametrize("how", ["thawed", "made anew"])
def test_the_best_checkpoint_is_loaded_although_its_optimizer_has_other_accumulators(
    tmp_path: Path, how: str
) -> None:
    class Tuned(Helped):
        def setup_model(self) -> None:
            super().setup_model()
            self.model = paddle.nn.Sequential(self.model, paddle.nn.Linear(2, 2))
            for weight in self.model[0].parameters():
                weight.stop_gradient = how == "thawed"
            self.optimizer = self.adam(self.model)

        def adam(self, layer: Any) -> Any:
            return paddle.optimizer.Adam(0.01, parameters=layer.parameters())

        def train_batch(self) -> None:
            if self.iteration == 3 and how == "thawed":
                for weight in self.model[0].parameters():
                    weight.stop_gradient = False
            elif self.iteration == 3:
                self.optimizer = self.adam(self.model[1])
            super().train_batch()

        def valid(self) -> dict[str, float]:
            return {"score": -abs(self.iteration - 2)}

        def on_train_end(self) -> None:
            self.load_checkpoint("best")
            self.now = self.model[1].weight.numpy()

    settings = {"valid_interval": 1, "monitor": "score", "monitor_mode": "max"}
    exp: Any = trained(Tuned, tmp_path, max_iteration=4, **settings)
    weights = read_weights(tmp_path / "checkpoints/step-00000002")["model"]
    assert exp.now.tobytes() == weights["1.weight"].data.tobytes()
    assert "not as it was then" not in (tmp_path / "worker_0.log").read_text()


def test_load_best_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rising(Testing):
        def valid(self) -> dict[str, float]:
            return {"score": self.iteration, "samples": 7}

        def train_batch(self) -> None:
            super().train_batch()
            self.now = self.model[0].weight.numpy().copy()

    asked = threading.Event()
    start, wait = Background.start, Background.wait

    def begin(self: Background, job: Callable[[], object]) -> None:
        asked.clear()
        start(self, lambda: asked.wait(10) and job())  # a disk that is as slow as may be

    def end(self: Background) -> None:
        asked.set()
        wait(self)

    monkeypatch.setattr(Background, "start", begin)
    monkeypatch.setattr(Background, "wait", end)
    exp = trained(Rising, tmp_path / "run", **SETTINGS)
    assert np.array_equal(exp.best_weights["0.weight"], exp.now)


def test_what_was_brought_back_to_be_looked_at_is_not_saved(graded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(graded, tmp_path / "run")
    exp = make(Graded, run, **{**SETTINGS, "max_iteration": 8})
    exp.setup()
    before = steps(run)
    exp.load_checkpoint("best")
    with pytest.raises(RuntimeError, match=r"save: the state is that of step-00000004, loaded"):
        exp.save()
    assert steps(run) == before
    with pytest.raises(CheckpointError, match=r"step-00000003: does not exist"):
        exp.load_checkpoint("3")
    exp.run()  # brings the whole state back
    again = shutil.copytree(graded, tmp_path / "again")
    trained(Graded, again, **{**SETTINGS, "max_iteration": 8})
    same_bits(*(folder / "checkpoints/step-00000008" for folder in (run, again)))


def test_load_best_within_training_is_refused_and_changes_nothing(
    graded: Path, tmp_path: Path
) -> None:
    class Hasty(Graded):
        refused: list[int] = []  # noqa: RUF012

        @on("on_train_batch_end")
        @on("on_evaluate_end")
        def hurry(self, *results: Any) -> None:
            with pytest.raises(RuntimeError, match="load_checkpoint: called before the end"):
                self.load_checkpoint("best")
            self.refused.append(self.iteration)

        def on_train_begin(self) -> None:
            self.hurry()

    trained(Hasty, tmp_path / "hasty", **{**SETTINGS, "max_iteration": 4})
    assert Hasty.refused == [0, 1, 2, 2, 3, 4, 4]
    exp = make(Hasty, tmp_path / "hasty", **SETTINGS)
    exp.setup()
    exp.resume_or_load()
    exp.hurry()  # run() would train on from the best weights
    exp.run()
    same_run(graded, tmp_path / "hasty")


TWO = """
import contextlib, io, json, sys
from pathlib import Path
import numpy as np
from graded import SETTINGS, Graded
from test_evaluate_and_export import Everything
from test_prediction import LOADERS, Oracle
from tiny import DEVICE, make, trained
from expbase import main

if __name__ == "__main__":
    folder, graded = Path(sys.argv[1]), sys.argv[2]
    facts = {}

    def printed(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(Graded, argv=["--device", DEVICE, *words])
        return out.getvalue()

    facts["evaluated"] = printed("--output", graded, "--evaluate", "best")
    exp = make(Graded, Path(graded), {"evaluate": "last"}, seed=5)
    exp.setup()
    with exp.internals.closing():
        exp.load_checkpoint("last")
        facts["predicted"] = [np.stack(exp.predict(loader)).tolist()
                              for loader in (exp.valid_loader, exp.other)]
    oracle = make(Oracle, folder / "oracle")
    oracle.setup()
    with oracle.internals.closing():
        kinds = ("in order", "shuffled", "distributed sampler", "ready batches")
        facts["orders"] = [np.stack(oracle.predict(LOADERS[kind]())).tolist() for kind in kinds]
        facts["stream"] = np.stack(oracle.predict([LOADERS["list"]()[oracle.rank]])).tolist()
    options = {**SETTINGS, "max_iteration": 5}
    trained(Graded, folder / "plain", **options)
    everything = trained(Everything, folder / "everything", **options)
    facts["found"], facts["best"] = everything.found[0], everything.best
    facts["of_two"] = printed("--output", str(folder / "plain"), "--evaluate", "4")
    (folder / f"facts_{everything.rank}.json").write_text(json.dumps(facts))
"""


class Everything(Graded):
    """All of it in one run."""

    found = Notes()

    @on("on_evaluate_end")
    def look(self, results: Any) -> None:
        if self.iteration == BEST and not self.found:
            self.found.append("begun")  # the next line comes back to here
            self.found[:] = [self.evaluate(self.other)]
            self.predict(self.train_loader)
            self.export(self.output_dir / "exported/model")

    def on_train_end(self) -> None:
        self.load_checkpoint("best")
        self.best = self.unwrap(self.model)[0].weight.numpy().tolist()


@pytest.mark.long
def test_two_ranks_look_together_and_see_what_one_process_sees(
    graded: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO)
    for rank in run_ranks([[str(script), str(tmp_path), str(graded)]] * 2):
        assert rank.returncode == 0, rank.stderr
    one, two = (json.loads((tmp_path / f"facts_{rank}.json").read_text()) for rank in range(2))

    # --evaluate: rank 0 alone prints, and what one process has logged but for the order of a sum
    given = json.loads(one["evaluated"])
    assert (given["iteration"], given["samples"]) == (BEST, 10)
    assert math.isclose(given["loss"], curve(graded, "valid/loss")[BEST], rel_tol=1e-6)
    assert two["evaluated"] == ""
    assert json.loads(one["of_two"])["loss"] == curve(tmp_path / "plain", "valid/loss")[4]

    # predict: the whole list on both ranks, with the bits of one process
    exp = make(Graded, graded, {"evaluate": "last"}, seed=5)
    exp.setup()
    with exp.internals.closing():
        exp.load_checkpoint("last")
        alone = [np.stack(exp.predict(it)).tolist() for it in (exp.valid_loader, exp.other)]
    assert one["predicted"] == two["predicted"] == alone
    assert one["orders"] == two["orders"] == [list(range(11))] * 4
    assert one["stream"] == two["stream"] == [0, 1, 2, 3]  # rank by rank

    # training does not feel any of it, on no rank
    same_run(tmp_path / "plain", tmp_path / "everything")
    assert one["found"] == two["found"]
    assert (one["found"]["samples"], one["found"]["rank"]) == (7, 0)
    assert one["best"] == two["best"]
    best = read_weights(tmp_path / f"plain/checkpoints/step-0000000{BEST}")["model"]["0.weight"]
    assert best.data.tobytes() == np.array(one["best"], "float32").tobytes()
