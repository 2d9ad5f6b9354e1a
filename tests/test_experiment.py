"""What a user writes: the class, its methods and attributes, setup, and several in one process."""

from __future__ import annotations

import argparse
import copy
import functools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader
from tiny import (
    Notes,
    Points,
    Tiny,
    curve,
    make,
    metrics,
    saved,
    trained,
    training_config,
)

from expbase import Config, ConfigError, ExperimentBase
from expbase.engine.run_states import Life
from expbase.extras.all_events import AllEvents
from expbase.mixins_in_front import put_in_front
from expbase.smoke import Smoke

# --- construction ------------------------------------------------------------------------------


def test_a_missing_method_is_named_at_construction(tmp_path: Path) -> None:
    class Half(ExperimentBase):
        def setup_model(self) -> None: ...

        def train_batch(self) -> None: ...

    with pytest.raises(TypeError, match="Half: setup_dataloader not defined"):
        make(Half, tmp_path)


def test_a_mistyped_method_is_named_beside_the_missing_one(tmp_path: Path) -> None:
    class Mistyped(ExperimentBase):
        def setup_dataloaders(self) -> None: ...

        def setup_model(self) -> None: ...

        def train_step(self) -> None: ...

        def valid(self) -> None: ...

    hint = "Did you mean setup_dataloader by setup_dataloaders? Did you mean train_"
    with pytest.raises(TypeError, match=re.escape(hint)):
        make(Mistyped, tmp_path)


