"""What has changed and is in no checkpoint is told: at the save, once, and at the resume."""

from __future__ import annotations

import importlib
import itertools
import operator
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader, Subset, TensorDataset
from starts import Start
from tiny import Notes, Points, Tiny, make, trained

from expbase.base import rng
from expbase.doctor import doctor, unsaved_changes
from expbase.doctor.doctor_file import conditions_of
from expbase.record.sources import Code
from expbase.state import changed_values, walk

CHANGED = ": changed in training, and in no checkpoint: a resumed run has what setup makes of it."
LOST = ": has changed in training, and is not what it was then"
OTHER_DATA = (
    "other samples or numbers than at the start before, though code, config and packages are"
)
OF_A_SET = "sorted(…) is the same in every process: self.seen"


def warnings_in(err: str) -> list[str]:
    return [line for line in err.splitlines() if "WARNING" in line]


def told(start: Start) -> list[str]:
    """The paths that a save has told, each once; and then no more."""
    start.saved()
    start.saved()
    lines = [*start.warned]
    start.warned.clear()
    assert all(CHANGED in line for line in lines)
    names = [name for line in lines for name in line.partition(CHANGED)[0].split(", ")]
    assert len(names) == len({*names})
    return sorted(names)


def lost(start: Start) -> list[str]:
    """The paths that are not as they were at the checkpoint."""
    assert all(line.endswith(LOST) for line in start.lost)
    return sorted(line.removesuffix(LOST) for line in start.lost)


# --- attributes that cannot be saved -----------------------------------------------------------


class Odd(Tiny):
    """Whose values cannot be saved: locks, which stand for anything of the kind; and a set."""

    def setup_model(self) -> None:
        super().setup_model()
        self.things: list[Any] = [threading.Lock()]  # is not touched
        self.jobs: list[Any] = []
        self.late: Any = None
        self.seen: set[str] = set()
        self.notes = Notes()

    def train_batch(self) -> None:
        super().train_batch()
        self.seen.add(f"name {self.iteration}")
        self.jobs.append(threading.Lock())
        self.late = self.late or threading.Lock()  # made when it is needed: so it will be again
        self.notes.append(1)


def test_what_has_changed_and_cannot_be_saved_is_told_once_and_at_each_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Odd, tmp_path, max_iteration=4)
    err = capsys.readouterr().err
    (line,) = warnings_in(err)
    assert f" self.jobs (list){CHANGED}" in line
    for way in (
        "keep it in an attribute",
        "state_dict",
        "on_save_checkpoint",
        "exclude_from_state",
    ):
        assert way in line
    assert err.count(OF_A_SET) == 1  # and no warning
    for iterations in (5, 6):
        exp: Any = trained(Odd, tmp_path, max_iteration=iterations)
        err = capsys.readouterr().err
        assert f"not exact: self.jobs{LOST}" in err
        assert "self.late" not in err
        assert "of values that are not what they were: If training depends on it: keep it" in err
        assert "self.things" not in err
        assert err.count(OF_A_SET) == 1
        assert len(exp.seen) == iterations


def test_an_array_of_objects_that_has_changed_is_restored() -> None:
    def ragged() -> Any:
        return np.array([[1], [2, 3]], dtype=object)

    one = Start({"ragged": ragged()})
    one.own.ragged[0].append(5)
    other = Start({"ragged": ragged()}, one.saved())
    assert told(one) == []
    assert other.own.ragged.tolist() == [[1, 5], [2, 3]]


@pytest.mark.parametrize(
    "value",
    [defaultdict(lambda: 1, a=2), [threading.Lock()], np.rec.array([(1, 2.0)], names="a,b")],
    ids=lambda value: type(value).__name__,
)
def test_what_stands_where_nothing_was_and_cannot_be_saved_is_told(value: Any) -> None:
    one = Start({"late": None})
    one.own.late = value
    assert told(one) == [f"self.late ({type(value).__name__})"]


