"""Runs each kind of state that an experiment may hold straight, and once killed and continued.

A kind is a class of a few lines (kinds_of_*.py): what it makes in setup, and what it does with that
in an update, whose number is what the model learns. Its run of 10 iterations is made straight, and
again in two starts, of which the first is killed in iteration 6, after the checkpoint of iteration
4. Then it is one of these:

    exact     the same bits at the end, and no line of loss
    told      a line of the start that continues says what is lost: the core, or the doctor, who has
              seen it at an iteration
    refused   an error at once, before a checkpoint that no start could continue
    alarm     the same bits, and a warning all the same
    silent    other bits without a word
    stuck     the straight run ended well, and its checkpoint cannot be continued
    broken    a start ended otherwise: a traceback that is no message of expbase, or a signal; or
              the second one did not go on from the checkpoint, but began anew

Silent, stuck and broken are failures, and so is any other outcome than the kind expects.
A new kind:

    class Counter(Kind):
        def make(self): self.count = 0
        def use(self): self.count += 1; return self.count

    python tests/proofs/kinds.py [--only REGEX] [--show] [--effects] [--list] [--large]

With --effects each kind is made anew in iteration 5 of a straight run instead, and not changed at a
set moment: one that ends with the same bits has no effect, and would prove nothing.
With --large there are also those whose runs write hundreds of MB (`is_large`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import paddle
from compare import logged
from paddle.io import DataLoader, Dataset
from tiny import make

import expbase
from expbase import ExperimentBase
from expbase.base.processes import die_with_parent

EXACT, TOLD, REFUSED = "exact", "told", "refused"
EITHER = "exact told"  # restored, or named
LOUD = "exact told refused"  # what nothing promises to save
ALARM, SILENT, STUCK, BROKEN = "alarm", "silent", "stuck", "broken"
SAVED_AT, DIES_IN, END = 4, 6, 10  # iterations
_DIES, _FORGETS = "KINDS_DIES", "KINDS_FORGETS"  # in the environment of a start
_LONG_SECONDS = 120  # that no start takes
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=A)(?=[A-Z][a-z])")  # between those of a name
TELLING = re.compile(r"not exact|WARNING|nobody can look into|in another order")
# What an error must name: a path of the user's, or the method or setting that is wrong.
_NAMING = re.compile(r"self\.|values\.|setup_|train_|training\.|step-\d|\bsave")
FILES = ("values", "arrays", "names", "objects", "code", "opaque", "layers", "copies")
FILES += ("optimizers", "data", "orders", "shares", "ordinary", "own_optimizers", "turns")
FILES += ("references", "beginnings", "parameter_attributes", "contents", "installed")


def is_killed() -> bool:
    """Whether this start is the one that is killed."""
    return bool(os.environ.get(_DIES))


class Points(Dataset):
    """Three numbers each."""

    def __init__(self, size: int = 12) -> None:
        self.points = np.random.RandomState(7).randn(size, 3).astype("float32")

    def __getitem__(self, index: int) -> Any:
        return self.points[index]

    def __len__(self) -> int:
        return len(self.points)


class Kind(ExperimentBase):
    """One kind of state: `make` it in setup, `use` it in each update.

    What `use` returns is the number that the model learns, so what is lost changes the weights.
    """

    expected = EXACT  # several words: any of them
    has_effect = True  # whether the bits depend on it
    is_large = False  # runs only with --large
    processes = 1
    processes_then = 0  # of the start that continues, if they are not as many
    training: dict[str, Any] = {}  # noqa: RUF012

    def make(self) -> None:
        """Makes what is state."""

    def use(self) -> Any:
        """Changes it, and returns a number that depends on it."""
        return 0.0

    def script(self) -> None:
        """What the script does between setup() and run(); on one process."""

    def now(self, iteration: int) -> bool:
        """Whether something is to be changed in this iteration."""
        return self.iteration == iteration and not os.environ.get(_FORGETS)

    def loader(self) -> Any:
        return DataLoader(Points(), batch_size=4, shuffle=True)

    def net(self) -> Any:
        return paddle.nn.Linear(3, 1)

    def optimizers(self) -> None:
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=self.model.parameters())

    def setup_dataloader(self) -> None:
        self.train_loader = self.loader()

    def setup_model(self) -> None:
        self.model = self.net()
        self.optimizers()
        self.make()

    def train_batch(self) -> None:
        if self.iteration == DIES_IN and is_killed():
            while not (self.checkpoint_dir / f"step-{SAVED_AT:08d}").exists():
                time.sleep(0.01)  # it is written meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        if self.iteration == SAVED_AT + 1 and os.environ.get(_FORGETS):
            self.make()
        loss = self.update()
        self.log(loss=loss)

    def update(self) -> Any:
        """One update; returns its loss."""
        batch = self.read_batch()
        target = float(np.sin(float(self.use())))
        loss = (self.model(batch) - target).square().mean()
        loss.backward()
        self.step()
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()

    def valid(self) -> None:
        """Is never asked for."""

    def on_exception(self, exception: BaseException) -> None:
        note_error(exception, Path(self.output_dir))

    def weights(self) -> Any:
        """What must be the same at the end: tensors."""
        return self.model.state_dict().values()

    def terminal(self) -> None:
        super().terminal()
        if self.rank == 0:
            sums = [zlib.crc32(tensor.numpy().tobytes()) for tensor in self.weights()]
            (Path(self.output_dir) / "weights").write_text(json.dumps(sums))


@dataclass
class Verdict:
    """What became of a kind."""

    name: str
    found: str
    lines: list[str]  # of the logs, or of the error
    expected: str
    by: str = ""  # who tells of it, and from which iteration on

    @property
    def is_wrong(self) -> bool:
        return self.found not in self.expected.split()


@dataclass
class Start:
    """How a start of a kind ended."""

    output: Path
    status: int  # as os.waitpid has it
    error: str = ""
    is_message: bool = False  # raised by expbase, and by nothing that it called
    lines: Sequence[str] = ()  # of its log that tell of a loss
    has_resumed: bool = False

    def result(self) -> Any:
        return (self.output / "weights").read_text(), logged(self.output)


def kinds() -> dict[str, type[Kind]]:
    """All of them by name."""
    found: dict[str, type[Kind]] = {}
    for name in FILES:
        __import__(f"kinds_of_{name}")
    # Of the module that they import, not of this one, which may be __main__.
    pending = sys.modules["kinds"].Kind.__subclasses__()
    while pending:
        kind = pending.pop(0)
        pending[:0] = kind.__subclasses__()
        if not kind.__name__.startswith("_"):
            name = _WORDS.sub(" ", kind.__name__).lower()
            assert name not in found, name
            found[name] = kind
    return found


def judge(name: str, kind: type[Kind], folder: Path) -> Verdict:
    """Runs a kind straight, and killed and continued."""

    def verdict(found: str, *lines: str) -> Verdict:
        by = _told_by(folder / "run") if found == TOLD else ""
        return Verdict(name, found, [line for line in lines if line], kind.expected, by)

    processes = kind.processes
    straight = start(kind, folder / "straight", 1)
    if straight.status and not straight.is_message:
        return verdict(BROKEN, straight.error or f"wait status {straight.status}")
    killed = start(kind, folder / "run", processes, DIES=True)
    is_killed = killed.status in (signal.SIGKILL, (128 + signal.SIGKILL) << 8)
    if not is_killed:
        is_refused = _is_same(straight, killed, processes)
        is_refused |= processes > 1 and not straight.status and killed.is_message
        return verdict(REFUSED if is_refused else BROKEN, straight.error, killed.error)
    second = start(kind, folder / "run", kind.processes_then or processes)
    if second.status:
        is_same = _is_same(straight, second, processes)
        return verdict(REFUSED if is_same else STUCK, straight.error, second.error)
    if straight.status:
        return verdict(BROKEN, straight.error, "and the killed run came to its end")
    if not second.has_resumed:
        return verdict(BROKEN, "the second start began anew")
    is_same = second.result() == straight.result()
    if second.lines and (not is_same or TOLD in kind.expected):
        return verdict(TOLD, *second.lines)
    if not is_same:
        return verdict(SILENT, *killed.lines)
    alarms = [*straight.lines, *killed.lines, *second.lines]
    return verdict(ALARM if alarms else EXACT, *alarms)


def _told_by(run: Path) -> str:
    """Who tells of a loss: the doctor, from the look at an iteration on, or the core."""
    file = run / "doctor.json"
    looks = json.loads(file.read_text())["looks"] if file.exists() else {}
    seen = [int(iteration) for iteration, look in looks.items() if look["told"] or look["asked"]]
    return f"by the doctor, at {min(seen)}" if seen else "by the core"


def forgets(name: str, kind: type[Kind], folder: Path) -> Verdict:
    """Runs a kind straight, and again with a state that is made anew on the way."""
    straight = start(kind, folder / "straight", 1)
    other = start(kind, folder / "run", 1, FORGETS=True)
    if straight.status or other.status:
        return Verdict(name, "effect", [straight.error, other.error], "effect")
    has_effect = straight.result() != other.result()
    return Verdict(name, "effect" if has_effect else "none", [], "effect")


def _is_same(straight: Start, other: Start, processes: int) -> bool:
    """Whether both end with the same message; on several processes its words may be others."""
    texts = {begun.error.replace(str(begun.output), "RUN") for begun in (straight, other)}
    return straight.is_message and other.is_message and (len(texts) == 1 or processes > 1)


def start(kind: type[Kind], output: Path, processes: int, **how: bool) -> Start:
    """One start of a run in a fork, to its end."""
    log = output / "worker_0.log"
    before = log.stat().st_size if log.exists() else 0
    error = output.with_suffix(".error")
    error.unlink(missing_ok=True)
    pid = fork(lambda: _train(kind, output, processes, how))
    status = os.waitpid(pid, 0)[1]
    text, is_message = json.loads(error.read_text()) if error.exists() else ("", False)
    said = log.read_bytes()[before:].decode() if log.exists() else ""
    said = said.replace(kind.__name__, "")  # in which such words may be
    lines = [line for line in said.splitlines() if TELLING.search(line)]
    return Start(output, status, text, is_message, lines, "CONTINUING the run" in said)


def fork(function: Callable[[], object]) -> int:
    """Calls it in a fork, which never returns; the id of the process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def redirect(file: Path) -> None:
    """Appends what this process prints to a file."""
    said = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(said, 1)
    os.dup2(said, 2)


