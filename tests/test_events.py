"""The events of a run: their order, listeners and filters, and what a failing one does."""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import Helped, Notes, Tiny, make, metrics, same_bits, trained

from expbase import ExperimentBase, on
from expbase.checkpoint import storage
from expbase.events import OF_MIXINS, Filter, events_of
from expbase.extras.all_events import AllEvents
from expbase.extras.mixins import GradientClipping
from expbase.extras.prediction import Prediction

DOCS_FOLDER = Path(__file__).parents[1] / "docs"


class Stepped(Helped):
    """Three batches per epoch, its updates made by the helpers."""

    size = 12
    trace: Notes


def _recorded(name: str) -> Callable[..., Any]:
    def record(self: Any, *args: Any) -> Any:
        self.trace.append(name)
        return getattr(super(Traced, self), name)(*args)

    return record


class Traced(AllEvents, Stepped):
    """Notes every event, and what comes between them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trace = Notes()
        self.exclude_from_state("trace")


# When a checkpoint is on the disk, is the disk's affair.
for _name in (
    *(event for event in events_of(Traced) if event != "on_checkpoint_written"),
    "prepare", "setup_dataloader", "setup_model", "startup", "check_setup",
    "resume_or_load", "valid", "terminal",
):  # fmt: skip
    setattr(Traced, _name, _recorded(_name))


def trace_of(output: Path, **training: Any) -> list[str]:
    exp: Any = make(Traced, output, valid_interval=2, save_interval=2, **training)
    exp.setup()
    exp.run()
    return list(exp.trace)


SETUP = (
    "prepare on_setup_begin setup_dataloader setup_model startup check_setup on_setup_end "
    "resume_or_load"
)
BEGIN = "on_train_batch_begin"
READ = "on_fetch_data_begin on_fetch_data_end on_batch_read"
BACKWARD = "on_before_backward on_after_backward"
STEP = (
    "on_before_optimizers_step on_after_optimizers_step on_before_zero_grad on_after_zero_grad "
    "on_train_batch_end"
)
VALIDATE = f"on_evaluate_begin valid {4 * 'on_valid_batch_end '} on_evaluate_end"
END = "on_train_end terminal"


def test_the_events_of_a_run_come_in_this_order(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "run", max_iteration=5, log_interval=3)
    update = f"{BEGIN} {READ} {BACKWARD} {STEP}"
    expected = f"""
        {SETUP} on_train_begin
        on_train_epoch_begin
        {update}
        {update} on_save_checkpoint {VALIDATE}
        {update} on_log on_train_epoch_end
        on_train_epoch_begin
        {update} on_save_checkpoint {VALIDATE}
        {update} on_log on_save_checkpoint {VALIDATE}
        {END}
    """
    assert trace == expected.split()


def test_a_page_that_tells_the_order_of_a_run_tells_it_as_it_is(tmp_path: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in DOCS_FOLDER.glob("*.md")]
    blocks = [b for page in pages for b in re.findall(r"```text\n(setup .*?)```", page, re.DOTALL)]
    one_update = type("OneUpdate", (Traced,), {"size": 4})  # which ends an epoch
    exp: Any = make(one_update, tmp_path, max_iteration=1, valid_interval=1, save_interval=1)
    exp.setup()
    exp.run()
    assert len(blocks) >= 2  # in two languages
    for section in (s for block in blocks for s in re.split(r"\n(?=\w)", block)):
        told = [name for name in re.findall(r"[a-z_]+", section) if name in exp.trace]
        assert told == [name for name in dict.fromkeys(exp.trace) if name in told], section


def test_with_accumulation_each_batch_has_a_backward_and_a_pass_may_end_within(
    tmp_path: Path,
) -> None:
    trace = trace_of(
        tmp_path / "run", max_iteration=3, accumulation_steps=2, log_interval=3, valid_every_epoch=2
    )
    expected = f"""
        {SETUP} on_train_begin
        on_train_epoch_begin
        {BEGIN} {READ} {BACKWARD} {READ} {BACKWARD} {STEP}
        {BEGIN} {READ} {BACKWARD}
        on_train_epoch_end
        on_train_epoch_begin
        {READ} {BACKWARD} {STEP} on_save_checkpoint {VALIDATE}
        {BEGIN} {READ} {BACKWARD} {READ} {BACKWARD} {STEP} on_log on_save_checkpoint
        on_train_epoch_end {VALIDATE}
        {END}
    """
    assert trace == expected.split()


def test_a_run_that_is_continued_within_a_pass_does_not_begin_it_again(tmp_path: Path) -> None:
    trace_of(tmp_path / "run", max_iteration=2, accumulation_steps=2, log_interval=9)
    trace = trace_of(tmp_path / "run", max_iteration=4, accumulation_steps=2, log_interval=3)
    update = f"{BEGIN} {READ} {BACKWARD} {READ} {BACKWARD} {STEP}"
    expected = f"""
        {SETUP} on_load_checkpoint on_train_begin {VALIDATE}
        {update} on_log on_train_epoch_end
        on_train_epoch_begin
        {update} on_log on_save_checkpoint {VALIDATE}
        {END}
    """
    assert trace == expected.split()


def test_an_event_by_its_name_in_lightning_is_told_from_the_opposite_one() -> None:
    names = {
        "on_train_start": "on_train_begin",
        "on_train_batch_start": "on_train_batch_begin",
        "on_validation_start": "on_evaluate_begin",
        "on_validation_epoch_end": "on_evaluate_end",
        "on_validation_batch_end": "on_valid_batch_end",
        "on_test_end": "on_evaluate_end",
        "on_fit_start": "on_train_begin",
        "on_init_end": "on_setup_end",
        "on_step_end": "on_train_batch_end",
        "on_load_data_end": "on_batch_read",
    }
    for theirs, ours in names.items():
        hint = "It comes with AllEvents: " if ours in OF_MIXINS else ""
        with pytest.raises(ValueError, match=rf"is no event. Did you mean '{ours}'\? ?{hint}"):
            on(theirs)
        with pytest.raises(TypeError, match=rf"is no event.* Did you mean '{ours}'\? ?{hint}"):
            type("Moved", (ExperimentBase,), {theirs: lambda self: None})


class Mirrored(Helped):
    """Copies each checkpoint, and counts them."""

    def setup_model(self) -> None:
        super().setup_model()
        self.copied = Notes()
        self.exclude_from_state("copied")

    def on_checkpoint_written(self, path: Path) -> None:
        assert threading.current_thread() is threading.main_thread()
        storage.verify(path)
        self.copied.append((path.name, self.iteration))

    @on("on_checkpoint_written", every=2)
    def count(self, path: Path) -> None:
        self.copied.append(path.name)


def test_each_checkpoint_that_is_on_the_disk_is_an_event_before_it_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"save_interval": 2, "keep_last": 1}
    written: list[str] = []
    write = storage.write

    def slow(*args: Any) -> Path:  # the last one is not there yet when training has ended
        time.sleep(0.02)
        written.append(write(*args).name)
        return args[0] / written[-1]

    monkeypatch.setattr(storage, "write", slow)
    exp: Any = trained(Mirrored, tmp_path / "run", max_iteration=5, **training)
    names = [name for name, _ in (entry for entry in exp.copied if type(entry) is tuple)]
    assert names == written == [f"step-0000000{n}" for n in (2, 4, 5)]
    assert [entry for entry in exp.copied if type(entry) is str] == names[1::2]
    # When it came is no state: a kill between the writing and the event has no effect.
    assert b"count" not in (tmp_path / "run/checkpoints/step-00000005/state.json").read_bytes()


def test_an_upload_that_fails_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    class Offline(Mirrored):
        def on_checkpoint_written(self, path: Path) -> None:
            raise ConnectionError("no bucket")

    with pytest.raises(ConnectionError, match="no bucket"):
        trained(Offline, tmp_path / "run", max_iteration=2, save_interval=1)
    for run in ("run", "straight"):
        trained(Mirrored, tmp_path / run, max_iteration=2, save_interval=1)
    same_bits(*(tmp_path / run / "checkpoints/step-00000002" for run in ("run", "straight")))


# --- listeners -------------------------------------------------------------------------------


class Base(Stepped):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[Any] = []

    @on("on_train_batch_end")
    def base_second(self) -> None:
        self.heard.append("base")


class Derived(Base):
    @on("on_train_batch_end")
    def first(self) -> None:
        self.heard.append("first")

    def on_train_batch_end(self) -> None:
        self.heard.append("method")

    @on("on_train_batch_end", every=2)
    def a_second(self) -> None:
        self.heard.append("second")

    @on("on_train_batch_end", once=1)
    @on("on_log")
    def on_both(self, metrics: Any = None) -> None:
        self.heard.append("log" if metrics else "once")


def test_the_method_comes_first_then_listeners_base_classes_first_as_defined(
    tmp_path: Path,
) -> None:
    exp: Any = trained(Derived, tmp_path, max_iteration=2, log_interval=2)
    assert exp.heard == [
        *("method", "base", "first", "once"),
        *("method", "base", "first", "second", "log"),
    ]


def test_a_listener_that_a_subclass_overrides_is_called_by_its_mark(tmp_path: Path) -> None:
    class Overriding(Derived):
        def base_second(self) -> None:
            self.heard.append("overridden")

        a_second = None  # type: ignore[assignment]

    exp: Any = trained(Overriding, tmp_path, max_iteration=2, log_interval=0)
    assert exp.heard == ["method", "overridden", "first", "once", "method", "overridden", "first"]


def test_a_listener_reads_what_the_training_step_left_on_self(tmp_path: Path) -> None:
    class Attending(Stepped):
        seen: dict[int, Any] = {}  # noqa: RUF012

        def train_batch(self) -> None:
            ((points, _),) = self.micro_batches()
            self.attention = paddle.nn.functional.softmax(points @ points.T)
            self.backward(self.model(points).mean())
            self.step_optimizers()

        @on("on_train_batch_end", every=2)
        def look(self) -> None:
            self.seen[self.iteration] = self.attention.sum(axis=1).numpy()

    exp: Any = trained(Attending, tmp_path, max_iteration=4)
    assert sorted(exp.seen) == [2, 4]
    assert all(abs(rows - 1).max() < 1e-6 for rows in exp.seen.values())


class Counting(Stepped):
    """A listener's counters decide about training: noise is drawn at every third update."""

    stop_at = 0

    def on_train_batch_end(self) -> None:
        if self.iteration == self.stop_at:
            self.stop()

    @on("on_train_batch_end", every=3)
    def third(self) -> None:
        weight = self.unwrap(self.model)[0].weight
        weight.set_value(weight + paddle.randn(weight.shape) / 100)

    @on("on_train_batch_end", filter_fn=lambda filter_, exp: filter_.num_executed < 2)
    def twice(self) -> None:
        self.log(twice=self.iteration)

    @on("on_evaluate_end", once=2)
    def second(self, results: Any) -> None:
        assert self.iteration == 6, self.iteration
        self.unwrap(self.model)[0].bias.set_value(paddle.ones([8]))