def chain() -> Any:
    return itertools.chain("abc", "def")


def squares() -> Any:
    for n in itertools.count():
        yield n * n


STREAMS: dict[str, Callable[[], Any]] = {
    "text (TextIOWrapper)": Path(__file__).open,
    "bytes (BufferedReader)": lambda: open(__file__, "rb"),
    "count (count)": itertools.count,
    "cycle (cycle)": lambda: itertools.cycle("ab"),
    "chain (chain)": chain,
    "pairs (zip)": lambda: zip("abcdefghi", range(9), strict=True),
    "numbers (enumerate)": lambda: enumerate([4, 5, 6]),
    "mapped (map)": lambda: map(abs, [1, 2, 3]),
    "islice (islice)": lambda: itertools.islice([1, 2, 3], 2),
    "squares (generator)": squares,
    "of_list (list_iterator)": lambda: iter([1, 2, 3]),
    "of_range (range_iterator)": lambda: iter(range(9)),
    "of_dict (dict_keyiterator)": lambda: iter({1: 2, 3: 4}),
    "backwards (list_reverseiterator)": lambda: reversed([1, 2, 3]),
}


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Files that are to be closed."""
    files: list[Any] = []
    yield files
    for file in files:
        file.close()


class Box:
    """An object of the user's."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize("where", ["attribute", "list", "object"])
def test_what_was_consumed_is_told_and_what_was_not_is_silent(
    where: str, opened: list[Any]
) -> None:
    def made() -> dict[str, Any]:
        made_now = {name.partition(" ")[0]: make() for name, make in STREAMS.items()}
        opened.extend([made_now["text"], made_now["bytes"]])
        if where == "attribute":
            return made_now
        return {"all": [*made_now.values()] if where == "list" else Box(**made_now)}

    def consume(own: Any) -> None:
        found = getattr(own, "all", own)
        for stream in found if where == "list" else [*vars(found).values()]:
            next(stream)

    untouched = Start(made())
    assert told(untouched) == []
    saved = untouched.saved()
    assert lost(Start(made(), saved)) == []
    one = Start(made())
    consume(one.own)
    names = [f"self.{'all.' * (where == 'object')}{name}" for name in STREAMS]
    if where == "list":
        names = [f"self.all.{i} {name.partition(' ')[2]}" for i, name in enumerate(STREAMS)]
    assert told(one) == sorted(names)
    saved = one.saved()
    assert lost(Start(made(), saved)) == sorted(names)
    # A user may consume them in on_load_checkpoint; of a generator nobody can see whether.
    assert lost(Start(made(), saved, during=consume)) == [n for n in names if "generator" in n]


def test_a_file_that_is_only_written_is_no_matter(tmp_path: Path) -> None:
    one = Start({"log": (tmp_path / "log").open("w")})
    one.own.log.write("a line")
    assert told(one) == []
    one.own.log.close()


def test_a_generator_in_worker_processes_is_told() -> None:
    class Drawing(Points):
        def __init__(self) -> None:
            super().__init__()
            self.random = np.random.default_rng(0)

    for workers, expected in ((0, []), (1, ["self.train_loader.dataset.random"])):
        one = Start({"train_loader": DataLoader(Drawing(), num_workers=workers)})
        assert told(one) == expected


class Asked:
    """Writes its own state, and leaves something out."""

    def __init__(self) -> None:
        self.count = self.other = 0
        self.same = 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.device
def test_paddles_own_generator_is_no_state() -> None:
    def made() -> dict[str, Any]:
        return {"of_cpu": paddle.seed(5), "of_device": rng._of_device()}

    one = Start(made())
    rng.seed_all(7)
    paddle.rand([3])
    assert told(one) == one.paths() == []
    assert lost(Start(made(), one.saved())) == []


def test_what_an_object_leaves_out_of_its_own_state_is_named_at_the_resume() -> None:
    one = Start({"asked": Asked()})
    one.own.asked.count = one.own.asked.other = 2
    assert told(one) == []  # it may know why
    other = Start({"asked": Asked()}, one.saved())
    assert other.own.asked.count == 2
    assert lost(other) == ["self.asked.other"]