def _train(kind: type[Kind], output: Path, processes: int, how: dict[str, bool]) -> None:
    signal.alarm(_LONG_SECONDS)
    redirect(output.with_suffix(".said"))
    os.environ.update({f"KINDS_{name}": "1" for name in how})
    os.fsync = lambda fd: None  # no disk is lost here, and it is a fifth of the time
    training = {"max_iteration": END, "save_interval": SAVED_AT, "valid_interval": 0}
    training |= kind.training
    try:
        if processes > 1:
            words = ["--output", str(output), "--device", "cpu", "--nprocs", str(processes)]
            settings = {"log_interval": 1, **training}.items()
            expbase.main(kind, argv=[*words, *(f"training.{k}={v}" for k, v in settings)])
            return
        exp = make(kind, output, **training)
        exp.setup()
        exp.script()
        exp.run()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except Exception as raised:
        traceback.print_exc()
        note_error(raised, output)
        os._exit(1)


def note_error(error: BaseException, output: Path) -> None:
    """Writes down an exception, and whether it is a message of expbase that names something.

    Of several ranks one may fail because another one has.
    """
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    is_message = str(Path(expbase.__file__).parent) in where and _NAMING.search(str(error))
    file = output.with_suffix(".error")
    if is_message or not file.exists():
        file.write_text(json.dumps([f"{type(error).__name__}: {error}", bool(is_message)]))


