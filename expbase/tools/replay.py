"""Continues a copy of a run from the checkpoint before its failure, to the same failure.

Nothing of the run is changed. That a run continues to the same bits makes it exact, so nothing
had to be recorded while it trained. The command is the one of the ledger, in the directory that it
names; code or data that were changed since are not put back (`python -m expbase show RUN
--reproduce` says how). With --pdb it ends in the debugger, at the failing line of your code; a
value that is not finite fails there where it is logged. The script must make its run by
`main(Experiment)`, or be a YAML file of `python -m expbase run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs
from expbase.config import ConfigError
from expbase.processes import LAUNCHER, python
from expbase.record import crash, git
from expbase.record.run_record import LEDGER, last_start, read
from expbase.run_dir import CONFIG, LOCK, RunDirectory
from expbase.state import checkpoint
from expbase.tools.process import CODES, ended_by_signals, kill
from expbase.tools.runs import printable


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "replay",
        help="repeats the failure of a run on a copy, in a debugger if you like",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0 the same error came, 1 it did not, or another one did, 130 Ctrl-C, "
        "143 SIGTERM",
    )
    add = parser.add_argument
    add("dir", type=Path, metavar="RUN", help="the output directory of the run")
    add("--iteration", type=int, metavar="N", help="of the failure (default: the last failure's)")
    add("--pdb", action="store_true", help="end in the debugger (runs of one process)")
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; returns its exit code."""
    run = Path(os.path.realpath(args.dir))
    of_ranks = crash.read(_folder(run, args.iteration))
    facts = next(iter(of_ranks.values()))
    if args.pdb and facts["ranks"] > 1:
        raise ValueError(
            f"--pdb: the run has {facts['ranks']} processes; expected one. Leave --pdb out."
        )
    program, directory = _program(run)
    codes = {**CODES, signal.SIGINT: None} if args.pdb else CODES  # Ctrl-C is the debugger's
    # With its lock held: a script that does not call main() would go on with the run itself.
    with ended_by_signals(codes), _locked(run), tempfile.TemporaryDirectory() as temporary:
        copy, result = Path(temporary) / run.name, Path(temporary) / "ended"
        _copy(run, copy, facts["checkpoint"])
        spec = {name: facts[name] for name in ("iteration", "error")}
        spec |= {"run": str(run), "copy": str(copy), "pdb": args.pdb, "result": str(result)}
        _say(f"from {facts['checkpoint'] or 'the beginning'} to iteration {facts['iteration']}")
        _repeat(spec, program, directory, facts["ranks"])
        ends = [Path(f"{result}_{rank}") for rank in of_ranks]
        ended = [_read(path).replace(str(copy), str(run)) for path in ends]
    return _judge(of_ranks, ended)


def _folder(run: Path, iteration: int | None) -> Path:
    """The folder of a failure, by default of the last one."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run}: holds no run; expected the output directory of one.")
    newest = crash.newest(run)
    if newest is None:
        raise ValueError(
            f"{run}: no failure in training was noted ({crash.CRASH}/iteration-N is not there). "
            f"How it ended: python -m expbase show {shlex.quote(str(run))}"
        )
    folder = newest if iteration is None else run / crash.CRASH / f"iteration-{iteration}"
    if not crash.read(folder):
        there = [path.name.removeprefix("iteration-") for path in crash.folders(run)]
        raise ValueError(f"--iteration: {iteration} given; expected one of {', '.join(there)}.")
    return folder


def _program(run: Path) -> tuple[list[str], Path]:
    """The script with its words, without a launcher, and the directory where it was started."""
    facts = last_start(read(run / LEDGER))
    program = _without_launcher(facts.get("command") or [])
    if not program:
        raise ValueError(
            f"{run}: its ledger names no script that was started (in a notebook there is none), so "
            "it cannot be started again."
        )
    if program[:2] == ["-m", "expbase"]:  # run FILE: without the other runners of the file
        program += ["--only", run.name]
    # In the work tree as it was noted, else here.
    here, noted = Path.cwd(), facts.get("directory")
    tops = [git.top_of(here), git.top_of(run)] if noted is not None else []
    for directory in (*(top / str(noted) for top in tops if top), here):
        if program[0] == "-m" or (directory / program[0]).is_file():
            return program, directory
    raise ValueError(
        f"{program[0]}: no such file; expected the script of the run. Call replay from the "
        "directory in which the run was started."
    )


def _without_launcher(command: Sequence[str]) -> list[str]:
    for number, word in enumerate(command):
        if word.endswith(".py") or (word == "-m" and LAUNCHER not in command[number + 1 :]):
            return list(command[number:])
    return []


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[None]:
    directory = RunDirectory(run)
    with contextlib.suppress(ConfigError):  # it is in use: then the script cannot have it either
        if (run / LOCK.format(rank=0)).exists():  # nothing is made in the run
            directory.lock(rank=0)
    try:
        yield
    finally:
        directory.release()


def _copy(run: Path, copy: Path, name: str | None) -> None:
    """Copies what a start needs to continue from a checkpoint."""
    copy.mkdir()
    if name is None:
        return
    shutil.copy(run / CONFIG, copy / CONFIG)
    source = run / checkpoint.FOLDER / name
    if not source.is_dir():
        raise ValueError(
            f"{source}: is not there any more, so the failure cannot be repeated from it; the run "
            "went on since, and training.keep_last checkpoints were kept."
        )
    try:
        checkpoint.verify(source)
    except checkpoint.CheckpointError as error:
        raise ValueError(f"{error} The failure cannot be repeated without it.") from error
    # As links: it may be large, and a checkpoint's files are never written to again.
    shutil.copytree(source, copy / checkpoint.FOLDER / name, copy_function=os.symlink)


def _repeat(spec: Mapping[str, Any], program: Sequence[str], directory: Path, ranks: int) -> None:
    """Runs the program again as the spec says (`replay_worker.read_spec`), to its end."""
    folder = Path(spec["result"]).parent
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(spec))
    words = [str(Path(__file__).with_name("replay_worker.py")), str(spec_path), *program]
    process = subprocess.Popen([*python(ranks, folder / "log"), *words], cwd=directory)
    try:
        process.wait()
    finally:
        kill(process)


def _read(path: Path) -> str:
    """What `replay_worker.leave` wrote. Not every text of an error can be encoded."""
    if not path.exists():
        return "the process ended by itself"
    return path.read_bytes().decode("utf-8", "surrogatepass")


def _judge(of_ranks: Mapping[int, Mapping[str, Any]], ended: Sequence[str]) -> int:
    """Says how each rank ended that had failed; 0 if one of them did in the same way."""
    code = 1
    for (rank, facts), end in zip(of_ranks.items(), ended, strict=True):
        where = f"rank {rank}, " if facts["ranks"] > 1 else ""
        iteration, error = facts["iteration"], facts["error"]
        # With --pdb a value that is not finite fails where it is logged, with its beginning alone.
        is_nonfinite = end.startswith("NonFiniteError") and error.startswith(end.removesuffix("."))
        if end == error or is_nonfinite:
            code = 0
            _say(f"{where}the same error at iteration {iteration}: {error}")
        elif not end:
            _say(
                f"{where}iteration {iteration} passed without {error!r}: the failure is not "
                "repeatable, or code, data or the machine were changed since"
            )
        else:
            _say(f"{where}another end: {end}; expected {error!r}")
    return code


def _say(text: str) -> None:
    readable = "\n".join(map(printable, text.split("\n")))
    print(f"replay: {readable}", flush=True)