@pytest.mark.parametrize("args", [{}, {"output": None}])
def test_the_class_names_the_output_directory_where_none_is_given(
    args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exp = Tiny(training_config(), argparse.Namespace(**args))
    assert exp.output_dir == tmp_path / "runs/Tiny"


def test_an_empty_output_is_an_error_at_construction() -> None:
    with pytest.raises(ConfigError, match=r"--output: '' given; expected the directory"):
        Tiny(training_config(), argparse.Namespace(output="", device="cpu"))


def test_three_training_keys_and_two_args_are_enough(tmp_path: Path) -> None:
    config = Config({"training": {"max_iteration": 2, "valid_interval": 2, "save_interval": 2}})
    exp = Tiny(config, argparse.Namespace(output=str(tmp_path / "run"), device=None))
    exp.setup()
    exp.run()
    assert exp.iteration == 2
    assert saved(tmp_path / "run") == [2]
    assert set(config.training) == {"max_iteration", "valid_interval", "save_interval"}


def test_an_unknown_device_is_an_error_that_names_it(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path / "run", {"device": "toaster"})
    with pytest.raises(ConfigError, match=r"--device: 'toaster' given; expected cpu"):
        exp.setup()


ATTRIBUTES = ("model", "optimizer", "train_loader", "valid_loader", "test_loader")


def test_what_a_user_sets_is_an_attribute_and_none_before(tmp_path: Path) -> None:
    assert not {*ATTRIBUTES, "visualizer"} & {*dir(ExperimentBase)}
    exp = make(Tiny, tmp_path)
    assert [getattr(exp, name) for name in ATTRIBUTES] == [None] * 5
    assert copy.copy(exp).model is None


def test_what_is_there_before_it_would_be_none_stays(tmp_path: Path) -> None:
    class Early(Tiny):
        optimizer = None

        def __init__(self, config: Config, args: Any) -> None:
            self.test_loader = [1]
            super().__init__(config, args)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

    exp = make(Early, tmp_path)
    assert exp.test_loader == [1]
    assert "optimizer" not in vars(exp)


def test_state_has_the_name_under_which_it_was_set_first(tmp_path: Path) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            self.net = paddle.nn.Linear(4, 2)
            self.model = self.net
            self.optimizer = paddle.optimizer.SGD(parameters=self.net.parameters())
            self.also = self.optimizer

    exp = make(Named, tmp_path / "run")
    exp.setup()
    exp.close()
    found = exp.internals.stateful_objects()
    assert ([*found.layers], [*found.optimizers]) == (["net"], ["optimizer"])


def test_a_property_may_take_the_place_of_an_attribute(tmp_path: Path) -> None:
    class Own(Tiny):
        def setup_dataloader(self) -> None:
            self.data = {"train": DataLoader(Points(), batch_size=4, shuffle=True)}
            self.data["valid"] = DataLoader(Points(10), batch_size=3)

        train_loader = property(lambda self: self.data["train"])
        valid_loader = property(lambda self: self.data["valid"])
        model = property(lambda self: self.net, lambda self, net: setattr(self, "net", net))

    trained(Own, tmp_path / "own")
    trained(Tiny, tmp_path / "run")
    for name in ("train/loss", "valid/accuracy"):
        assert curve(tmp_path / "own", name) == curve(tmp_path / "run", name)


def test_a_model_is_found_although_somebody_looked_before_it_was_there(tmp_path: Path) -> None:
    class Looking(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            assert not self.internals.stateful_objects().layers

        check_setup = ExperimentBase.check_setup  # Tiny's names what is no state, and looks anew

    assert trained(Looking, tmp_path, max_iteration=1).finished


# --- setup -------------------------------------------------------------------------------------


def test_setup_goes_in_the_order_of_the_design(tmp_path: Path) -> None:
    calls: list[str] = []
    names = (
        "prepare setup_output_dir dump_config setup_visualizer setup_logger setup_checkpointer "
        "on_setup_begin setup_dataloader setup_model startup check_setup on_setup_end"
    ).split()

    def wrapped(name: str) -> Any:
        def method(self: ExperimentBase) -> None:
            calls.append(name)
            getattr(super(traced, self), name)()

        return method

    traced: Any = type("Traced", (AllEvents, Tiny), {name: wrapped(name) for name in names})
    exp = make(traced, tmp_path / "run")
    exp.setup()
    exp.close()
    assert calls == names


def test_a_directory_that_nobody_locked_is_refused(tmp_path: Path) -> None:
    class WithoutSuper(Tiny):
        def setup_output_dir(self) -> None:
            Path(self.args.output).mkdir()

    with pytest.raises(TypeError, match=r"setup_output_dir: .*expected super's call"):
        make(WithoutSuper, tmp_path / "run").setup()


@pytest.mark.parametrize(
    ("attribute", "text"), [("model", "no paddle.nn.Layer"), ("optimizer", "no optimizer")]
)
def test_a_layer_and_an_optimizer_must_stand_on_self(
    tmp_path: Path, attribute: str, text: str
) -> None:
    class Lacking(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            setattr(self, attribute, None)

    with pytest.raises(ValueError, match=text):
        make(Lacking, tmp_path / "run").setup()


def test_an_optimizer_of_parameters_that_nobody_saves_is_refused(tmp_path: Path) -> None:
    class Hidden(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            head = paddle.nn.Linear(2, 2)
            self.head_optimizer = paddle.optimizer.SGD(parameters=head.parameters())

    with pytest.raises(ValueError, match=r"self\.head_optimizer: updates 2 parameters"):
        make(Hidden, tmp_path / "run").setup()


@pytest.mark.parametrize(
    ("training", "said_at"), [({"max_iteration": 2}, 2), ({"max_iteration": 0, "max_epoch": 2}, 10)]
)
def test_that_train_batch_reads_no_batch_is_said_once_and_early_if_only_epochs_end_the_run(
    tmp_path: Path, training: dict[str, int], said_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Careless(Tiny):
        def train_batch(self) -> None:
            next(iter(self.train_loader))
            if self.iteration == 12:
                self.stop("it would not end")

    trained(Careless, tmp_path / "run", **training)
    err = capfd.readouterr().err
    assert err.count("train_batch did not call self.read_batch()") == 1
    assert f"[{said_at}] in {said_at} updates train_batch did not call" in err


def test_a_trial_says_that_train_batch_reads_no_batch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Careless(Tiny):
        def read_batch(self) -> Any:
            return next(iter(self.train_loader))

    with put_in_front(Smoke):
        assert trained(Careless, tmp_path / "run").smoke_is_trained
    assert "train_batch did not call self.read_batch()" in capfd.readouterr().err


def test_state_is_named_before_training(tmp_path: Path) -> None:
    class Late(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.register_stateful("iteration")

    with pytest.raises(RuntimeError, match="state is named in setup_model"):
        trained(Late, tmp_path / "run")


def test_read_batch_in_validation_is_an_error(tmp_path: Path) -> None:
    class Stealing(Tiny):
        def valid(self) -> None:  # type: ignore[override]
            self.read_batch()

    with pytest.raises(RuntimeError, match=r"read_batch: called in the phase 'valid'.*valid_batch"):
        trained(Stealing, tmp_path / "run")


def six(**options: Any) -> DataLoader:
    return DataLoader(Points(6), batch_size=8, **options)


@pytest.mark.parametrize(
    ("name", "step", "loader", "kind", "text"),
    [
        (
            "train_loader",
            "setup_dataloader",
            lambda: six(drop_last=True),
            ValueError,
            "has no batch; expected at least one. It has 6 samples, batch_size=8, drop_last=True.",
        ),
        (
            "test_loader",
            "setup_model",
            list,
            ValueError,
            "has no batch; expected at least one. It is a list of 0 batches.",
        ),
        ("valid_loader", "setup_dataloader", lambda: iter(six()), TypeError, "Iter"),
        (
            "valid_loader",
            "setup_model",
            lambda: (batch for batch in six()),
            TypeError,
            "<generator",
        ),
        (
            "train_loader",
            "setup_model",
            six,
            ValueError,
            "set too late; expected it in setup_dataloader",
        ),
    ],
    ids=["drop_last", "list", "iter", "generator", "late"],
)
def test_a_loader_that_can_give_no_result_is_an_error_in_setup(
    tmp_path: Path, name: str, step: str, loader: Any, kind: type[Exception], text: str
) -> None:
    def setting(self: Any) -> None:
        getattr(super(cls, self), step)()
        setattr(self, name, loader())

    cls = type("Setting", (Tiny,), {step: setting})
    with pytest.raises(kind, match=rf"self\.{name}: .*{re.escape(text)}"):
        make(cls, tmp_path / "run").setup()


def test_what_setup_asks_of_loaders_moves_no_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Points):
        draws = False

        def __len__(self) -> int:
            if self.draws:
                paddle.rand([1]), np.random.rand(), random.random()
            return super().__len__()

    def first(folder: str, step: str, **options: int) -> list[Any]:
        """What is drawn after a step of setup, whose loader draws when it is asked, or not."""

        class Drawing(AllEvents, Tiny):
            def setup_dataloader(self) -> None:
                super().setup_dataloader()
                paddle.rand([1]), np.random.rand(), random.random()
                self.noted = Notes()
                if step != "startup":
                    self.give()

            def give(self) -> None:
                for name in ("train_loader", "valid_loader", "test_loader"):
                    if step != "startup" or name != "train_loader":
                        setattr(self, name, DataLoader(Asked(8), batch_size=2))
                monkeypatch.setattr(Asked, "draws", bool(step))

            def setup_model(self) -> None:
                self.draw()
                super().setup_model()

            def draw(self) -> None:
                self.noted.extend([paddle.rand([1]).item(), np.random.rand(), random.random()])

            def startup(self) -> None:
                if step == "startup":
                    self.give()

            def on_setup_end(self) -> None:
                self.draw()

        monkeypatch.setattr(Asked, "draws", False)
        exp: Any = make(Drawing, tmp_path / folder, **options)
        exp.setup()
        exp.close()
        return list(exp.noted)

    assert first("silent", "") == first("asked", "setup_dataloader") == first("late", "startup")
    assert first("shares", "setup_dataloader", shares=2) == first("plain", "")


def test_lookahead_and_lbfgs_are_refused_unless_excluded(tmp_path: Path) -> None:
    class Looking(Tiny):
        excluded = False

        def setup_model(self) -> None:
            super().setup_model()
            self.optimizer = paddle.incubate.LookAhead(self.optimizer, alpha=0.2, k=2)
            if self.excluded:
                self.exclude_from_state("optimizer")

    with pytest.raises(ValueError, match=r"self\.optimizer: paddle's LookAhead does not continue"):
        make(Looking, tmp_path / "run").setup()
    Looking.excluded = True
    exp = make(Looking, tmp_path / "run")
    exp.setup()
    exp.close()


def test_two_experiments_in_one_process_do_not_meet(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "alone", max_iteration=6)
    one, other = (make(Tiny, tmp_path / name, max_iteration=6) for name in ("one", "other"))
    for exp in (one, other):
        exp.setup()
    for _ in range(5):  # by turns, in one process, by loops of our own
        for exp in (one, other):
            assert exp.going_on()
            exp.train_batch()
            exp.end_iteration()
    one.save()
    one.close()
    args = {"checkpoint_path": str(tmp_path / "one")}
    trained(Tiny, tmp_path / "crossed", args, max_iteration=6)  # while the other is alive
    trained(Tiny, tmp_path / "one", max_iteration=6)
    other.run()
    end = "checkpoints/step-00000006"
    for file in ("model.safetensors", "optimizer.safetensors"):
        alone = (tmp_path / "alone" / end / file).read_bytes()
        for name in ("one", "other", "crossed"):
            assert (tmp_path / name / end / file).read_bytes() == alone, (name, file)
    for name, count in (("one", 1), ("other", 0)):
        assert (tmp_path / name / "worker_0.log").read_text().count("[5] saved") == count


def test_a_stateful_object_that_appears_after_setup_is_an_error(tmp_path: Path) -> None:
    class Late(Tiny):
        def on_train_begin(self) -> None:
            self.ema = paddle.nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"self\.ema: appeared after setup"):
        trained(Late, tmp_path / "run")


class Unmeasured(Tiny):
    """Tiny without a validation, and without data for one."""

    valid = ExperimentBase.valid  # type: ignore[assignment]

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.valid_loader = None


def test_an_experiment_without_valid_trains_and_one_line_says_that_nothing_is_validated(
    tmp_path: Path,
) -> None:
    copied = Notes()

    class Copied(Unmeasured):
        def on_save_checkpoint(self) -> None:
            copied.append(self.iteration)

    for training in ({"valid_interval": 1}, {"valid_every_epoch": 1, "max_epoch": 1}):
        output = tmp_path / str(len([*tmp_path.iterdir()]))
        assert trained(Copied, output, save_interval=4, keep_best=2, **training).finished
        text = (output / "worker_0.log").read_text()
        assert re.findall(r"valid  .*", text) == ["valid       never: Copied has no valid()"]
        assert not any("valid/" in name for line in metrics(output) for name in line)
        assert saved(output) == [4, 6]
    assert copied == [4, 6] * 2  # and none before a validation
    with put_in_front(Smoke):
        exp = trained(Unmeasured, tmp_path / "smoke")
    assert exp.smoke_did == "saved and loaded"


def test_a_run_whose_code_has_lost_its_valid_goes_on_without_the_validation_that_was_due(
    tmp_path: Path,
) -> None:
    class Failing(Tiny):
        def valid(self) -> dict[str, float]:
            raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        trained(Failing, tmp_path, max_iteration=3)
    assert trained(Unmeasured, tmp_path, max_iteration=4).finished


def test_data_to_validate_with_needs_a_method_that_does_it(tmp_path: Path) -> None:
    class Without(Tiny):
        valid = ExperimentBase.valid  # type: ignore[assignment]

        def validate(self) -> None: ...

    text = (
        "Without: self.valid_loader is set, and valid not defined; expected `def valid(self):` "
        "with `for batch in self.valid_batches(): self.log(…)`, or no self.valid_loader, or "
        "training.valid_interval=0. Did you mean valid by validate?"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        make(Without, tmp_path / "run").setup()
    assert trained(Without, tmp_path / "never", valid_interval=0).iteration == 6
    with put_in_front(Smoke):
        assert trained(Without, tmp_path / "smoke", valid_interval=0).smoke_is_trained


def test_a_name_by_habit_and_an_experiment_without_a_config_are_answered(tmp_path: Path) -> None:
    class Lit(ExperimentBase):
        def setup_dataloader(self) -> None: ...

        def setup_model(self) -> None: ...

        def training_step(self) -> None: ...

    with pytest.raises(TypeError, match=r"Did you mean train_batch by training_step\?$"):
        make(Lit, tmp_path)
    with pytest.raises(TypeError, match=r"^Tiny\(\): called without a config; expected main\(Tiny"):
        Tiny()  # type: ignore[call-arg]
    assert type(copy.copy(make(Tiny, tmp_path))).__name__ == "Tiny"


def test_what_needs_valid_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training\.monitor: 'loss' given, and Unmeasured"):
        make(Unmeasured, tmp_path / "run", monitor="loss")
    trained(Unmeasured, tmp_path / "run")
    with pytest.raises(TypeError, match=r"Unmeasured: valid not defined; expected the methods"):
        make(Unmeasured, tmp_path / "run", {"evaluate": "last"})
    make(Unmeasured, tmp_path / "run", {"export": "last"})  # which needs none
    exp = make(Unmeasured, tmp_path / "other")
    exp.setup()
    with (
        exp.internals.closing(),
        pytest.raises(TypeError, match=r"^evaluate: calls valid, and Unmeasured"),
    ):
        exp.evaluate()


@pytest.mark.parametrize("name", ["setup_checkpointer", "check_setup", "setup_logger", "new_epoch"])
def test_a_step_without_super_is_an_error_in_words(tmp_path: Path, name: str) -> None:
    own = type("Own", (Tiny,), {name: lambda self: None})
    with pytest.raises(TypeError, match=rf"^{name}: does not call super\(\)\.{name}\(\); expected"):
        trained(own, tmp_path)


def test_the_setup_of_parakeets_base_class_pasted_as_an_override_says_what_it_must_call(
    tmp_path: Path,
) -> None:
    class Pasted(Tiny):
        def setup(self) -> None:
            self.setup_output_dir()
            self.dump_config()
            self.setup_visualizer()
            self.setup_logger()
            self.setup_checkpointer()
            self.setup_dataloader()
            self.setup_model()
            self.iteration = 0
            self.epoch = 0

    exp = make(Pasted, tmp_path / "run")
    for name in ("setup", "run"):
        with pytest.raises(
            RuntimeError, match=r"Pasted overrides setup, and must call super\(\)\.s"
        ):
            getattr(exp, name)()
    assert not (tmp_path / "run").exists()


def test_a_run_is_closed_although_an_override_of_close_forgets_it(tmp_path: Path) -> None:
    class Closing(Tiny):
        def close(self) -> None:
            pass

    assert trained(Closing, tmp_path).internals.life is Life.CLOSED


@pytest.mark.parametrize("name", ["run", "evaluate", "resume_or_load", "going_on"])
def test_what_comes_before_setup_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}: called before setup\(\); expected exp.setup"):
        getattr(make(Tiny, tmp_path), name)()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("log", {}, "self.log: dict given, which hides the method of that name; expected another"),
        ("average", paddle.nn.AvgPool1D(2), "self.average: AvgPool1D given, which hides the"),
        ("rank", 3, "self.rank: 3 given, and expbase sets it; expected another name."),
        ("config", {}, "self.config: {} given, and expbase sets it; expected another name, or sup"),
    ],
)
def test_an_attribute_does_not_take_a_name_of_expbases(
    name: str, value: Any, said: str, tmp_path: Path
) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            setattr(self, name, value)

    with pytest.raises(AttributeError) as caught:
        trained(Named, tmp_path / "run")
    assert str(caught.value).startswith(said)


def test_a_function_may_take_the_place_of_a_method(tmp_path: Path) -> None:
    class Replaced(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.train_batch = functools.partial(self.train_batch)  # type: ignore[method-assign]

    assert trained(Replaced, tmp_path / "run", max_iteration=2).finished


@pytest.mark.parametrize("signature", ["self", "self, hidden=3", "self, config, args, hidden"])
def test_an_init_that_does_not_take_config_and_args_says_what_it_must_be(
    signature: str, tmp_path: Path
) -> None:
    own = type("Own", (Tiny,), {"__init__": eval(f"lambda {signature}: None")})
    with pytest.raises(
        TypeError, match=r"Own\.__init__: .*; expected `def __init__\(self, config,"
    ):
        make(own, tmp_path)


def test_an_init_with_more_arguments_may_be_called_with_them(tmp_path: Path) -> None:
    class Own(Tiny):
        def __init__(self, config: Config, args: Any, *, hidden: int) -> None:
            super().__init__(config, args)
            self.hidden = hidden

    made = Own(training_config(), argparse.Namespace(output=str(tmp_path)), hidden=3)
    assert made.hidden == 3


def test_an_init_that_forgets_super_is_told(tmp_path: Path) -> None:
    own = type("Own", (Tiny,), {"__init__": lambda self, config, args: None})
    with pytest.raises(
        AttributeError, match=r"Its __init__ must call super\(\)\.__init__\(config,"
    ):
        make(own, tmp_path).setup()


def test_a_property_in_which_an_attribute_is_missing_names_that_attribute(tmp_path: Path) -> None:
    class Own(Tiny):
        @property
        def doubled(self) -> int:
            return 2 * self.forgotten  # type: ignore[attr-defined, no-any-return]

    exp = make(Own, tmp_path)
    with pytest.raises(AttributeError, match=r"'Own' object has no attribute 'forgotten'$"):
        _ = exp.doubled  # type: ignore[attr-defined]
    assert not hasattr(exp, "anything")


def test_an_override_that_cannot_be_called_is_named_at_construction(tmp_path: Path) -> None:
    class Wrong(Tiny):
        def valid(self, loader: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError, match=r"Wrong\.valid: cannot be called as .*; expected \(self"):
        make(Wrong, tmp_path / "run")
