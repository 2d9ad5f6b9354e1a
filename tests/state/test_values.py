"""What changes is state: plain values of an experiment and of its layers, and nobody names them."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from expbase.state.fingerprint import Fingerprinter, checksum
from expbase.state.inventory import places
from expbase.state.plain_values import Rollback
from paddle.io import DataLoader
from tiny import Notes, Points, Tiny, run_of, same_bits, trained

from expbase.checkpoint.layout import CheckpointError


class Drifting(paddle.nn.Layer):
    """Carries a state from batch to batch, counts, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.hidden = paddle.zeros([4])
        self.register_buffer("passing", paddle.zeros([4]), persistable=False)
        self.pair: Any = None
        self.calls = 0
        self.rng = np.random.default_rng(5)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        out = self.linear(x) + self.hidden + self.passing + self.rng.random() + self.calls / 100
        out = out if self.pair is None else out + self.pair[0]
        self.hidden = out.mean(axis=0).detach().tanh()
        self.passing.set_value(self.hidden / 2)
        self.pair = (self.hidden * 2, self.calls)
        return out


def kinds() -> dict[str, tuple[Any, Callable[[Any, float], Any]]]:
    """By name: what setup makes, and what an update makes of it with a number of its own."""
    return {
        "number": (1.0, lambda old, x: 0.9 * old + x),
        "count": (0, lambda old, x: old + 1),
        "flag": (False, lambda old, x: not old),
        "text": ("a", lambda old, x: f"{old[-3:]}{x:.3f}"),
        "nothing": (None, lambda old, x: x if old is None else old / 2 + x),
        "history": ([], lambda old, x: [*old, x]),
        "in_place": ([], lambda old, x: old.append(x) or old),
        "several": ((0, 0.0), lambda old, x: (old[0] + 1, old[1] + x)),
        "table": ({}, lambda old, x: {**old, len(old): x}),
        "names": (set(), lambda old, x: old | {f"{x:.2f}"}),
        "counter": (Counter(), lambda old, x: old + Counter(a=1)),
        "ordered": (OrderedDict(), lambda old, x: OrderedDict(old, **{f"k{len(old)}": x})),
        "buffer": (
            deque(maxlen=70),
            lambda old, x: old.extend([(np.full(3, x, "float32"), x, True)] * 9) or old,
        ),
        "array": (np.zeros(3), lambda old, x: old + x),
        "array_in_place": (np.zeros(3), lambda old, x: np.add(old, x, out=old)),
        "scalar": (np.float32(0), lambda old, x: np.float32(old + x)),
        "tensor": (paddle.zeros([2]), lambda old, x: old + x),
        "tensor_in_place": (paddle.zeros([2]), lambda old, x: old.add_(paddle.full([2], x))),
        "pool": ([], lambda old, x: [*old[-4:], paddle.full([2, 2], x)]),
    }


