"""The output directory of one run: its lock, its config, and stepping aside for a fresh start.

A leaf. One run owns one directory at a time: the lock is the system's, so it is free as soon as
the process is dead, and a second experiment in the same process is refused too.

    output = Output("runs/digits")
    output.claim(config, fresh=False, force=False)
    output.dump(config)
    output.release()
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from expbase.config import ConfigError, differences, dump_yaml, load_yaml

CONFIG = "config.yaml"
LOCK = ".lock-{rank}"

# A run may go on although these differ: they change when things happen, not what is computed.
MAY_CHANGE = {
    f"training.{key}"
    for key in (
        "max_iteration max_epoch valid_interval save_interval log_interval valid_every_epoch "
        "save_every_epoch keep_last keep_every keep_best monitor monitor_mode background_save "
        "time_limit_seconds hang_seconds sanity_batches nonfinite"
    ).split()
}

# The system's lock admits a second one of the same process, and is lost when any handle of the
# file is closed: what this process holds is kept here as well.
_held: set[str] = set()


class Output:
    """A run's directory.

    Args:
        path: Where; made at `make`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._lock: tuple[str, IO[bytes]] | None = None

    def make(self) -> None:
        """Makes the directory.

        Raises:
            ConfigError: A file stands there, or the system refuses.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"args.output: {str(self.path)!r} is, or lies in, a file; expected a directory."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"args.output: {str(self.path)!r} cannot be made: {error.strerror}."
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(f"args.output: {str(self.path)!r} cannot be written to.")

    def expect(self) -> None:
        """Checks that the directory of a run is there, to be read.

        Raises:
            ConfigError: It is not.
        """
        if not (self.path / CONFIG).is_file():
            raise ConfigError(
                f"args.output: {str(self.path)!r} holds no run; expected the directory of one, "
                f"with its {CONFIG}."
            )

    def lock(self, rank: int) -> None:
        """Takes the directory for this process, for one rank.

        Raises:
            ConfigError: Another run has it.
        """
        name = os.path.realpath(self.path / LOCK.format(rank=rank))  # the same by any name
        if name in _held:
            raise ConfigError(
                f"args.output: {str(self.path)!r} is in use by another experiment of this process. "
                "Close that one first, or give each its own directory."
            )
        try:
            file = open(name, "ab")
        except OSError as error:
            raise ConfigError(
                f"args.output: {str(self.path)!r} cannot be locked: {error.strerror}."
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"args.output: {str(self.path)!r} is in use by a running process. "
                "Wait for it, stop it, or give another --output."
            ) from error
        _held.add(name)
        self._lock = (name, file)

    def claim(self, config: Mapping[str, Any], *, fresh: bool, force: bool) -> Path | None:
        """Makes and locks the directory for a run of this config; for the first rank.

        Args:
            config: The resolved config.
            fresh: Whether to move a run that is here aside first.
            force: Whether to go on although the run here has another config.

        Returns:
            Where the run that was here is now; None if none was moved.

        Raises:
            ConfigError: It cannot be made, is in use, or holds a run of another config.
        """
        self.make()
        self.lock(rank=0)
        aside = None
        if fresh:
            self.release()
            aside = self.move_aside()
            self.make()
            self.lock(rank=0)
        changed = {k: v for k, v in self.changed_keys(config).items() if k not in MAY_CHANGE}
        if changed and not force:
            lines = "".join(
                f"\n  {k}: {old!r} there, {new!r} now" for k, (old, new) in changed.items()
            )
            raise ConfigError(
                f"args.output: {str(self.path)!r} holds a run of another config:{lines}\n"
                "Give another --output, --fresh to start over here (the old run is moved aside), "
                "or --force to go on under the new config."
            )
        return aside

    def release(self) -> None:
        """Gives the directory free. May be called twice."""
        if self._lock is not None:
            name, file = self._lock
            self._lock = None
            _held.discard(name)
            file.close()

    def holds_run(self) -> bool:
        """Whether a run was started here before."""
        return (self.path / CONFIG).exists()

    def move_aside(self) -> Path | None:
        """Makes room for a fresh start: the run here gets a name of its own.

        Returns:
            Its new place; None if there was no run.
        """
        if not self.holds_run():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside

    def changed_keys(self, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The config keys that differ from the first start's, with both values."""
        file = self.path / CONFIG
        return differences(load_yaml(file), config) if file.exists() else {}

    def dump(self, config: Mapping[str, Any]) -> None:
        """Writes config.yaml at the first start; later ones leave it as it is."""
        file = self.path / CONFIG
        if not file.exists():
            temporary = file.with_name(f".{CONFIG}")
            temporary.write_text(dump_yaml(config), encoding="utf-8")
            os.replace(temporary, file)  # whole or not there: it marks the directory as a run