def test_a_run_continued_in_mid_filter_ends_with_the_same_bits(tmp_path: Path) -> None:
    trained(Counting, tmp_path / "whole", max_iteration=8, valid_interval=3)
    for end in (1, 5, 8):  # before each filter has let one through, and within all of them
        stopped = type("Counting", (Counting,), {"stop_at": end})
        trained(stopped, tmp_path / "parts", max_iteration=8, valid_interval=3)
    step = "checkpoints/step-00000008"
    same_bits(tmp_path / "whole" / step, tmp_path / "parts" / step)
    logged = [line["iteration"] for line in metrics(tmp_path / "whole") if "train/twice" in line]
    assert logged == [1, 2]


def test_a_filter_function_sees_how_often_it_was_asked_and_the_experiment(tmp_path: Path) -> None:
    asked = []

    def rarely(filter_: Filter, exp: Any) -> bool:
        asked.append((filter_.num_called, filter_.num_executed, exp.iteration))
        return filter_.num_called % 2 == 1

    class Rare(Stepped):
        @on("on_train_batch_end", filter_fn=rarely)
        def act(self) -> None: ...

    trained(Rare, tmp_path, max_iteration=3)
    assert asked == [(1, 0, 1), (2, 1, 2), (3, 1, 3)]


def test_a_listener_that_came_or_went_since_the_checkpoint_begins_to_count(tmp_path: Path) -> None:
    for end, experiment in ((1, Counting), (2, Stepped), (3, Counting)):
        exp = trained(experiment, tmp_path, max_iteration=end, valid_interval=0)
        assert exp.iteration == end


