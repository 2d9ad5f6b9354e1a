"""Runs the commands of a run again, with the code that it had, or with that of now."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from expbase.base.files import read_bytes
from expbase.base.terminal import say
from expbase.config import ConfigError
from expbase.record.git import top_of
from expbase.record.sources import SOURCES
from expbase.record.starts_and_ends import Facts
from expbase.tools import command_checks, train_again
from expbase.tools.child_processes import kill
from expbase.tools.run_parts import Leg

_MOST_BYTES = 1 << 28  # of a diff
_TAIL = 15  # lines of a log that are shown of a command that failed beside others


class Commands:
    """Runs the commands of a run again.

    Args:
        run: The output directory of the run.
        args: Those of the tool.
        has_company: Whether several run at once, so that their logs are kept apart.
    """

    def __init__(self, run: Path, args: argparse.Namespace, *, has_company: bool) -> None:
        self.here: bool = args.here
        self._run = run
        self._args = args
        self._has_company = has_company
        self._processes: list[subprocess.Popen[bytes]] = []
        self._has_ended = False
        self._starting = threading.Lock()

    def check(self, legs: Iterable[Leg]) -> None:
        """Says what will run, and of which code.

        Raises:
            ConfigError: The record of a start names something else than code of the work tree.
        """
        said = dict.fromkeys(self._what_runs(leg.start) for leg in legs)
        for text in said:
            say(f"reproduce: runs {text}")

    def _what_runs(self, start: Facts) -> str:
        """Returns what a command runs, and what is left out of its variables, in words."""
        command_checks.check(start)
        text = command_checks.command_text(start)
        commit, state = (start["git"].get(name) for name in ("commit", "state"))
        if self.here:
            text += f", the code of now in {top_of(Path.cwd()) or Path.cwd()}"
        elif not commit:
            text += f", the files of {Path.cwd()}"
        else:
            text += f", commit {commit[:12]}"
            if state:
                counts = _git(Path.cwd(), "apply", "--numstat", given=_diff(self._run, state))
                rows = [line.split("\t")[:2] for line in counts.splitlines()]
                lines = sum(int(n) for row in rows for n in row if n.isdigit())
                text += f" with {lines} changed lines in {len(rows)} files, of the run's own diff"
        _, left_out = command_checks.variables_of(start)
        names = textwrap.shorten(", ".join(left_out), 200, placeholder=" …")
        return text + f"; without its variables {names}" * bool(left_out)

    def train(self, leg: Leg, output: Path, kept: list[int]) -> str:
        """Trains a leg; returns why it has not come to its last iteration, or to the run's end."""
        start = leg.start
        with self._code(start["git"], output.with_name("code")) as (top, copy):
            words = [word.replace(f"{top}/", f"{copy}/") for word in start["command"]]
            cwd = Path.cwd() if start["directory"] is None else copy / start["directory"]
            command_checks.check_place(
                start, words, command_checks.Places(cwd, top, copy, self._run)
            )
            if copy != top:
                words = [
                    _from_outside(word, top, top / (start["directory"] or "")) for word in words
                ]
            place = start["script"]
            words = command_checks.with_log_dir(words, place, output.with_name("launcher"))
            is_module = words[place - 1 : place] == ["-m"]
            words.insert(place - is_module, train_again.__file__)
            done = output.with_name("done")
            done.unlink(missing_ok=True)
            plan = {"output": str(output), "last": leg.last, "done": str(done), "kept": kept}
            plan |= {"sources": None if self.here else start["sources"]}
            plan |= {"updates": self._args.updates, "experiment": start["experiment"]}
            plan |= {"config": start["config"]}
            variables, _ = command_checks.variables_of(start)
            code = self._call(
                [self._args.python, *words, *self._args.words],
                cwd,
                {**os.environ, **variables, train_again.PLAN: json.dumps(plan)},
                output.with_name("log"),
            )
        if done.exists():
            return done.read_text()
        return f"the command ended with code {code}" if code else ""

    def _call(
        self, command: list[str], cwd: Path, environment: Mapping[str, str], log: Path
    ) -> int:
        """Returns the exit code of a command."""
        with contextlib.ExitStack() as stack:
            err = stack.enter_context(log.open("wb")) if self._has_company else sys.stderr
            with self._starting:
                if self._has_ended:
                    return 1
                process = subprocess.Popen(
                    command, cwd=cwd, env=environment, stdout=err.fileno(), stderr=err.fileno(),
                    start_new_session=not self.here,  # else breakpoint() could not ask
                )  # fmt: skip
                self._processes.append(process)
            try:
                code = process.wait()
            finally:
                kill(process)
        if code and self._has_company:
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            print("\n".join(lines), file=sys.stderr, flush=True)
        return code

    def end(self) -> None:
        """Ends all processes, and begins no more."""
        with self._starting:
            self._has_ended = True
            for process in self._processes:
                kill(process)

    @contextlib.contextmanager
    def _code(self, git: Facts, copy: Path) -> Iterator[tuple[Path, Path]]:
        """Checks out the code of a start, with its changes, from the repository of where we are.

        Args:
            git: The record of its commit and changes.
            copy: Where the code is put.

        Yields:
            The top of the work tree of now, and that of the code: the same without a commit, or if
            it is the code of now that is wanted.
        """
        here = Path.cwd()
        top = top_of(here)
        if not git.get("commit") or self.here:
            yield (top or here,) * 2
            return
        if top is None:
            raise ConfigError(f"{here}: in no git repository; expected one with {git['commit']}.")
        try:
            with self._starting:  # git has a lock of its own, and does not wait for it
                _git(top, "worktree", "add", "--detach", str(copy), git["commit"])
            if state := git.get("state"):
                _git(copy, "apply", given=_diff(self._run, state))
            for name in _git(top, "ls-files", "-zox", "__pycache__", "--directory").split("\0"):
                if not os.path.lexists(target := copy / name):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # Beside the file that a link leads to, a module would look for others.
                    (shutil.copy if target.suffix == ".py" else os.symlink)(top / name, target)
            yield top, copy
        finally:
            with contextlib.suppress(ConfigError), self._starting:  # git says why
                _git(top, "worktree", "remove", "-ff", str(copy))


def _from_outside(word: str, top: Path, folder: Path) -> str:
    """Returns a word; if it is a relative path that leads out of the work tree, from its root.

    Args:
        word: Of a command, an option's value perhaps: `--data=../data`.
        top: The work tree.
        folder: Where the command is given.
    """
    option, is_option, value = word.partition("=") if word.startswith("--") else ("", "", word)
    path = Path(os.path.normpath(folder / value))
    if ".." in Path(value).parts and not path.is_relative_to(top) and path.exists():
        value = str(path)
    return f"{option}{is_option}{value}"


def _diff(run: Path, state: str) -> bytes:
    """Returns the changes that a run has saved."""
    path = run / SOURCES / f"{state}.diff"
    try:
        return read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def _git(folder: Path, *words: str, given: bytes = b"") -> str:
    """Returns the output of a git command; a ConfigError if it fails, with its errors above."""
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", *words]
    result = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False)
    if result.returncode:
        raise ConfigError(f"{folder}: `git {' '.join(words)}` failed, as git says above.")
    return os.fsdecode(result.stdout)