class Everything(Tiny):
    """All kinds; each of them has an effect on the weights."""

    def setup_model(self) -> None:
        super().setup_model()
        self.drifting = Drifting()
        # Not all begin with the same rate, which a training may change by hand.
        groups = [
            {"params": self.drifting.parameters(), "learning_rate": 0.5},
            {"params": self.model.parameters()},
        ]
        self.optimizer = paddle.optimizer.Momentum(0.05, parameters=groups)
        self.generators = {"numpy": np.random.default_rng(1), "python": random.Random(2)}
        for name, (value, _) in kinds().items():
            setattr(self, name, value)

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        draw = self.generators["numpy"].random() + self.generators["python"].random()
        for name, (_, changed) in kinds().items():
            setattr(self, name, changed(getattr(self, name), draw / 10))
        self.made_late = getattr(self, "made_late", 0.0) + draw
        if self.iteration == 2:
            for parameter in self.drifting.parameters():
                parameter.optimize_attr["learning_rate"] = 0.25
            self.optimizer._param_groups[1]["momentum"] = 0.5
        felt = sum(fingerprint_of(getattr(self, name)) for name in kinds()) + self.made_late
        points = self.drifting(points) * (1 + felt / 1000)
        paddle.nn.functional.cross_entropy(self.model(points), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(felt=felt)

    def valid(self) -> dict[str, float]:
        return {"mean": float(sum(self.drifting(p).mean() for p, _ in self.valid_batches()))}


def fingerprint_of(value: Any) -> float:
    """A number in which all of a value is."""
    if isinstance(value, (list, tuple, deque)):
        return sum(place * fingerprint_of(item) for place, item in enumerate(value, 1))
    if isinstance(value, dict):
        return sum(fingerprint_of(list(pair)) for pair in value.items())
    if isinstance(value, (set, str)):
        return sum(map(ord, "".join(sorted(value)))) / 100
    value = value.numpy() if hasattr(value, "numpy") else value
    return 0.0 if value is None else float(np.sum(value))


def test_whatever_has_changed_since_setup_is_restored_and_nobody_has_named_it(
    tmp_path: Path,
) -> None:
    trained(Everything, tmp_path / "whole", max_iteration=12, save_interval=4)
    for end in (4, 8, 12):
        exp: Any = trained(Everything, tmp_path / "parts", max_iteration=end, save_interval=4)
    same_bits(*(tmp_path / f / "checkpoints/step-00000012" for f in ("whole", "parts")))
    assert len(exp.history) == exp.count == 12
    assert exp.buffer.maxlen == 70


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values") / "whole"
    trained(Everything, path, max_iteration=6)
    return path


@pytest.mark.parametrize("name", [*kinds(), "made_late", "drifting.hidden", "drifting.pair"])
def test_each_of_them_has_an_effect_on_what_follows(whole: Path, tmp_path: Path, name: str) -> None:
    """So the test before fails for each of them that is not restored."""

    class Without(Everything):
        def setup_model(self) -> None:
            super().setup_model()
            self.made_late = 0.0
            self.exclude_from_state(name)

    end = "checkpoints/step-00000006/model.safetensors"
    trained(Without, tmp_path / "parts", max_iteration=3)
    trained(Without, tmp_path / "parts", max_iteration=6)
    assert (whole / end).read_bytes() != (tmp_path / "parts" / end).read_bytes()


def test_validating_has_no_effect_on_what_layers_carry(tmp_path: Path) -> None:
    for interval in (0, 1):
        run = tmp_path / str(interval)
        exp: Any = trained(Everything, run, valid_interval=interval, max_iteration=5)
        assert exp.drifting.calls == 5
    same_bits(*(tmp_path / f / "checkpoints/step-00000004" for f in "01"), todo=False)


def test_what_is_as_setup_left_it_stays_the_codes(tmp_path: Path) -> None:
    class Scaled(Tiny):
        scale = 2.0

        def setup_model(self) -> None:
            super().setup_model()
            self.factor, self.table = self.scale, np.arange(5)

    trained(Scaled, tmp_path, max_iteration=2)
    Scaled.scale = 3.0
    exp: Any = trained(Scaled, tmp_path, max_iteration=4)
    assert exp.factor == 3.0


class Recurrent(Tiny):
    """Carries the hidden state of paddle's GRU, which has a list of its parameters, as this has."""

    def setup_model(self) -> None:
        super().setup_model()
        self.rnn = paddle.nn.GRU(4, 4)
        self.trained = [*self.rnn.parameters(), *self.model.parameters()]
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.trained)
        self.hidden: Any = None

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        outputs, hidden = self.rnn(points.unsqueeze(0), self.hidden)
        self.hidden = hidden.detach()
        paddle.nn.functional.cross_entropy(self.model(outputs[0]), labels).backward()
        self.optimizer.step()
        for parameter in self.trained:
            parameter.clear_grad()
        self.log(norm=sum(parameter.norm() for parameter in self.trained))


def test_lists_of_parameters_stay_lists_of_the_parameters(tmp_path: Path) -> None:
    trained(Recurrent, tmp_path / "whole", max_iteration=12, save_interval=4)
    for end in (4, 12):
        exp: Any = trained(Recurrent, tmp_path / "parts", max_iteration=end, save_interval=4)
    same_bits(*(tmp_path / f / "checkpoints/step-00000012" for f in ("whole", "parts")))
    assert exp.trained[0] is exp.rnn._all_weights[0] is exp.rnn.parameters()[0]
    saved = run_of(exp).state.values.state_dict()
    assert "hidden" in saved
    assert not [name for name in saved if "rnn" in name or name == "trained"]
    exp.trained.append(paddle.create_parameter([2], "float32"))
    assert "trained" not in run_of(exp).state.values.state_dict()


class Thawing(Tiny):
    """Whose listeners thaw and freeze parameters, and switch parts to eval mode and back."""

    def setup_model(self) -> None:
        super().setup_model()
        self.model.add_sublayer("noise", paddle.nn.Dropout(0.5))
        self.model[0].weight.stop_gradient = True

    def on_train_batch_end(self) -> None:
        self.model[0].weight.stop_gradient = self.iteration < 3
        self.model[0].bias.stop_gradient = self.iteration >= 4
        self.model.noise.training = self.iteration % 3 == 0


