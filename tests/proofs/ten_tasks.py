"""Ten tasks of an ordinary training, how many lines of ours each needs, and how many names.

    python tests/proofs/ten_tasks.py             # runs each task, and prints the table
    python tests/proofs/ten_tasks.py --count     # the table alone

The first task is a whole script; each other one is what a user changes in it for that task, and the
commands that he gives. `Task.check` looks at the run for what the task promises.

A line counts if it is there because of expbase: a line of a script with a name of ours, unless it
stands in the script without the task, too, or a command (of the launcher of paddle, too; `python
train.py` counts once). Plain Paddle does not count: net, loss, data, optimizer, schedule.
A name of ours is a class, function, method, attribute, config key or command-line option of expbase
that a reader must know; over the ten each counts once. Names of nets, optimizers and schedules on
`self` are free. They are found by Python's parser, not by hand: see `names_in`. Beside ours the
table has three other libraries by the same rule, as text: ten_tasks_of_others.py.

What the proof adds to a command makes the run short, and no task needs it: SHORT,
`Task.short`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import ten_tasks_of_others as others

import expbase
from expbase import ExperimentBase, default_argument_parser, get_default_training_config
from expbase.cli import add_options_of_main
from expbase.extras import mixins
from expbase.record.visualizer import FILE_NAME, Visualizer

MOST_LINES = 31
MOST_NAMES = 24
SHORT = ["--device", "cpu", "training.max_iteration=8", "training.log_interval=1"]
TRAIN = "python train.py"

FIRST = '''
import paddle
from paddle.io import DataLoader, TensorDataset
from expbase import ExperimentBase, main


class Sides(ExperimentBase):
    """On which side of a line does a point lie?"""

    def setup_dataloader(self):
        points = paddle.uniform([40, 2], min=-1)
        sides = (points.sum(axis=1) > 0).astype("int64")
        data = TensorDataset([points, sides])
        self.train_loader = DataLoader(data, batch_size=5, shuffle=True)

    def setup_model(self):
        self.net = paddle.nn.Linear(2, 2)
        self.adam = paddle.optimizer.Adam(0.1, parameters=self.net.parameters())

    def train_batch(self):
        points, sides = self.read_batch()
        loss = paddle.nn.functional.cross_entropy(self.net(points), sides)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)


if __name__ == "__main__":
    main(Sides)
'''

VALIDATED = {
    "        self.train_loader = DataLoader(data, batch_size=5, shuffle=True)\n": """\
        self.train_loader = DataLoader(data, batch_size=5, shuffle=True)
        self.valid_loader = DataLoader(data, batch_size=8)
""",
    "        self.log(loss=loss)\n": """\
        self.log(loss=loss)

    def valid(self):
        for points, sides in self.valid_batches():
            right = self.net(points).argmax(axis=1) == sides
            self.log(accuracy=right.astype("float32").mean())
""",
}
ON_TWO_PROCESSES = {
    "        self.net = paddle.nn.Linear(2, 2)\n": """\
        self.net = self.data_parallel(paddle.nn.Linear(2, 2))
""",
}
PICTURED = {
    "        self.log(loss=loss)\n": """\
        self.log(loss=loss)
        self.visualizer.add_image("weights", paddle.nn.functional.sigmoid(self.net.weight))
""",
}
STOPPED_EARLY = {
    "from expbase import ExperimentBase, main\n": """\
from expbase import ExperimentBase, main
from expbase.extras.mixins import EarlyStopping
""",
    "class Sides(ExperimentBase):": "class Sides(EarlyStopping, ExperimentBase):",
}
# A train_batch that has this loop from the beginning needs the command alone.
ACCUMULATED = {
    """\
        points, sides = self.read_batch()
        loss = paddle.nn.functional.cross_entropy(self.net(points), sides)
        self.backward(loss)
""": """\
        for points, sides in self.micro_batches():
            loss = paddle.nn.functional.cross_entropy(self.net(points), sides)
            self.backward(loss)
""",
}
WARMED_UP = {
    "        self.adam = paddle.optimizer.Adam(0.1, parameters=self.net.parameters())\n": """\
        self.rate = paddle.optimizer.lr.LinearWarmup(0.1, 5, start_lr=0.0, end_lr=0.1)
        self.adam = paddle.optimizer.Adam(self.rate, parameters=self.net.parameters())
""",
    "        self.step_optimizers()\n": """\
        self.step_optimizers()
        self.rate.step()