class Writer:
    """Opens its file when there is something to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None
        self.is_open = False
        self.lines = 0

    def write(self) -> None:
        if not self.is_open:
            self.file, self.is_open = self.path.open("a"), True
        self.file.write("line\n")
        self.lines += 1


def test_a_flag_of_an_object_that_has_opened_a_file_is_told(tmp_path: Path) -> None:
    made = [Writer(tmp_path / "log"), Writer(tmp_path / "log")]
    for writer in made:
        writer.has_converged = False  # type: ignore[attr-defined]
    one = Start({"writer": made[0]})
    one.own.writer.write()
    one.own.writer.has_converged = True
    one.own.writer.file.close()
    saved = one.saved()
    assert not Start({"writer": made[1]}, saved).own.writer.has_converged
    assert any("self.writer.has_converged: is in no checkpoint" in line for line in one.said)


def test_a_file_that_is_opened_when_it_is_needed_is_opened_again(tmp_path: Path) -> None:
    one = Start({"writer": Writer(tmp_path / "log")})
    one.own.writer.write()
    assert told(one) == []
    other = Start({"writer": Writer(tmp_path / "log")}, one.saved())
    assert lost(other) == []
    other.own.writer.write()
    assert other.own.writer.lines == 2
    for start in (one, other):
        start.own.writer.file.close()
    assert (tmp_path / "log").read_text() == "line\nline\n"


# --- sets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [range(5), [f"name {number}" for number in range(5)]])
def test_a_set_is_one_line_and_no_warning_as_pop_goes_on_where_nobody_sees(items: Any) -> None:
    one = Start({"seen": set()})
    one.own.seen.update(items)
    assert told(one) == []
    (line,) = one.said
    assert OF_A_SET in line


def test_a_set_that_has_not_changed_is_no_matter() -> None:
    names = {f"name {number}" for number in range(9)}
    one = Start({"names": names, "empty": set()})
    one.own.empty.add(1)
    assert told(one) == one.said == []


# --- beside the attributes ---------------------------------------------------------------------

SOURCE = """
import itertools
from collections import Counter

step = 0
table = {"a": [1], "b": 2}
numbers = itertools.count()
unchanged = [1, 2]

class Base:
    drawn = 0
    places = []

class Sampler(Base):
    counter = Counter(x=1)

    def draw(self, cache=[]):
        cache.append(1)

    @property
    def rate(self, seen={"rate": 0}):
        seen["rate"] += 1

def made():
    total = 0
    def add():
        nonlocal total
        total += 1
        add.calls += 1
    add.calls = 0
    return add

filled = {}
later = None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the user's as a new process does; a name is used in one test alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def imported(name: str) -> Any:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return imported


def test_globals_classes_cells_and_defaults_are_told_by_names_that_cannot_collide(
    module: Any,
) -> None:
    names = ("audited_one.state", "audited_two.state")

    def made() -> dict[str, Any]:
        modules = [module(name) for name in names]
        samplers = [found.Sampler() for found in modules]
        return {"modules": Notes(modules), "samplers": samplers, "add": modules[0].made()}

    one = Start(made(), exclude=["modules"])
    for found in one.own.modules:
        found.step += 1
        found.table["a"].append(2)
        next(found.numbers)
        found.Base.drawn += 1
        found.Base.places.append(1)
        found.Sampler.counter["x"] += 1
        found.Sampler().draw()
        assert found.Sampler().rate is None
    one.own.add()
    expected = ["self.add.calls", "self.add.total"]
    for name in names:
        expected += [
            f"module {name}.step",
            f"module {name}.table.a",
            f"module {name}.numbers (count)",
        ]
        expected += [f"class {name}.Base.drawn", f"class {name}.Base.places"]
        expected += [f"class {name}.Sampler.counter.x", f"function {name}.Sampler.draw.defaults.0"]
        expected += [f"function {name}.Sampler.rate.defaults.0.rate"]
    assert told(one) == sorted(expected)
    saved = one.saved()
    assert lost(Start(vars(one.own), saved, exclude=["modules"])) == []  # it is as it was
    assert lost(Start(made(), saved, exclude=["modules"])) == sorted(expected)


