"""Proves that your experiment survives being killed.

It runs your script, or `-m` and a module, straight through, then again with kill -9 at random
moments, inside a save and inside a validation too, and compares every file of tensors, counter and
logged number. If they differ, it runs once more without a kill: a script that does not repeat
itself is named as such, and two more runs, which make updates several times from one state, show
where. The words after --, such as -- --nprocs 2, are for the script, which must have an option
--output. All runs are on the CPU, unless these words name a --device: then they have
training.deterministic=True, too. With --ranks it also runs straight through on each of these
numbers of processes, and each start between the kills is on one of them; the script must have an
option --nprocs, and training.shares.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.base.exit_codes import ExitCode
from expbase.base.files import remove
from expbase.base.json_lines import json_lines
from expbase.checkpoint import layout
from expbase.checkpoint.named import find_at
from expbase.cli import count
from expbase.config import CONFIG, ConfigError, differences, load_yaml
from expbase.engine.compare_runs import files, logged, values
from expbase.record.logs import NOT_EXACT
from expbase.tools import add_tool, make_folder, nondeterminism
from expbase.tools.child_processes import ended_by_signals, kill
from expbase.tools.repeat_update import FIRST
from expbase.tools.verified_run import KINDS, PLAN, killed_path, notes_path

_DELAY = 0.02  # the longest time from the beginning of an iteration to a kill, in seconds
_AGAIN = {"again": "the second time", "again-2": "the third time"}  # names of runs
_UNEXPLAINED = "no line of the log says why"
# The fields of a note, each with the likely cause of a first difference in it.
_CAUSES = {
    "before": "{names} differ before the update",
    "indices": "Likely cause: data order: other samples. A sampler with a generator of its own? "
    "Give it state_dict and set_state_dict, or draw from np.random",
    "batches": "Likely cause: augmentation: the data set made something else of the same samples. "
    "A generator of its own? Draw from random, np.random or paddle inside __getitem__",
    "rates": "Likely cause: schedule: another learning rate. Make the schedule an attribute of the "
    "experiment, or step it from self.iteration",
    "after": f"{{names}} differ after the update, and {_UNEXPLAINED}: a thread, a file, "
    "an object made in C is out of sight",
}
# Lines of a log on what a start has not restored.
_LOST = re.compile(rf"(?:{NOT_EXACT}|(?=sets, to whose items))(.*)")
_BY_HAND = re.compile(r"(a DataLoader of \S+|\S+) is read by hand: ")  # a line of the doctor
_CAUSES_OF_RANKS = _CAUSES | dict.fromkeys(
    ("before", "after"),
    "Likely cause: what depends on the number of processes, or is no state: a draw from self.rank, "
    "batch statistics over the ranks, gradients that are averaged by hand, a generator that every "
    "share draws from, or another number of threads: {names} differ",
)
# For a script that does not repeat itself: there a field points at no cause.
_NO_CAUSES = {
    "before": "The state before the update differs: {names}",
    "indices": "The samples of a batch differ",
    "batches": "What the data set made of the same samples differs",
    "rates": "A learning rate differs",
    "after": "The update itself differs: {names}",
}
_CAUSES_OF_CHANCE = (
    "Known causes: the time; numbers of the system, by os.urandom or a generator without a seed; "
    "the order of a set (PYTHONHASHSEED=0 fixes it); threads; a kernel that is not repeatable, "
    "such as Adam's of an Embedding(sparse=True) on the CPU (lazy_mode=True repeats)."
)


def add_parser(tools: Any) -> None:
    codes = "0 identical, 1 not, or a run that failed, 130 Ctrl-C, 143 SIGTERM"
    usage = "[options] (FILE | -m MODULE)\n       --output DIR [-- WORDS]"
    parser = add_tool(tools, main, codes, usage)
    add = parser.add_argument
    add("script", nargs="?", default="", metavar="FILE", help="your train.py")
    add("-m", dest="module", default="", metavar="MODULE",
        help="instead: your package.train, as python -m runs it from here")  # fmt: skip
    add("--output", type=Path, required=True, metavar="DIR", help="a new directory for both runs")
    add("--iterations", type=partial(count, least=10), default=40, metavar="N",
        help="of each run, 10 or more (default: 40)")  # fmt: skip
    add("--kills", type=count, default=6, metavar="K", help="how often to kill (default: 6)")
    add("--ranks", type=_numbers, default=[], metavar="N,N",
        help="numbers of processes, with training.shares")  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [count(word) for word in text.split(",")]


def _device(words: Sequence[str]) -> str:
    """Returns the device that the script's words ask for; by default the CPU, which repeats all."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    return str(parser.parse_known_args(words)[0].device)