""",
}
OWN_LOOP = {
    "        self.log(loss=loss)\n": """\
        self.log(loss=loss)

    def train(self):
        while self.going_on():
            self.train_batch()
            self.end_iteration()
        print("the loop of one's own is over")
""",
}


class Run:
    """The run of a task: its files, and what was said."""

    def __init__(self, folder: Path, said: str) -> None:
        self.folder = folder / "runs/Sides"
        self.said = said
        text = (self.folder / "metrics.jsonl").read_text()
        self.lines = [json.loads(line) for line in text.splitlines()]

    def curve(self, name: str) -> list[float]:
        """Returns a metric, in order."""
        return [line[name] for line in self.lines if name in line]

    def weights(self, iteration: int) -> bytes:
        """Returns the bytes of the net in a checkpoint."""
        return (self.folder / f"checkpoints/step-{iteration:08}/net.safetensors").read_bytes()


def look_first(run: Run) -> None:
    """Trained, logged and saved, and one line says that nothing is validated."""
    assert len(run.curve("train/loss")) == 8
    assert run.weights(8)
    assert "valid       never: Sides has no valid()" in run.said


def look_validated(run: Run) -> None:
    """Validated."""
    assert run.curve("valid/accuracy")


def look_resumed(run: Run) -> None:
    """The command that was killed and given again came to the bits of one that was not."""
    assert "CONTINUING the run" in run.said
    assert [line["iteration"] for line in run.lines] == [*range(100, 4001, 100)]
    straight = run.folder.parents[1] / "straight"
    assert run.weights(4000) == Run(straight, "").weights(4000)


def look_two(run: Run) -> None:
    """Two ranks shared the batches."""
    assert "device      cpu, ranks: 2" in run.said
    assert "4 batches a rank's epoch, dealt out over 2 ranks" in run.said


def look_pictured(run: Run) -> None:
    """The board has a picture of each iteration."""
    from visualdl import LogReader

    reader = LogReader(file_path=str(run.folder / FILE_NAME))
    assert [image.id for image in reader.get_data("image", "weights")] == [*range(1, 9)]


def look_stopped(run: Run) -> None:
    """Stopped before the end, since the accuracy did not get better."""
    assert "STOPPED by early stopping: accuracy was" in run.said
    assert run.lines[-1]["iteration"] < 200


def look_best(run: Run) -> None:
    """The best checkpoint is there, and gives what it gave."""
    [found] = [json.loads(line) for line in run.said.splitlines() if line.startswith("{")]
    assert found["accuracy"] == max(run.curve("valid/accuracy"))


def look_accumulated(run: Run) -> None:
    """Eight updates took four epochs of eight batches."""
    assert "update      4 batches of 5 samples, 20 together" in run.said
    assert [line["epoch"] for line in run.lines] == [1, 1, 2, 2, 3, 3, 4, 4]


def look_warm(run: Run) -> None:
    """The rate rose for five updates, and stayed."""
    rates = run.curve("train/lr")
    assert rates[:5] == sorted({*rates[:5]})
    assert {*rates[4:]} == {0.1}


def look_own_loop(run: Run) -> None:
    """The loop went to the end, with all that is due in it."""
    assert "the loop of one's own is over" in run.said
    assert run.weights(8)


@dataclass
class Task:
    """One task: what it changes in the script of another one, and its commands."""

    name: str
    commands: Sequence[str]
    check: Callable[[Run], None] | None  # None: of another library, which does not run
    changes: Mapping[str, str] = field(default_factory=dict)
    after: Task | None = None  # whose script is changed; None: this is the first one
    short: Sequence[str] = ()
    killed: bool = False  # whether the run is killed, and its command given again
    library: others.Library | None = None  # None: ours

    @property
    def script(self) -> str:
        """The whole script."""
        begin = self.library.first if self.library else FIRST
        text = self.after.script if self.after else begin.lstrip()
        for old, new in self.changes.items():
            assert text.count(old) == 1, (self.name, old)
            text = text.replace(old, new)
        return text

    def lines(self) -> list[str]:
        """Returns its lines of the library, which are not there without the task."""
        numbers = {number for number, _ in self.found()}
        return [line for n, line in self.new_lines() if n in numbers] + self.new_commands()

    def plain_lines(self) -> list[str]:
        """Returns its other lines, which the user writes in any library's way."""
        numbers = {number for number, _ in self.found()}
        return [line for number, line in self.new_lines() if number not in numbers]

    def new_lines(self) -> Iterator[tuple[int, str]]:
        """Yields each line that is not there without the task, with its number."""
        there = {"", *(map(str.strip, self.after.script.splitlines()) if self.after else ())}
        for number, line in enumerate(self.script.splitlines(), 1):
            if line.strip() not in there:
                yield number, line.strip()

    def found(self) -> Iterator[tuple[int, str]]:
        """Yields each name of the library in the script, with the number of its line."""
        if self.library is None:
            return names_in(self.script)
        return names_of_others_in(self.script, self.library.names)

    def names(self) -> set[str]:
        """Returns the names of the library in its script and its commands."""
        found = {name for _, name in self.found()}
        return found | {name for command in self.commands for name in names_in_command(command)}

    def new_commands(self) -> list[str]:
        """Returns its commands, without the one that starts any script."""
        return [c for c in self.commands if not self.after or self.killed or c != TRAIN]