def test_what_is_frozen_and_what_is_in_eval_mode_is_restored(tmp_path: Path) -> None:
    trained(Thawing, tmp_path / "whole", max_iteration=9)
    for end in (3, 5, 9):
        exp: Any = trained(Thawing, tmp_path / "parts", max_iteration=end)
    same_bits(*(tmp_path / f / "checkpoints/step-00000009" for f in ("whole", "parts")))
    assert [p.stop_gradient for p in exp.model[0].parameters()] == [False, True]
    assert exp.model.noise.training


class Shadowed(Tiny):
    """Whose layer averages its weights in a list that paddle does not look into."""

    def setup_model(self) -> None:
        super().setup_model()
        model: Any = self.model
        model.shadow = {"of": [copy.deepcopy(model[0].weight)]}
        self.watched = list(model.parameters())

    def on_train_batch_end(self) -> None:
        model: Any = self.model
        (shadow,) = model.shadow["of"]
        shadow.set_value(0.5 * shadow + 0.5 * model[0].weight)


def test_a_copied_parameter_in_a_list_of_a_layer_is_state(tmp_path: Path) -> None:
    whole: Any = trained(Shadowed, tmp_path / "whole", max_iteration=8)
    for end in (4, 8):
        exp: Any = trained(Shadowed, tmp_path / "parts", max_iteration=end)
    shadows = [e.model.shadow["of"][0].numpy().tobytes() for e in (whole, exp)]
    assert shadows[0] == shadows[1]
    saved = run_of(exp).state.saved().parameters  # and nothing of self.watched
    assert list(saved) == ["model.shadow.of.0"]


def test_what_has_changed_and_cannot_be_saved_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Odd(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.things: list[Any] = [threading.Lock()]  # is not touched
            self.jobs: list[Any] = []
            self.late: Any = None
            self.notes = Notes()

        def train_batch(self) -> None:
            super().train_batch()
            self.jobs.append(threading.Lock())
            self.late = self.late or threading.Lock()  # made when it is needed: no plain value
            self.notes.append(1)

    trained(Odd, tmp_path)
    told = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(told) == 1
    assert (
        "self.jobs (list), self.late (lock): changed since setup, and in no checkpoint" in told[0]
    )
    assert "a state_dict and set_state_dict, or what on_save_checkpoint returns" in told[0]
    assert "exclude_from_state" in told[0]
    trained(Odd, tmp_path, max_iteration=8)
    err = capsys.readouterr().err
    assert "not exact: self.jobs (list): has changed in training" in err
    assert "self.things" not in err


class Consuming(Tiny):
    """Consumes what cannot be saved: iterators, a generator, a file, one of them in a list."""

    consumes = True

    def setup_model(self) -> None:
        super().setup_model()
        self.text = Path(__file__).open()
        self.count, self.cycle, self.chain = itertools.count(), itertools.cycle("ab"), chain()
        self.pairs, self.squares = zip("abcdefghi", range(9), strict=True), (n * n for n in count())
        self.streams = [iter(range(9)), open(__file__, "rb")]

    def train_batch(self) -> None:
        super().train_batch()
        streams = [self.text, self.count, self.cycle, self.chain, self.pairs, self.squares]
        for stream in [*streams, *self.streams] * self.consumes:
            next(stream)

    def terminal(self) -> None:
        super().terminal()
        self.text.close()
        self.streams[1].close()


def chain() -> Any:
    return itertools.chain("abc", "def")


def count() -> Any:
    yield from itertools.count()


CONSUMED = (
    "self.text (TextIOWrapper)", "self.count (count)", "self.cycle (cycle)", "self.chain (chain)",
    "self.pairs (zip)", "self.squares (generator)", "self.streams.0 (range_iterator)",
    "self.streams.1 (BufferedReader)",
)  # fmt: skip


def test_what_can_only_be_consumed_is_told_at_the_save_and_at_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Consuming, tmp_path, max_iteration=2)
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "WARNING" in line)
    for name in CONSUMED:
        assert name in told
    assert "on_save_checkpoint returns" in told
    trained(Consuming, tmp_path, max_iteration=4)
    err = capsys.readouterr().err
    for name in CONSUMED:
        assert f"not exact: {name}: has changed in training" in err
    assert "what a resumed run has not as it was: Expected numbers, texts" in err


def test_what_is_not_consumed_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Consuming, "consumes", False)
    trained(Consuming, tmp_path, max_iteration=2)
    trained(Consuming, tmp_path, max_iteration=4)
    err = capsys.readouterr().err
    assert "WARNING" not in err
    assert "not exact" not in err