def test_an_event_of_fastnlp_that_is_none_here_is_told_what_is_there_instead() -> None:
    for name, text in (
        ("on_sanity_check_begin", "no event. --smoke is that check"),
        ("on_after_trainer_initialized", "no event. It is 'on_setup_end' here, of AllEvents."),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            on(name)


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options", "text"),
    [
        ("on_train_batch_edn", {}, "'on_train_batch_edn' is no event. Did you mean 'on_train_ba"),
        ("setup_model", {}, "'setup_model' is no event"),
        ("on_log", {"every": 2, "once": 3}, "every and once given; expected one of them"),
        ("on_log", {"every": 0}, "every=0 given; expected a whole number from 1 on"),
        ("on_log", {"once": -1}, "once=-1 given"),
        ("on_log", {"every": True}, "every=True given"),
    ],
)
def test_a_wrong_event_or_filter_is_an_error_when_the_class_is_defined(
    words: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):

        class _(Tiny):
            @on(words, **options)
            def act(self, metrics: Any) -> None: ...


def test_a_misspelt_event_method_is_an_error_when_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match=r"_ends: is no event, .* mean 'on_train_epoch_end'"):

        class _(Tiny):
            def on_train_epoch_ends(self) -> None: ...


INHERIT = r"`from expbase\.extras\.all_events import AllEvents`, and `class Mine\(AllEvents, Ex"