first = Task("first run", [TRAIN], look_first)
validation = Task("validation", [TRAIN], look_validated, VALIDATED, first)
TASKS = [
    first,
    validation,
    Task(
        "resume",
        [TRAIN],
        look_resumed,
        after=first,
        killed=True,
        short=["training.max_iteration=4000", "training.save_interval=100",
               "training.log_interval=100"],
    ),
    Task(
        "two processes",
        ["python -m paddle.distributed.launch --nproc_per_node 2 train.py"],
        look_two,
        ON_TWO_PROCESSES,
        first,
    ),
    Task("an image", [TRAIN], look_pictured, PICTURED, first),
    Task(
        "early stopping",
        [f"{TRAIN} training.monitor=accuracy"],
        look_stopped,
        STOPPED_EARLY,
        validation,
        ["training.valid_interval=4", "training.max_iteration=200"],
    ),
    Task(
        "best checkpoint",
        [f"{TRAIN} training.monitor=accuracy", f"{TRAIN} --evaluate best"],
        look_best,
        after=validation,
        short=["training.valid_interval=2"],
    ),
    Task(
        "accumulation",
        [f"{TRAIN} training.accumulation_steps=4"],
        look_accumulated,
        ACCUMULATED,
        first,
    ),
    Task("warm-up", [TRAIN], look_warm, WARMED_UP, first),
    Task("a loop of one's own", [TRAIN], look_own_loop, OWN_LOOP, first),
]  # fmt: skip


# --- counting --------------------------------------------------------------------------------

OF_EXPERIMENT = {name for name in dir(ExperimentBase) if not name.startswith("_")}
OF_EXPERIMENT |= {*ExperimentBase.__annotations__} - {"model", "optimizer"}  # the names are free
IMPORTED = {*expbase.__all__} | {name for name in vars(mixins) if name[0].isupper()}
KEYS = {*get_default_training_config()}
OF_VISUALIZER = {name for name in dir(Visualizer) if not name.startswith("_")}


def names_in(script: str) -> Iterator[tuple[int, str]]:
    """Yields each name of ours in a script, with the number of its line."""
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.FunctionDef) and node.name in OF_EXPERIMENT:
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and node.id in IMPORTED:
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("expbase"):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
            known = {"self": OF_EXPERIMENT, "super()": OF_EXPERIMENT}
            known |= {"self.visualizer": OF_VISUALIZER, "self.config.training": KEYS}
            if name in known.get(owner, ()):
                yield node.lineno, name


def names_of_others_in(script: str, names: Set[str]) -> Iterator[tuple[int, str]]:
    """Yields each name of another library in a script, with the number of its line."""
    for node in ast.walk(ast.parse(script)):
        match node:
            case ast.FunctionDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                said = [name]
            case ast.ImportFrom(names=aliases):
                said = [alias.name for alias in aliases]
            case ast.keyword(arg=str(name)):
                said = [name]
            case ast.Dict(keys=keys):
                said = [key.value for key in keys if isinstance(key, ast.Constant)]
            case _:
                continue
        yield from ((node.lineno, name) for name in said if name in names)


def names_in_command(command: str) -> Iterator[str]:
    """Yields each config key and each option of ours in a command."""
    parser = default_argument_parser()
    add_options_of_main(parser)
    options = {word for action in parser._actions for word in action.option_strings}
    for word in command.split():
        name = word.partition("=")[0]
        if name in options or name.removeprefix("training.") in KEYS:
            yield name.removeprefix("training.")