def test_a_set_is_one_line_and_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Seeing(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.seen: set[int] = set()

        def train_batch(self) -> None:
            super().train_batch()
            self.seen.add(self.iteration)

    trained(Seeing, tmp_path, max_iteration=4)
    exp: Any = trained(Seeing, tmp_path, max_iteration=6)
    err = capsys.readouterr().err
    assert exp.seen == {*range(1, 7)}
    assert "WARNING" not in err
    assert "sorted(…) is the same in every process: self.seen" in err


class Memory:
    """A replay buffer: a class without a state_dict."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.capacity = 9


class Replaying(Tiny):
    """Fills a buffer in an object, and registers what a test says."""

    names: tuple[str, ...] = ()

    def setup_model(self) -> None:
        super().setup_model()
        self.big = Memory()
        self.register_stateful(*self.names)

    def train_batch(self) -> None:
        super().train_batch()
        self.big.items.append((np.full(3, self.iteration), self.iteration))


@pytest.mark.parametrize("names", [(), ("big",), ("big.items",), ("big", "big.capacity")])
def test_an_object_is_registered_with_all_that_it_has_and_without_an_alarm(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
) -> None:
    monkeypatch.setattr(Replaying, "names", names)
    trained(Replaying, tmp_path, max_iteration=4)
    exp: Any = trained(Replaying, tmp_path, max_iteration=6)
    assert [number for _, number in exp.big.items] == [1, 2, 3, 4, 5, 6]
    assert "WARNING" not in capsys.readouterr().err
    saved = run_of(exp).state.values.state_dict()
    assert ("big.capacity" in saved) == ("big" in names)


def test_what_is_large_is_saved_and_its_size_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expbase.state.plain_values._LARGE_BYTES", 100)
    trained(Replaying, tmp_path / "one", max_iteration=2)
    told = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(told) == 1
    assert "self.big.items: 0 MB in each checkpoint" in told[0]
    assert "exclude_from_state('big.items')" in told[0]
    exp: Any = trained(Replaying, tmp_path / "one", max_iteration=4)
    assert len(exp.big.items) == 4
    capsys.readouterr()
    monkeypatch.setattr(Replaying, "names", ("big.items",))
    trained(Replaying, tmp_path / "two", max_iteration=2)
    assert "WARNING" not in capsys.readouterr().err


class Deep:
    """An object with a state that leaves something out."""

    def __init__(self) -> None:
        self.inner = Memory()

    def state_dict(self) -> dict[str, int]:
        return {}

    def set_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_what_the_walk_does_not_reach_can_be_registered(tmp_path: Path) -> None:
    class Sampler(paddle.io.BatchSampler, Deep):
        def __init__(self) -> None:
            paddle.io.BatchSampler.__init__(self, Points(8), batch_size=4)
            Deep.__init__(self)

    class Reaching(Tiny):
        def setup_dataloader(self) -> None:
            self.train_loader = DataLoader(Points(8), batch_sampler=Sampler())

        def setup_model(self) -> None:
            super().setup_model()
            self.register_stateful("train_loader.batch_sampler.inner.capacity")

        def train_batch(self) -> None:
            super().train_batch()
            self.train_loader.batch_sampler.inner.capacity += 1

    options = {"valid_interval": 0}
    trained(Reaching, tmp_path, max_iteration=2, **options)
    exp: Any = trained(Reaching, tmp_path, max_iteration=4, **options)
    assert exp.train_loader.batch_sampler.inner.capacity == 13


def test_a_registered_iterator_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Iterating(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.stream = iter([1, 2, 3])
            self.register_stateful("stream")

    with pytest.raises(TypeError, match=r"values\.stream: a list_iterator cannot be saved"):
        trained(Iterating, tmp_path)


class Holder:
    """An object of the user's."""

    def __init__(self) -> None:
        self.position = 0


def test_dotted_names_are_registered_of_layers_objects_and_places_in_lists(tmp_path: Path) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.holder, self.holders = Holder(), [Holder()]
            self.model.fixed = 0
            self.register_stateful("holder.position", "holders.0.position", "model.fixed")
            with pytest.raises(AttributeError, match=r"self\.holder\.place does not exist"):
                self.register_stateful("holder.place")

        def train_batch(self) -> None:
            super().train_batch()
            self.holder.position += 1
            self.holders[0].position += 2

    trained(Named, tmp_path, max_iteration=4)
    exp: Any = trained(Named, tmp_path, max_iteration=6)
    assert (exp.holder.position, exp.holders[0].position, exp.model.fixed) == (6, 12, 0)


class Counting(paddle.nn.Layer):
    """A layer without parameters, so without a file in a checkpoint."""

    calls = 0


def test_a_layer_that_is_gone_and_had_changed_values_is_an_error(tmp_path: Path) -> None:
    class With(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.counting = Counting()

        def train_batch(self) -> None:
            super().train_batch()
            self.counting.calls += 1

    trained(With, tmp_path, max_iteration=2)
    with pytest.raises(CheckpointError, match=r"counting\.calls: in the checkpoint, and not here"):
        trained(Tiny, tmp_path, max_iteration=4)


def test_a_value_in_the_place_of_a_method_a_property_or_an_object_is_a_problem(
    tmp_path: Path,
) -> None:
    exp: Any = trained(Tiny, tmp_path)
    exp.epsilon = 0.1
    held = {"log": 1, "iteration": 2, "rank": 3, "optimizer": 1.5, "epsilon": 0.2, "new": [4]}
    state = run_of(exp).state
    assert state.values.problems(held) == [
        f"{name}: a value in the checkpoint, and no value here."
        for name in ("iteration", "log", "optimizer", "rank")
    ]
    state.registered += held
    assert state.values.problems(held) == []  # a user names them


def test_a_snapshot_puts_back_what_has_changed_and_names_what_is_too_large() -> None:
    holder: Any = Holder()
    holder.numbers, holder.array, holder.large = [1, [2]], np.zeros(3), np.zeros(100)
    holder.shared = holder.numbers
    found = lambda: {n: (holder, n, value) for n, value in places(holder).items()}  # noqa: E731
    before = Rollback(found, most_bytes=300)
    holder.numbers[1].append(3)
    holder.array += 1
    holder.large += 1
    assert before.restore() == ["large"]
    assert holder.numbers == holder.shared == [1, [2]]
    assert holder.array.tolist() == [0.0, 0.0, 0.0]
    assert holder.large[0] == 1


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (True, 1),
        ("a", "b"),
        ([1, 2], [1, 2, 3]),
        (np.zeros(3), np.zeros(3, "float32")),
        (np.zeros([2, 3]), np.zeros([3, 2])),
        (paddle.zeros([2]), paddle.ones([2])),
        ([paddle.zeros([2])], [paddle.zeros([3])]),
        (deque([1], maxlen=2), deque([1], maxlen=3)),
        ([Holder], [Notes]),
    ],
)
def test_a_print_tells_values_apart(value: Any, other: Any) -> None:
    assert checksum(value) != checksum(other)