def verdicts(
    names: Sequence[str], all_kinds: dict[str, type[Kind]], how: Callable[..., Verdict], jobs: int
) -> Iterator[Verdict]:
    """Of each kind, some at a time, as they come."""
    waiting = list(names)
    running: dict[int, tuple[str, Path]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            folder = Path(tempfile.mkdtemp(prefix="expbase-kinds-"))
            running[fork(lambda n=name, f=folder: _judged(n, all_kinds[n], f, how))] = name, folder
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                name, folder = running.pop(pid)
                file = folder / "verdict"
                lines = file.read_text() if file.exists() else ""
                shutil.rmtree(folder, ignore_errors=True)
                expected = all_kinds[name].expected
                found = json.loads(lines) if lines else [name, BROKEN, ["no verdict"], expected]
                yield Verdict(*found)
        time.sleep(0.005)


def _judged(name: str, kind: type[Kind], folder: Path, how: Callable[..., Verdict]) -> None:
    found = how(name, kind, folder)
    words = [found.name, found.found, found.lines, found.expected, found.by]
    (folder / "verdict").write_text(json.dumps(words))


def main() -> int:
    """Prints the table and the counts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="kinds with such a name")
    parser.add_argument("--show", action="store_true", help="the lines and errors of each")
    parser.add_argument("--effects", action="store_true", help="whether each would be noticed")
    parser.add_argument("--list", action="store_true", help="their names and what is expected")
    parser.add_argument("--large", action="store_true", help="those of hundreds of MB, too")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time")
    args = parser.parse_args()
    all_kinds = kinds()
    names = [name for name in all_kinds if re.search(args.only, name)]
    if not args.large:
        names = [name for name in names if not all_kinds[name].is_large]
    if args.effects:
        names = [name for name in names if all_kinds[name].has_effect]
    if args.list:
        for name in names:
            print(f"{all_kinds[name].expected:20} {name}")
        return 0
    import visualdl  # noqa: F401  # what each start would import

    gc.collect()
    gc.freeze()  # no fork looks for garbage in what is loaded
    counts: Counter[str] = Counter()
    wrong = 0
    for found in verdicts(names, all_kinds, forgets if args.effects else judge, args.jobs):
        counts[found.found] += 1
        wrong += found.is_wrong
        mark = f"  FAILED: expected {found.expected}" if found.is_wrong else ""
        by = f"  {found.by}" if found.by else ""
        print(f"{found.found:8} {found.name}{by}{mark}", flush=True)
        for line in found.lines if args.show else ():
            print(f"         | {line}", flush=True)
    kept = (EXACT, TOLD, REFUSED, SILENT, STUCK)
    shown = {**dict.fromkeys(() if args.effects else kept, 0), **counts}
    print(f"{len(names)} kinds: {', '.join(f'{k} {n}' for k, n in shown.items())}; {wrong} wrong")
    return int(wrong > 0 or not names)


if __name__ == "__main__":
    import kinds as whole

    sys.exit(whole.main())
