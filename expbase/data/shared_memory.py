"""The files that workers of a loader leave in shared memory when they are killed. A leaf.

note = leave_note()    # in a worker, before it makes files there
remove_left_files()    # when workers have ended; at the next start, if all were killed

A worker whose parent has ended becomes this file as a program.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# The beginning of the name of a file on which a worker holds a lock as long as it lives; the id of
# the worker follows. Unlike an id, a lock means the same in all containers that share this memory.
_NOTE = "expbase_worker_"


def leave_note() -> int | None:
    """Notes that this process makes files in shared memory, before it makes the first one.

    The note stays when the process has ended: its parent may still hold files of it then, and be
    killed with them. `remove_left_files` removes both.

    Returns:
        The descriptor that keeps the note locked. It is closed before this process removes its own
        files. None if there is no shared memory.
    """
    import fcntl  # here: Windows has none, and is refused in words

    with contextlib.suppress(OSError):  # there is no such directory
        # Not by tempfile, which would take as long again as all the rest here.
        name = f"{_NOTE}{os.getpid()}_{os.urandom(4).hex()}"
        path = SHARED_MEMORY / f".{name}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)  # until this process is dead
        os.rename(path, SHARED_MEMORY / name)  # only now: whoever finds it finds it locked
        return file
    return None


def remove_left_files() -> None:
    """Removes the files in shared memory of dead workers, whoever had started them.

    A process that still uses such a file goes on: only the name is removed.
    """
    import fcntl

    dead: dict[Path, str] = {}
    alive: set[str] = set()
    with contextlib.ExitStack() as stack:
        for note in SHARED_MEMORY.glob(f"{_NOTE}*"):
            pid = note.name.removeprefix(_NOTE).partition("_")[0]
            with contextlib.suppress(OSError):  # it has just gone
                if note.lstat().st_uid != os.getuid():  # not to be believed
                    continue
                file = stack.enter_context(note.open())
                try:
                    # Shared: another process may look at this moment, too.
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    dead[note] = pid
                except BlockingIOError:
                    alive.add(pid)
        for note, pid in dead.items():
            if pid not in alive:  # in another container, or with the id of a dead one
                for path in [*SHARED_MEMORY.glob(f"paddle_{pid}_*"), note]:
                    with contextlib.suppress(OSError):  # gone already, or another user's
                        path.unlink()


if __name__ == "__main__":
    remove_left_files()