def main(args: argparse.Namespace) -> int:
    if bool(args.script) == bool(args.module):
        raise ValueMistake("expected a training script, or -m and a module.")
    if args.script and not Path(args.script).is_file():
        raise ValueMistake(f"{args.script}: no such file; expected a training script.")
    make_folder(args.output)  # a new one: other files in it could not be compared
    straight = ComparedRun(args, "straight", args.ranks[:1])
    others = [ComparedRun(args, f"straight-{number}", [number]) for number in args.ranks[1:]]
    killed = ComparedRun(args, "killed", args.ranks)
    with ended_by_signals():
        keys = " ".join(f"{key}={value}" for key, value in straight.training.items())
        where = "the CPU" if straight.device == "cpu" else straight.device
        print(f"straight through, on {where}, with training.* {keys}", flush=True)
        straight.finish()
        if args.ranks:
            straight.check_shares()
        for other in others:
            print(f"straight through on {other.numbers[0]} processes", flush=True)
            other.finish()
            if difference := first_difference(straight, other):
                where = f" on {other.numbers[0]} processes"
                return _not_identical(args, where, difference, straight, other)
        print(f"again, with {args.kills} times kill -9", flush=True)
        killed.finish_with_kills(random.Random(0), args.kills)
        if difference := first_difference(straight, killed):
            return _not_identical(args, "", difference, straight, *others)
    if straight.saved()["loop"]["epoch"] == 1:
        print("note: within one epoch; more --iterations would prove more")
    numbers = len(logged(straight.directory))
    compared = f"{len(files(find_at(straight.directory)))} files, {numbers} logged numbers"
    if args.ranks:
        compared += f", on {', '.join(map(str, args.ranks))} processes"
    print(f"identical: {args.iterations} iterations, {args.kills} kills, {compared}")
    return 0


def _not_identical(
    args: argparse.Namespace, where: str, difference: str, *undisturbed: ComparedRun
) -> int:
    """Prints the difference, or that the script does not repeat itself without a kill either."""
    once = max(undisturbed, key=lambda side: [*side.numbers])  # more processes have more causes
    print("not identical; once more without a kill", flush=True)
    again = ComparedRun(args, "again", once.numbers)
    again.finish()
    chance = first_difference(once, again)
    if not chance and _UNEXPLAINED in difference:  # these two may be the same by chance
        print(f"{_UNEXPLAINED}; once more without a kill", flush=True)
        again = ComparedRun(args, "again-2", once.numbers)
        again.finish()
        chance = first_difference(once, again)
    found: list[str] = []
    if chance:
        where = ""
        if note := first_note(once, again):
            found += _found(args, note[0], once)
        difference = f"the script does not repeat itself: {chance}"
        difference += "" if found else f" {_CAUSES_OF_CHANCE}"
    print("\n".join([f"NOT IDENTICAL{where}: {difference}", *found]))
    return 1


def _found(args: argparse.Namespace, iteration: int, once: ComparedRun) -> list[str]:
    """Returns lines on where a script does not repeat itself, from an iteration on."""
    print(f"twice more, with update {iteration} made several times from one state", flush=True)
    runs = [ComparedRun(args, f"repeated-{number}", once.numbers) for number in (1, 2)]
    for run in runs:
        run.repeat(iteration)
    logs = [log.read_text(errors="replace") for log in once.directory.glob("worker_*.log")]
    by_hand = sorted({name for text in logs for name in _BY_HAND.findall(text)})
    return [
        *nondeterminism.where([nondeterminism.read_updates(r.directory) for r in runs], by_hand)
    ]


