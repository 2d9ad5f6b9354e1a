"""Continues a copy of a run from the checkpoint before its failure, to the same failure.

The run is not changed. It is started as its ledger says; code or data that were changed since are
not put back (`python -m expbase show RUN --reproduce` says how). With --pdb it ends in the
debugger, at the failing line of your code; a value that is not finite fails there where it is
logged. The script must call `main(Experiment)`, or be a YAML file of `python -m expbase run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expbase.config import ConfigError
from expbase.processes import LAUNCHER, python
from expbase.record import crash, git
from expbase.record.run_record import LEDGER, last_start, read
from expbase.run_dir import CONFIG, RunDirectory
from expbase.state import checkpoint
from expbase.tools import add_tool
from expbase.tools.process import ended_by_signals, kill
from expbase.tools.runs import printable


def add_parser(tools: Any) -> None:
    parser = add_tool(tools, main, "0 the same error came, 1 it did not, 130 Ctrl-C, 143 SIGTERM")
    parser.add_argument("dir", type=Path, metavar="RUN", help="the output directory of the run")
    parser.add_argument("--pdb", action="store_true", help="end in the debugger (of one process)")


def main(args: argparse.Namespace) -> int:
    run = Path(os.path.realpath(args.dir))
    guard = RunDirectory(run, "RUN")
    guard.expect()
    of_ranks = crash.last_failure(run)
    if not of_ranks:
        raise ValueError(f"{run}: no failure in training was noted in {crash.CRASH}/iteration-N.")
    facts = next(iter(of_ranks.values()))
    if args.pdb and facts["ranks"] > 1:
        raise ValueError(f"--pdb: the run has {facts['ranks']} processes; expected one.")
    program, directory = _program(run)
    with ended_by_signals(), contextlib.ExitStack() as stack:
        if args.pdb:
            signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the debugger's
        # A script that does not call main() would go on with the run itself.
        stack.callback(guard.release)
        with contextlib.suppress(ConfigError):  # in use: then the script cannot have it either
            guard.lock(rank=0)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        copy, spec = folder / run.name, folder / "spec.json"
        _copy(run, copy, facts["checkpoint"])
        asked = {"pdb": args.pdb, "run": str(run), "copy": str(copy)}
        spec.write_text(json.dumps(facts | asked))
        _say(f"from {facts['checkpoint'] or 'the beginning'} to iteration {facts['iteration']}")
        worker = [str(Path(__file__).with_name("replay_worker.py")), str(spec)]
        command = [*python(facts["ranks"], folder / "log"), *worker, *program]
        process = subprocess.Popen(command, cwd=directory)
        stack.callback(kill, process)
        process.wait()
        ends = [_end(folder / f"ended_{r}.json").replace(str(copy), str(run)) for r in of_ranks]
    repeated = [_judge(*of_rank, end) for of_rank, end in zip(of_ranks.items(), ends, strict=True)]
    return 0 if any(repeated) else 1


def _program(run: Path) -> tuple[list[str], Path]:
    """The script with its words, without a launcher, and the directory where it was started."""
    start = last_start(read(run / LEDGER))
    words = start.get("command") or []
    begins = (n for n, word in enumerate(words) if word.endswith(".py") or word == "-m")
    program = next((words[n:] for n in begins if words[n + 1 :][:1] != [LAUNCHER]), [])
    if not program:
        raise ValueError(f"{run}: its ledger names no script that was started (a notebook?).")
    if program[:2] == ["-m", "expbase"]:  # run FILE: without the other runners of the file
        program += ["--only", run.name]
    top, place = git.top_of(Path.cwd()), start.get("directory")
    directory = top / place if top and place else Path.cwd()
    if program[0] != "-m" and not (directory / program[0]).is_file():
        raise ValueError(f"{program[0]}: no such file; call replay where the run was started.")
    return program, directory


def _copy(run: Path, copy: Path, name: str | None) -> None:
    """Copies what a start needs to continue from a checkpoint."""
    copy.mkdir()
    if name is None:
        return
    shutil.copy(run / CONFIG, copy / CONFIG)
    source = run / checkpoint.FOLDER / name
    if not source.is_dir():
        raise ValueError(f"{source}: is not there any more (training.keep_last).")
    # As links: it may be large, and a checkpoint's files are never written to again.
    shutil.copytree(source, copy / checkpoint.FOLDER / name, copy_function=os.symlink)


def _end(path: Path) -> str:
    """How a rank ended, as `replay_worker.leave` wrote it."""
    return str(json.loads(path.read_bytes())) if path.exists() else "the process ended by itself"


def _judge(rank: int, facts: Mapping[str, Any], end: str) -> bool:
    """Says how a rank ended that had failed; whether it is in the same way."""
    error, place = facts["error"], f"iteration {facts['iteration']}"
    where = f"rank {rank}, " if facts["ranks"] > 1 else ""
    # With --pdb a value that is not finite fails where it is logged, with its beginning alone.
    is_nonfinite = end.startswith("NonFiniteError")
    if end == error or is_nonfinite and error.startswith(end.partition(". ")[0]):
        _say(f"{where}the same error at {place}: {error}")
        return True
    if not end:
        end = f"{place} passed; not repeatable, or code, data or the machine were changed since"
    _say(f"{where}another end: {end}; expected {error!r}")
    return False


def _say(text: str) -> None:
    print("replay:", "\n".join(map(printable, text.split("\n"))), flush=True)
