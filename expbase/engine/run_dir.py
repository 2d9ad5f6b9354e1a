"""The directory of one run: its lock, its config, and making room for a fresh start.

One run owns one directory at a time, until its process is dead. Each rank has a lock: on another
machine its directory may be another one. Where the file system has no locks, the ledger is asked.

    directory = RunDirectory("runs/digits")
    directory.claim(config, fresh=False, force=False)
    directory.dump(config)
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import platform
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expbase.base.errors import TypeMistake
from expbase.base.files import regular, write_single_file
from expbase.checkpoint import layout
from expbase.config import (
    CONFIG,
    ConfigError,
    differences,
    dump_yaml,
    get_default_training_config,
    load_yaml,
)
from expbase.record.metrics import METRICS
from expbase.record.starts_and_ends import (
    DIGEST,
    LEDGER,
    configs_in,
    flat,
    open_start,
    runs_here,
    sessions,
)

LOCK = ".lock-{rank}"

# A run may continue although other keys of `training` differ: these change what is computed.
_COMPUTED_FROM = ("seed", "deterministic", "accumulation_steps", "shares")
MAY_CHANGE = {f"training.{key}" for key in get_default_training_config().keys() - _COMPUTED_FROM}

# What a run writes to beside its checkpoints.
_FILES = (
    *(CONFIG, METRICS, "validations.jsonl", LEDGER, "vdlrecords.run.log"),
    *(DIGEST, "doctor.json", "worker_*.log", "STOP", LOCK.format(rank="*")),
)

# By which a file system says that it has no locks, and not that it refuses this one.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# How many keys of a config that differ are named; a file that was written by hand may have more.
MOST_KEYS = 20
# The locks of this process. The system's kind of lock admits the same process a second time, and it
# is lost when any handle of the file is closed: so a file must not be opened here again.
_held: set[str] = set()


def is_run(directory: str) -> bool:
    """Returns whether a directory is a run's, by its files; a damaged one may lack one."""
    names = CONFIG, LEDGER, LOCK.format(rank=0)
    return sum(os.path.isfile(os.path.join(directory, name)) for name in names) > 1