def tasks_of(library: others.Library) -> list[Task | None]:
    """Returns the ten tasks of another library; None for one that cannot be done with it."""
    made: dict[str, Task] = {}
    for task in TASKS:
        changes = library.changes.get(task.name, {})
        if changes is not None:
            made[task.name] = Task(
                task.name,
                [library.commands.get(task.name, TRAIN)],
                None,
                changes,
                made[task.after.name] if task.after else None,
                killed=task.killed,
                library=library,
            )
    return [made.get(task.name) for task in TASKS]


def column(tasks: Sequence[Task | None]) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Returns a library's numbers of each task: its lines, its names beside those before it, and
    the plain lines; and all of its names, in order.
    """
    names: dict[str, None] = {}
    rows = []
    for task in tasks:
        new = sorted(task.names() - names.keys()) if task else []
        names |= dict.fromkeys(new)
        lines, plain = (task.lines(), task.plain_lines()) if task else ([], [])
        rows.append((len(lines), len(new), len(plain)))
    return rows, [*names]


def count() -> tuple[int, int, list[str]]:
    """Returns the lines and the names of all tasks, and a table with the other libraries."""
    columns: dict[str, list[Task | None]] = {"expbase": [*TASKS]}
    columns |= {library.name: tasks_of(library) for library in others.LIBRARIES}
    short = {library.name: library.falls_short for library in others.LIBRARIES}
    counted = {name: column(tasks) for name, tasks in columns.items()}
    table = [f"{'lines names +plain':<20}" + "".join(f"{name:>15}" for name in columns)]
    for number, task in enumerate(TASKS):
        row = f"{task.name:<20}"
        for name, (rows, _) in counted.items():
            numbers = "{:>4} {:>4} {:>+4}".format(*rows[number]) if columns[name][number] else "-"
            row += f"{numbers:>14}" + ("*" if task.name in short.get(name, ()) else " ")
        table.append(row.rstrip())
    sums = {name: [sum(c) for c in zip(*rows, strict=True)] for name, (rows, _) in counted.items()}
    table.append(
        f"{'in all':<20}" + "".join("{:>5} {:>4} {:>+4} ".format(*s) for s in sums.values())
    )
    for name, (_, names) in counted.items():
        table.append(f"{name}: {' '.join(names)}")
        table += [f"  * {task}: {text}" for task, text in short.get(name, {}).items()]
    lines, names, _ = sums["expbase"]
    return lines, names, table


# --- running ---------------------------------------------------------------------------------


def run(task: Task, folder: Path) -> None:
    """Runs a task in an empty folder, and looks at what it promises."""
    (folder / "train.py").write_text(task.script)
    said = ""
    for command in task.commands:
        words = command.replace("python", sys.executable, 1).split()
        only_looks = "--evaluate" in words
        words += SHORT[:2] if only_looks else [*SHORT, *task.short]
        if task.killed:
            straight = folder / "straight"
            straight.mkdir()
            (straight / "train.py").write_text(task.script)
            started(words, straight)
            kill_after_a_checkpoint(words, folder)
        said += started(words, folder)
    assert task.check is not None
    task.check(Run(folder, said))


def started(words: Sequence[str], folder: Path) -> str:
    """Runs a command to its end; returns what it and its ranks have said."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    logs = [path.read_text() for path in folder.glob("runs/*/worker_*.log")]
    return "\n".join([done.stdout, *logs])


def kill_after_a_checkpoint(words: Sequence[str], folder: Path) -> None:
    """Starts a command, and ends it by kill -9 when it has a checkpoint."""
    checkpoint = folder / "runs/Sides/checkpoints/step-00000100"
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.DEVNULL) as process:
        while not checkpoint.exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def main(given: Sequence[str] | None = None) -> int:
    """Runs the tasks, and prints what they need; 1 if that is more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", action="store_true", help="run nothing")
    parser.add_argument("--only", metavar="TASK", help="run this one")
    args = parser.parse_args(given)
    os.environ["PYTHONWARNINGS"] = "ignore"
    for task in [] if args.count else TASKS:
        if not args.only or task.name == args.only:
            with tempfile.TemporaryDirectory() as folder:
                run(task, Path(folder))
            print(f"{task.name}: {re.sub('[.]$', '', task.check.__doc__ or '')}", flush=True)
    lines, names, table = count()
    print("\n".join(table))
    return int(lines > MOST_LINES or names > MOST_NAMES)


if __name__ == "__main__":
    sys.exit(main())