def test_equal_values_and_the_same_objects_have_one_print() -> None:
    thing = Holder()
    for make_one in (
        lambda: [1.5, "text", (None, {"a": 1})],
        lambda: np.arange(6).reshape(2, 3)[:, ::2],
        lambda: {"layer": thing, "tensor": paddle.ones([3])},
    ):
        assert checksum(make_one()) == checksum(make_one())
    nested: list[Any] = []
    nested.append(nested)
    assert checksum(nested) == checksum(nested)


class Busy:
    """Environments, say: they cannot be saved, and something works for them."""

    def __init__(self, workers: Any) -> None:
        self.lock = threading.Lock()
        self.workers = workers


@pytest.mark.parametrize(("worker", "is_blind"), [(Process, True), (Notes, False)])
def test_nobody_can_look_into_another_process(worker: Any, is_blind: bool) -> None:
    for value in (Busy([worker()]), Busy(Busy([worker()]))):  # in a wrapper, too
        fingerprinter = Fingerprinter()
        fingerprinter.fingerprint(value)
        assert fingerprinter.is_blind == is_blind


def test_a_loader_on_self_is_no_plain_value(tmp_path: Path) -> None:
    class Iterating(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.extra = DataLoader(Points(8), batch_size=4)
            self.stream = iter([1, 2, 3])

        def train_batch(self) -> None:
            super().train_batch()
            next(self.stream, None)

    assert trained(Iterating, tmp_path, max_iteration=2).iteration == 2


class Levelled(Points):
    """A data set with a level, which its sampler knows, too."""

    level = 0.0


@pytest.mark.parametrize("excluded", [False, True])
def test_what_is_excluded_is_excluded_by_all_of_its_names(tmp_path: Path, excluded: bool) -> None:
    class Excluding(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = DataLoader(Levelled(), batch_size=4, shuffle=True)
            self.exclude_from_state(*["train_loader.dataset"] * excluded)

        def train_batch(self) -> None:
            super().train_batch()
            self.train_loader.dataset.level += 1

    exp: Any = trained(Excluding, tmp_path)
    saved = run_of(exp).state.values.state_dict()
    assert [path for path in saved if "level" in path] == ["train_loader.dataset.level"] * (
        not excluded
    )