def test_what_is_beside_the_attributes_can_be_excluded(module: Any) -> None:
    def made() -> dict[str, Any]:
        return {"sampler": module("audited_three").Sampler()}

    one = Start(made(), exclude=["class audited_three.Base", "module audited_three"])
    found = sys.modules["audited_three"]
    found.step += 1  # type: ignore[attr-defined]
    found.Base.drawn += 1  # type: ignore[attr-defined]
    assert told(one) == []
    saved = one.saved()
    assert lost(Start(made(), saved)) == []


def test_what_the_code_sets_otherwise_is_one_line_and_no_loss(module: Any) -> None:
    def made(step: int) -> dict[str, Any]:
        found = module("audited_four")
        found.step = step
        return {"sampler": found.Sampler(), "scale": step}

    saved = Start(made(1)).saved()
    assert Start(made(1), saved).lines == []
    other = Start(made(2), saved)
    assert other.lost == []
    (line,) = other.lines
    assert line.startswith("set otherwise than by the start before: ")
    assert sorted(line.partition(": ")[2].split(", ")) == ["module audited_four.step", "self.scale"]


class Split(Tiny):
    """A split that each start draws anew, by a generator of its own that has no seed."""

    def setup_dataloader(self) -> None:
        random = np.random.default_rng()
        order, points = random.permutation(40), paddle.to_tensor(random.random([10, 4], "float32"))
        labels = paddle.zeros([10], "int64")
        self.train_loader = DataLoader(Subset(Points(40), order[:30]), batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset([points, labels]), batch_size=5)
        self.drawn = int(random.integers(1 << 40))  # is no sample


@pytest.mark.parametrize(
    ("args", "training", "is_told"),
    [
        ({}, {}, True),
        ({"fold": 0, "data": "a"}, {"log_interval": 2}, True),
        ({"fold": 1, "data": "a"}, {}, False),  # the user has asked for other samples
        ({"fold": 0, "data": "b"}, {}, False),
        ({"fold": 0, "data": "a", "force": True}, {"seed": 1}, False),
    ],
)
def test_a_split_without_a_seed_is_warned_of_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    args: dict[str, Any], training: dict[str, Any], is_told: bool,
) -> None:  # fmt: skip
    before = {"fold": 0, "data": "a"} if args else {}
    trained(Split, tmp_path, before, max_iteration=2)
    assert OTHER_DATA not in capsys.readouterr().err
    trained(Split, tmp_path, args, max_iteration=4, **training)
    said = [line for line in capsys.readouterr().err.splitlines() if "otherwise" not in line]
    (line,) = [line for line in said if OTHER_DATA in line] or [""]
    where = "self.train_loader.dataset.indices, self.valid_loader.dataset.tensors.0"
    assert (f"WARNING: {where}: {OTHER_DATA}" in line) == is_told