class RunDirectory:
    """The directory of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._config = self.path / CONFIG  # written once the directory is a run's
        self.lacks_locks = ""  # what the file system says, if it has none
        self._lock = contextlib.ExitStack()
        self._locked: tuple[Path, os.stat_result] | None = None  # the file of the lock

    def make(self) -> None:
        """Makes the directory; a ConfigError says why that cannot be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(f"cannot be made a directory: {error.strerror}.") from error

    def expect(self) -> None:
        """Raises a ConfigError if no run is here, to be read."""
        if not self._config.is_file():
            raise self._error(f"holds no run; expected the directory of one, with its {CONFIG}.")

    def lock(self, rank: int, *, force: bool = False) -> None:
        """Takes the directory for one rank of this process; a ConfigError if another run has it.

        Without locks, `force` takes it although a start on another machine has not ended.
        """
        import fcntl  # here: Windows has none, and is refused in words

        path = self.path / LOCK.format(rank=rank)
        name = os.path.join(os.path.realpath(self.path), path.name)  # the same for links to it
        with contextlib.ExitStack() as undo:
            try:
                self._check_files()
                if name in _held:
                    raise BlockingIOError
                file = undo.enter_context(open(name, "ab", opener=regular))
                # Not flock: workers that outlive a killed process would still hold that one.
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                    self.lacks_locks = str(error.strerror)
                    if rank == 0:  # whose starts the ledger has
                        self._check_no_start(force=force)
                locked = os.fstat(file.fileno())
                is_there = os.path.samestat(locked, os.stat(name))
            except (BlockingIOError, FileNotFoundError):
                is_there = False  # the other one has it, or has moved it aside
            except OSError as error:
                raise self._error(
                    f"cannot be locked: {error.strerror}. A lock keeps two processes from one run; "
                    "give an --output where files can be written and locked."
                ) from error
            if not is_there:
                raise self._error(
                    "is in use by a running experiment. Wait for it, stop or close it, or give "
                    "another --output."
                )
            _held.add(name)
            undo.callback(_held.discard, name)
            self._lock = undo.pop_all()
            self._locked = path, locked

    def _check_no_start(self, *, force: bool) -> None:
        """Raises, where there are no locks, if the ledger has a start that may still run."""
        start = open_start(self.path)
        if runs_here(start):
            raise BlockingIOError
        if start and start.get("host") != platform.node() and not force:
            raise self._error(
                f"cannot be locked: {self.lacks_locks}, and its {LEDGER} has a start that has not "
                f"ended: process {start.get('pid')} on {start.get('host')!r}. Wait for it, or stop "
                "it; if it was killed, give --force."
            )

    def check(self) -> None:
        """Raises a ConfigError if the directory is not the one that was locked any more."""
        if self._locked is None:
            return
        path, locked = self._locked
        try:
            if os.path.samestat(locked, os.stat(path)):
                return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # a disk that does not answer now
        raise self._error(
            "is not the directory any more that this run has locked: it was moved, removed or "
            "replaced. The run ends, and makes nothing there anew. Leave a directory where it is "
            "while its run lasts; to go on from what was moved, give its new place as --output."
        )

    def _check_files(self) -> None:
        """Raises a ConfigError if in the place of a file of a run there is something else, or if
        runs are in the directory, and it is none itself.
        """
        itself = self._config.exists()
        with os.scandir(self.path) as entries:
            for entry in entries:
                is_ours = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in _FILES)
                if is_ours and not entry.is_file(follow_symlinks=False):
                    raise self._error(
                        f"holds {entry.name}, which is a link, a directory, a pipe or a device; "
                        "expected a file. Move it away."
                    )
                if entry.name == layout.FOLDER and not entry.is_dir():
                    raise self._error(f"holds {entry.name}, no directory; expected one.")
                if not itself and is_run(entry.path):
                    raise self._error(
                        f"is no run itself, and holds one, {entry.name!r}; expected the directory "
                        f"of one run. Give a name below it: {os.path.join(self.path, 'NAME')!r}."
                    )

    def is_open_to_others(self) -> bool:
        """Returns whether any user of the machine may write to it, and so to what a run loads."""
        return bool(self.path.stat().st_mode & stat.S_IWOTH)

    def release(self) -> None:
        """Ends the lock. May be called twice."""
        self._locked = None
        self._lock.close()

    def claim(self, config: Mapping[str, Any], *, fresh: bool, force: bool) -> Path | None:
        """Makes and locks the directory for a run of this config, on all ranks; a collective.

        With `fresh` a run that is here is moved aside first, and its new place is returned. With
        `force` a run that has another config is continued.

        Raises:
            ConfigError: It cannot be made, is in use, or holds a run of another config.
        """
        from expbase.ranks import collectives  # here: a tool that only reads needs no paddle

        def claim() -> Path | None:
            return self._claim(config, fresh=fresh, force=force)

        aside = collectives.on_rank_zero(claim, "output directory")
        rank = collectives.rank()
        if fresh and rank:  # where rank 0 has been there is no run any more
            aside = self.move_aside() or aside
        if fresh:
            collectives.barrier("--fresh")  # several ranks may share what one moves aside
        if rank:
            self.make()
            self.lock(rank)
        return aside

    def _claim(self, config: Mapping[str, Any], *, fresh: bool, force: bool) -> Path | None:
        """Does for rank 0 what `claim` does."""
        self.make()
        self.lock(rank=0, force=force)  # before it is moved: a running one must not be
        aside = None
        if fresh:
            aside = self.move_aside()
            self.release()  # only now: nobody else gets in between
            self.make()
            self.lock(rank=0)
        changed = {k: v for k, v in self.changed_keys(config).items() if k not in MAY_CHANGE}
        if changed and not force:
            raise self._error(
                f"holds a run of another config:{_listed(changed)}\n{self._ways_on(changed)}"
            )
        return aside

    def _ways_on(self, changed: Mapping[str, tuple[Any, Any]]) -> str:
        """Says what to do if the config differs in these keys from that of the run."""
        others = (
            "another --output, --fresh to start over here (the old run is moved aside), or --force "
            "to continue under the new config."
        )
        if any(None in pair for pair in changed.values()):  # one file says nothing of a key
            return f"Give {others}"
        file = shlex.quote(str(self._config))
        return (
            f"To go on with the run's own values, give --config {file} as the last --config, "
            f"without these keys on the command line; else {others}"
        )

    def move_aside(self) -> Path | None:
        """Renames the directory, if it holds a run; returns its new place."""
        if not (self._config.exists() or self._has_trained()):
            return None
        number = 1
        path = Path(os.path.realpath(self.path))  # what a link leads to stays on its disk
        while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
            number += 1
        try:
            with contextlib.suppress(FileNotFoundError):  # another rank of this machine has done it
                path.rename(aside)
                path.mkdir(exist_ok=True)
        except OSError as error:  # a disk is mounted there, say
            raise self._error(
                f"cannot be moved aside to {str(aside)!r}: {error.strerror}; expected that for "
                "--fresh. Give another --output."
            ) from error
        return aside

    def changed_keys(self, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns the config keys that differ from those of the first start, with both values."""
        if self.is_begun():
            return differences(load_yaml(self._config), config)
        configs = configs_in(sessions(self.path)) if self._has_trained() else []
        return differences(configs[0], flat(config)) if configs else {}  # the file is gone

    def is_begun(self) -> bool:
        """Returns whether a run here has a checkpoint or a line; a start before these is none.

        Such a start failed early, perhaps because of its config: another one may begin here.
        """
        return self._config.exists() and self._has_trained()

    def _has_trained(self) -> bool:
        metrics = self.path / METRICS
        has_line = metrics.exists() and metrics.stat().st_size > 0
        return has_line or bool(layout.listed(self.path / layout.FOLDER))

    def dump(self, config: Mapping[str, Any]) -> None:
        """Writes config.yaml until the run has begun; later starts leave it as it is."""
        if self._locked is None:
            raise TypeMistake("setup_output_dir: locked no directory; expected super's call in it.")
        if not self.is_begun():
            try:
                write_single_file(self._config, [dump_yaml(config).encode()])
            except OSError as error:
                raise self._error(
                    f"cannot be written to: {error.strerror}. Make room, or give another --output."
                ) from error

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"--output: {str(self.path)!r} {what}")


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns a line for each key that differs, as many as can be read."""
    named = [*changed.items()][:MOST_KEYS]
    lines = [f"\n  {key}: {there!r:.200} there, {now!r:.200} now" for key, (there, now) in named]
    if more := len(changed) - len(named):
        lines.append(f"\n  and {more:,} keys more")
    return "".join(lines).replace("None there", "not there").replace("None now", "not here now")