class ComparedRun:
    """One of the runs that are compared.

    Args:
        args: Those of the tool.
        name: "straight", "killed", "again" or "again-2", or one with a number of processes.
        numbers: Each start is on one of these numbers of processes; empty: as the script's words
            say.
    """

    process: subprocess.Popen[bytes]  # that runs, or ran last

    def __init__(self, args: argparse.Namespace, name: str, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.how = "after the kills" if name == "killed" else f"on {[*numbers, 1][0]} processes"
        self.causes = _CAUSES_OF_RANKS if numbers else _CAUSES
        if name in _AGAIN:
            self.how = _AGAIN[name]
            self.causes = _NO_CAUSES
        self._source = random.Random(1)
        self.directory = Path(args.output).absolute() / name
        self._args = args
        self._stderr = Path(f"{self.directory}.stderr")
        self._program = "verified_run.py"
        self._variables: dict[str, str] = {}
        # What it trains by, whatever its config says.
        self.training = {
            "max_iteration": args.iterations,
            # Small enough for many saves and some validations, which do not always go with a save.
            "save_interval": args.iterations // 8,
            "valid_interval": args.iterations // 5,
            "log_interval": 1,
            "keep_last": 0,
        }
        self.device = _device(args.words)
        if self.device != "cpu":  # whose kernels may sum in another order each time
            self.training["deterministic"] = True

    @property
    def _script(self) -> str:
        """The script, as the user has named it."""
        return str(self._args.script or self._args.module)

    def command(self) -> list[str]:
        """Returns the words that start it."""
        args = self._args
        script = ["-m", args.module] if args.module else [str(Path(args.script).absolute())]
        words = [*script, "--output", str(self.directory), *args.words]
        if self.numbers:
            words += ["--nprocs", str(self._source.choice(self.numbers))]
        return [sys.executable, str(Path(__file__).with_name(self._program)), *words]

    def repeat(self, iteration: int) -> None:
        """Makes updates several times, from an iteration on; it ends soon after."""
        self._program, self._variables = "repeat_update.py", {FIRST: str(iteration)}
        self.start()
        try:
            self.process.wait()  # of one that fails there are the updates before
        finally:
            kill(self.process)

    def start(self, kill: str = "", at: int = 0, delay: float = 0.0) -> None:
        """Starts the run in another session, which a Ctrl-C does not reach.

        Args:
            kill: How it is killed, one of KINDS; "": not at all.
            at: The iteration from which on it is killed.
            delay: Seconds from the beginning of that iteration.
        """
        killed_path(self.directory).unlink(missing_ok=True)
        plan: dict[str, Any] = {"training": self.training, "device": self.device}
        plan |= {"kill": kill, "at": at, "delay": delay}
        environment = {**os.environ, PLAN: json.dumps(plan), **self._variables}
        with self._stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                self.command(), env=environment, stdout=stderr, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip

    def finish(self) -> None:
        """Runs it to its end; a RuntimeError if it fails or makes no checkpoint."""
        self.start()
        try:
            code = self.process.wait()
        finally:
            kill(self.process)
        if code:
            tail = "\n".join(self._stderr.read_text(errors="replace").splitlines()[-15:])
            hint = ""
            if re.search("(max|total)_iteration|T_max|warmup|total_step|schedule|lr[.]py", tail):
                hint = (
                    " A run of verify has few iterations. For a longer schedule give more, such "
                    "as --iterations 200, or shorten it after `--`: -- optim.warmup=10."
                )
            if "relative import with no known parent" in tail:
                hint = " If it is started as python -m package.train, give -m package.train."
            if not tail:
                hint = f" It could write nothing to {self._stderr}: is the disk full?"
            text = f"the run {self.directory.name!r} ended with code {code}.{hint}\n{tail}"
            if code == ExitCode.MISTAKE and not self.directory.exists():  # in the words after --
                remove(self._args.output)  # else the corrected command would be refused
                raise ConfigError(text)
            raise RuntimeMistake(text.rstrip())
        if not layout.listed(self.directory / layout.FOLDER):
            raise RuntimeMistake(
                f"{self._script}: made no checkpoint in {self.directory}; expected a script "
                "that makes one experiment, in its own process, with --output as its directory."
            )

    def check_shares(self) -> None:
        """Raises a ValueError if the run has no shares."""
        if not load_yaml(self.directory / CONFIG)["training"]["shares"]:
            raise ValueMistake(
                f"--ranks: {self._script} has training.shares=0, so the bits depend on the "
                "number of processes; expected `-- training.shares=4 "
                "training.accumulation_steps=1`, or these in its config, and `for batch in "
                "self.micro_batches():` in train_batch."
            )

    def finish_with_kills(self, source: random.Random, kills: int) -> None:
        """Kills it at random moments, continues it each time, and at last runs it to its end."""
        # After the first checkpoint: a run that begins anew proves nothing.
        first = self.training["save_interval"] + 1
        last = self._args.iterations - self.training["valid_interval"]
        moments = sorted(source.choices(range(first, last), k=kills))
        for kind, moment in zip(itertools.cycle(KINDS), moments, strict=False):
            self.start(kind, moment, source.uniform(0, _DELAY))
            try:
                while self.process.poll() is None and not killed_path(self.directory).exists():
                    time.sleep(0.005)
            finally:
                kill(self.process)
            if not killed_path(self.directory).exists():
                lines = self._stderr.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "nothing said")
                raise RuntimeMistake(
                    f"the run ended before it was killed: {last}; see {self._stderr}."
                )
            print(f"  killed {killed_path(self.directory).read_text()}", flush=True)
        self.finish()

    def saved(self) -> dict[str, Any]:
        """Returns the checksums and the values of the last checkpoint."""
        last = find_at(self.directory)
        return files(last) | values(last)

    def lost(self) -> list[str]:
        """Returns the lines of its logs on what was not restored, in their order, each once."""
        logs = sorted(self.directory.glob("worker_*.log"))
        found = [_LOST.findall(log.read_text(errors="replace")) for log in logs]
        return [*dict.fromkeys(line for lines in found for line in lines)]

    def notes(self) -> dict[int, dict[str, Any]]:
        """Returns the last note that `verified_run` wrote about each update, by iteration.

        The samples and batches of all ranks are in it.
        """
        merged: dict[int, dict[str, Any]] = {}
        for rank in itertools.count():
            if not (path := notes_path(self.directory, rank)).exists():
                return merged
            for note in json_lines(path):
                update = merged.setdefault(note["iteration"], {field: {} for field in _CAUSES})
                for field in ("indices", "batches"):  # by share, which one rank has
                    update[field] |= note[field]
                if rank and self.numbers:  # of a start on more processes than the others
                    continue
                for field in ("before", "rates", "after"):
                    where = f" on rank {rank}" if rank else ""
                    update[field] |= {f"{name}{where}": v for name, v in note[field].items()}
        return merged


def first_difference(straight: ComparedRun, killed: ComparedRun) -> str:
    """Returns the first difference, its iteration, and its cause; "" if there is none.

    If a start has said that it did not restore something, that is the cause; else it is guessed.
    """
    lost = "; ".join(killed.lost())
    if note := first_note(straight, killed):
        iteration, field, names = note
        guess = killed.causes[field].format(names=", ".join(names))
        return f"first at iteration {iteration}. {f'Cause: {lost}' if lost else guess}."
    one, other = (logged(side.directory) | side.saved() for side in (straight, killed))
    for name, (left, right) in differences(one, other).items():
        cause = f" Cause: {lost}." if lost else ""
        return f"{name} differs: {left} straight through, {right} {killed.how}.{cause}"
    return ""


def first_note(straight: ComparedRun, other: ComparedRun) -> tuple[int, str, list[str]] | None:
    """Returns the first note that differs: its iteration, its field, and what differs in that."""
    expected = straight.notes()
    for iteration, note in sorted(other.notes().items()):
        for field in other.causes:
            if names := differences(expected.get(iteration, {}).get(field, {}), note[field]):
                return iteration, field, [*names]
    return None