class Vocabulary(Tiny):
    """Whose names have numbers in the order of a set, which is another one in each process."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        order = np.random.default_rng().permutation(1000).tolist()
        ranks = sorted(range(8), key=order.__getitem__)
        self.few = {f"name {n}": number for number, n in enumerate(ranks)}
        self.dotted = {f"{n}.jpg": number for number, n in enumerate(ranks)}
        self.names = [f"name {n}" for n in ranks]  # as short as a list of words may be
        self.many = {f"name {n}": number for n, number in enumerate(order)}
        self.words = [f"name {n}" for n in order]
        self.started = {"pid": order[0], "port": 1000 + order[1]}


def test_numbers_that_names_have_by_a_set_are_warned_of_where_a_run_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Vocabulary, tmp_path, max_iteration=2).load_checkpoint("last")
    assert OTHER_DATA not in capsys.readouterr().err
    trained(Vocabulary, tmp_path, max_iteration=4)
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if OTHER_DATA in line]
    assert "WARNING: self.many, self.words, self.few, self.dotted: other" in line
    (others,) = [line for line in said.splitlines() if "set otherwise" in line]
    assert "self.started.pid, self.started.port" in others
    assert "self.names" in others
    exp = make(Vocabulary, tmp_path, {"evaluate": "last"}, max_iteration=4)
    exp.setup()
    exp.load_checkpoint("last")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert OTHER_DATA in line


def test_whether_the_cells_of_a_notebook_are_the_same_is_unknown(tmp_path: Path) -> None:
    exp = make(Split, tmp_path)
    assert conditions_of(exp, Code("Split", {"train.py": b"1"}, tmp_path, 1))
    assert conditions_of(exp, Code("Split", {}, tmp_path, 1)) == ""


def test_what_is_no_sample_is_set_otherwise_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(Split, tmp_path, max_iteration=2)
    capsys.readouterr()
    trained(Split, tmp_path, max_iteration=4)
    assert "set otherwise than by the start before: self.drawn\n" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "conditions_of", lambda *args: "of edited code")
    trained(Split, tmp_path, max_iteration=6)
    assert "self.drawn, self.train_loader.dataset.indices, " in capsys.readouterr().err


def test_a_cache_that_is_filled_is_told_when_it_changes_then(module: Any) -> None:
    one = Start({"sampler": module("audited_six").Sampler()})
    found = sys.modules["audited_six"]
    found.filled["table"] = 1  # type: ignore[attr-defined]
    found.later = 1  # type: ignore[attr-defined]
    assert told(one) == []
    found.filled["table"] += 1  # type: ignore[attr-defined]
    found.later += 1  # type: ignore[attr-defined]
    assert told(one) == ["module audited_six.filled.table", "module audited_six.later"]


def test_a_cache_that_was_filled_is_no_line_at_a_resume(module: Any) -> None:
    one = Start({"sampler": module("audited_seven").Sampler()})
    sys.modules["audited_seven"].later = 1  # type: ignore[attr-defined]
    saved = one.saved()
    assert Start({"sampler": module("audited_seven").Sampler()}, saved).lines == []


def test_what_was_told_is_remembered_over_several_starts(module: Any) -> None:
    def made() -> dict[str, Any]:
        return {"sampler": module("audited_five").Sampler()}

    one = Start(made())
    sys.modules["audited_five"].step = 5  # type: ignore[attr-defined]
    assert told(one) == ["module audited_five.step"]
    saved = one.saved()
    two = Start(made(), saved)
    assert lost(two) == ["module audited_five.step"]
    assert told(two) == []  # it was said
    saved = two.saved()
    assert lost(Start(made(), saved)) == []  # in that start it did not change


def test_at_most_twenty_are_named() -> None:
    one = Start({f"v{number}": None for number in range(30)})
    for name in [*vars(one.own)]:
        setattr(one.own, name, iter([1]))
    saved = one.saved()
    (line,) = one.warned
    names = line.partition(CHANGED)[0]
    assert names.count("self.") == 20
    assert names.endswith(" and 10 more")
    other = Start({f"v{number}": None for number in range(30)}, saved)
    assert len(other.lost) == 21
    assert other.lost[-1] == "and 10 more values"


def test_a_hook_that_training_adds_is_told_and_one_of_setup_is_not() -> None:
    def made(hooks: int) -> dict[str, Any]:
        model = paddle.nn.Sequential(paddle.nn.Linear(2, 2))
        for _ in range(hooks):
            model[0].register_forward_post_hook(lambda layer, x, y: y)
        return {"model": model}

    one = Start(made(1))
    assert told(one) == []
    one.own.model[0].register_forward_pre_hook(lambda layer, x: x)
    assert told(one) == ["self.model.0.forward hooks"]
    assert lost(Start(made(1), one.saved())) == ["self.model.0.forward hooks"]


def test_what_a_hook_keeps_to_itself_is_told() -> None:
    seen: list[int] = []
    model = paddle.nn.Linear(2, 2)
    model.register_forward_post_hook(lambda layer, x, y: seen.append(1))
    one = Start({"model": model})
    model(paddle.ones([1, 2]))
    assert told(one) == ["self.model.hook.seen"]


def test_a_cell_of_a_collate_function_is_a_place_also_deep_in_others() -> None:
    def made() -> dict[str, Any]:
        calls = [0]
        random = np.random.default_rng(2)

        def shuffled(batch: Any) -> Any:
            calls[0] += 1
            random.random()
            return batch

        def collate(batch: Any) -> Any:
            return shuffled(batch)

        return {"train_loader": DataLoader(Points(8), collate_fn=collate), "calls": None}

    one = Start(made())
    one.own.train_loader.collate_fn([1])
    one.own.train_loader.collate_fn([1])
    assert told(one) == []
    other = Start(made(), one.saved())
    cells = other.own.train_loader.collate_fn.__closure__[0].cell_contents.__closure__
    calls, random = (cell.cell_contents for cell in cells)
    assert calls == [2]
    assert random.random() == np.random.default_rng(2).random(3)[2]


def test_a_cell_of_a_loaders_part_of_an_installed_package_is_told(tmp_path: Path) -> None:
    source = """