@pytest.mark.parametrize("name", ["on_setup_begin", "on_batch_read"])
def test_an_event_of_a_mixin_without_it_is_an_error_that_says_what_to_inherit(name: str) -> None:
    override: Any = lambda self, *args: None  # noqa: E731
    with pytest.raises(TypeError, match=rf"^Mine\.{name}: nothing would .* lacks .*{INHERIT}"):
        type("Mine", (ExperimentBase,), {name: override})
    with pytest.raises(TypeError, match=rf"^Mine\.note: Mine has no event '{name}'.*{INHERIT}"):
        type("Mine", (ExperimentBase,), {"note": on(name)(override)})
    type("Mine", (AllEvents, ExperimentBase), {name: override})
    plain = type("Plain", (), {name: override})  # whoever is derived from it may have the mixin
    with pytest.raises(TypeError, match=rf"^Plain\.{name}: .*{INHERIT}"):
        type("Mine", (plain, ExperimentBase), {})
    type("Mine", (plain, AllEvents, ExperimentBase), {})


def test_a_method_that_cannot_be_called_as_the_event_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match=r"_\.on_log: cannot be called as on_log is; .*metrics: "):

        class _(Tiny):
            def on_log(self) -> None: ...  # type: ignore[override]

    with pytest.raises(TypeError, match=r"_\.note: cannot be called as on_evaluate_end is"):

        class _(Tiny):  # type: ignore[no-redef]
            @on("on_evaluate_end")
            def note(self) -> None: ...


@pytest.mark.parametrize("is_listener", [False, True])
def test_the_batch_of_on_train_batch_begin_is_somewhere_else_now(is_listener: bool) -> None:
    method: Any = lambda self, batch, indices: None  # noqa: E731
    name = "note" if is_listener else "on_train_batch_begin"
    if is_listener:
        method = on("on_train_batch_begin", every=2)(method)
    text = r".*once per update.*on_batch_read\(batch, indices\)\. It comes with AllEvents.*read_b"
    with pytest.raises(TypeError, match=rf"^Mine\.{name}: cannot be called as .*{text}"):
        type("Mine", (ExperimentBase,), {name: method})


# --- the pair round an update ------------------------------------------------------------------


class Paired(Helped):
    """Notes what comes round its updates, and what is drawn there."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted = Notes()
        self.exclude_from_state("noted")

    def note(self, name: str) -> None:
        self.noted.append((name, self.iteration, float(paddle.rand([]))))

    def on_train_epoch_begin(self) -> None:
        self.note("epoch")

    def on_train_batch_begin(self) -> None:
        self.note("begin")

    def train_batch(self) -> None:
        self.note("batch")
        super().train_batch()

    def on_train_batch_end(self) -> None:
        self.note("end")


class OwnLoop(Paired):
    def train(self) -> None:
        while self.going_on():
            self.train_batch()
            self.end_iteration()


@pytest.mark.parametrize(
    ("experiment", "training"),
    [
        pytest.param(Paired, {"accumulation_steps": 4}, marks=pytest.mark.long),
        pytest.param(Paired, {"shares": 2}, marks=pytest.mark.long),
        (OwnLoop, {"accumulation_steps": 4}),
    ],
    ids=["accumulation", "shares", "a loop of one's own"],
)
def test_each_update_begins_and_ends_once_also_over_a_resume(
    tmp_path: Path, experiment: type[Paired], training: dict[str, int]
) -> None:
    options = {**training, "valid_interval": 0, "save_interval": 6}
    whole: Any = trained(experiment, tmp_path / "whole", max_iteration=6, **options)
    rounds = [name for name, *_ in whole.noted if name != "epoch"]
    assert rounds == 6 * ["begin", "batch", "end"]
    assert [at for _, at, _ in whole.noted[1:4]] == [1, 1, 1]
    assert whole.noted[0][0] == "epoch"  # it has begun before its first update
    parts: list[Any] = []
    for end in (3, 6):  # in mid-epoch, and in the next one
        exp: Any = trained(experiment, tmp_path / "parts", max_iteration=end, **options)
        parts += exp.noted
    assert parts == whole.noted


def test_what_a_listener_returns_is_not_lost_in_silence(tmp_path: Path) -> None:
    class Returning(Stepped):
        @on("on_save_checkpoint")
        def keep(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(TypeError, match=r"Returning\.keep: a listener returned {'a': 1}"):
        trained(Returning, tmp_path)


# --- failures --------------------------------------------------------------------------------


class Failing(Stepped):
    """Everything fails, and everything is called."""

    called: list[str] = []  # noqa: RUF012

    def train_batch(self) -> None:
        raise ArithmeticError("the original")

    def on_exception(self, exception: BaseException) -> None:
        self.called.append(str(exception))
        raise ValueError("in on_exception")

    @on("on_exception")
    def tell(self, exception: BaseException) -> None:
        self.called.append(f"tell {exception}")
        raise ValueError("in tell")

    @on("on_train_end")
    def end(self) -> None:
        self.called.append("end")
        raise ValueError("in end")

    def on_train_end(self) -> None:
        self.called.append("on_train_end")
        assert not self.finished

    def terminal(self) -> None:
        self.called.append("terminal")
        raise ValueError("in terminal")


def test_the_original_exception_is_seen_by_all_handlers_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="the original"):
        trained(Failing, tmp_path)
    assert Failing.called == [
        "the original",
        "tell the original",
        "on_train_end",
        "end",
        "terminal",
    ]
    log = (tmp_path / "worker_0.log").read_text()
    assert log.count("ArithmeticError: the original") == 1
    places = ("in on_exception, after the failure", "in tell, after", "in end, after")
    assert all(text in log for text in (*places, "while closing: ValueError('in terminal')"))


class Everything(AllEvents, Prediction):
    """With all events that there are."""


def test_every_event_is_documented() -> None:
    assert all(method.__doc__ for method in events_of(Everything).values())


DOCS = (DOCS_FOLDER / "events.md").read_text(encoding="utf-8")


def test_the_tables_of_the_docs_name_methods_that_exist() -> None:
    moving = Path(__file__).parents[1] / "docs/moving"
    rows = []
    for page, above in (("paddlehub", "The task of PaddleHub 1.x:"), ("fastnlp", "Its callbacks:")):
        text = (moving / f"{page}.md").read_text(encoding="utf-8")
        table = text.split(f"\n{above}\n\n")[1].split("\n\n")[0]
        rows += re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| .*\|$", table, re.MULTILINE)
    assert len(rows) == 15 + 24
    assert all(hasattr(Everything, here) or here == "on" for _, here in rows)
    assert all(event in DOCS for event in events_of(Everything))


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    code, *_ = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(code, scope)  # the documentation's own
    trained(type("Documented", (scope["Experiment"], Stepped), {}), tmp_path, valid_interval=1)
    log = (tmp_path / "worker_0.log").read_text()
    assert "epoch 1 is over" in log
    assert log.count("{'accuracy'") == 3


def test_a_listener_that_a_class_gets_before_it_is_made_is_called(
    tmp_path: Path,
) -> None:
    class Later(Tiny): ...

    called = []
    Later.note = on("on_train_end")(lambda self: called.append(self.iteration))  # type: ignore[attr-defined]
    exp = trained(Later, tmp_path / "run", max_iteration=2)
    assert called == [exp.iteration]


# --- mixins that do not know each other ------------------------------------------------------


class Numbering(ExperimentBase):
    def on_save_checkpoint(self) -> dict[str, int]:
        return {"count": 1}


class Naming(ExperimentBase):
    def on_save_checkpoint(self) -> dict[str, str]:
        return {"name": "a"}

    @on("on_log")
    def show(self, metrics: Any) -> None: ...


class Asking(ExperimentBase):
    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"asked": True, **(super().on_save_checkpoint() or {})}


class Showing:
    """Not an experiment."""

    def show(self, metrics: Any) -> None: ...


def plain_decorator(function: Any) -> Any:
    return lambda self: function(self)


class Decorated(ExperimentBase):
    @plain_decorator
    def on_save_checkpoint(self) -> Any:
        return super().on_save_checkpoint()


@pytest.mark.parametrize(
    ("bases", "lost", "first"),
    [
        ((Numbering, Naming, Tiny), "Naming.on_save_checkpoint", "Numbering.on_save_checkpoint"),
        ((Asking, Naming, Numbering), "Numbering.on_save_checkpoint", "Naming.on_save_checkpoint"),
        ((Showing, Naming), "Naming.show", "Showing.show"),
    ],
)
def test_of_two_mixins_of_which_one_forgets_super_none_is_lost_in_silence(
    bases: tuple[type, ...], lost: str, first: str
) -> None:
    expected = rf"Both: {lost} would never be called, because {first} comes before it and does not "
    with pytest.raises(TypeError, match=expected):
        type("Both", bases, {})


@pytest.mark.parametrize(
    "bases",
    [
        (Asking, Naming, Tiny),
        (Decorated, Naming),
        (type("Own", (Naming,), {"on_save_checkpoint": lambda self: None}),),
        (Showing, Tiny),
    ],
    ids=["one asks", "a decorator", "what derives", "other names"],
)
def test_who_calls_super_or_derives_from_what_it_replaces_may(bases: tuple[type, ...]) -> None:
    type("Both", bases, {})


def test_a_class_may_call_both_of_two_mixins_by_hand() -> None:
    def both(self: Any) -> Any:
        return Numbering.on_save_checkpoint(self) | Naming.on_save_checkpoint(self)

    type("Both", (Numbering, Naming), {"on_save_checkpoint": both})


# --- events that nobody calls ------------------------------------------------------------------


class ByHand(AllEvents, Tiny):
    """Steps by hand, and listens to what the helpers call."""

    def on_before_optimizers_step(self) -> None: ...

    @on("on_after_backward")
    def look(self) -> None: ...


class Helping(ByHand, Helped):
    train_batch = Helped.train_batch


def test_an_event_that_a_step_by_hand_does_not_call_is_told_once(tmp_path: Path) -> None:
    for experiment in (ByHand, Helping, type("Clipped", (GradientClipping, Tiny), {})):
        config = experiment.default_config()
        config.training.update({"max_iteration": 3, "log_interval": 1})
        exp = experiment(config, argparse.Namespace(output=str(tmp_path / experiment.__name__)))
        exp.setup()
        exp.run()
    names = "ByHand", "Helping", "Clipped"
    by_hand, helping, clipped = (
        re.findall("WARNING: (.*)", (tmp_path / name / "worker_0.log").read_text())
        for name in names
    )
    assert by_hand == [
        "[1] self.optimizer has stepped, and on_after_backward, at which the experiment acts, has "
        "not come; on_before_optimizers_step, at which the experiment acts, has not come; expected "
        "self.backward(loss), and self.step_optimizers()."
    ]
    assert [line for line in helping if "has not come" in line or "never came" in line] == []
    assert clipped == [
        "[1] self.optimizer has stepped, and GradientClipping has clipped nothing; expected "
        "self.step_optimizers(), or self.clip_gradients(self.optimizer) before the step."
    ]