import paddle

def shuffling(data):
    drawn = [0]
    def key(index):
        drawn[0] += 1
        return index
    class Helper(paddle.io.Sampler):
        pass
    helper = Helper(data)
    helper.key = key
    return helper
"""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "shuffling_helper.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        found = importlib.import_module("shuffling_helper")
    finally:
        sys.path.remove(str(folder))
    data = Points(8)
    sampler = found.shuffling(data)
    batches = paddle.io.BatchSampler(sampler=sampler, batch_size=2)
    one = Start({"train_loader": DataLoader(data, batch_sampler=batches)})
    sampler.key(1)
    (name,) = told(one)
    assert name == "self.train_loader.batch_sampler.sampler.key.drawn"


def test_what_can_be_reached_beyond_the_bound_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (walk, changed_values, unsaved_changes):
        monkeypatch.setattr(module, "MOST", 50)
    one = Start({"all": [SimpleNamespace(a=number) for number in range(100)]})
    (line,) = one.warned
    assert line.startswith("more than 50 objects can be reached from self")


def test_code_and_what_talks_to_the_world_stand_nowhere() -> None:
    for value in (len, int, operator.add, threading.Lock(), threading.current_thread()):
        assert unsaved_changes.stands(value) is None, value


def test_a_long_chain_of_iterators_has_no_known_position() -> None:
    def chained(count: int) -> Any:
        one: Any = iter([1, 2, 3])
        for _ in range(count):
            one = map(abs, one)
        return one

    few = chained(8)
    assert unsaved_changes.stands(few) == unsaved_changes.stands(chained(8))
    next(few)
    assert unsaved_changes.stands(few) != unsaved_changes.stands(chained(8))
    for count in (9, 5000):
        stand = unsaved_changes.stands(chained(count))
        assert stand is not None
        assert stand.text == unsaved_changes.UNKNOWN


def test_what_ipython_puts_into_a_notebook_is_not_the_users() -> None:
    class Shell:
        user_ns_hidden = {"In": None, "get_ipython": None}  # noqa: RUF012
        count = 0

        def get_ipython(self) -> None: ...

    notebook: Any = types.ModuleType("notebook")
    notebook.get_ipython, notebook.In, notebook._i7, notebook.seen = Shell().get_ipython, [], "", 0
    node = unsaved_changes.ModuleNode(notebook)
    assert [*node.places()] == ["seen"]
    assert [name for name, _ in node.children()] == ["seen"]
