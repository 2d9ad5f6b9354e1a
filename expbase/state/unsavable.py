"""What has changed in an attribute and no checkpoint can hold: named once, and noted for a resume.

told = Told(reach, warn, say)
told.tell("fn", value)              # at a save; `say_all` makes one line of all
told.tell_order("seen")
state = told.state_dict()           # with the values of a checkpoint
lost, further = told.differences([], [])  # at a resume, before the first batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from expbase.state.reachable import BEYOND, Reach

MOST_LINES = 20
WAYS_OUT = (
    "If training depends on it: keep it in an attribute, as numbers, texts, arrays, tensors or "
    "collections of them, in an object with state_dict and set_state_dict, or return it from "
    "on_save_checkpoint. If not: exclude_from_state."
)
LOST = "has changed in training, and is not what it was then"
UNSET = "on_train_begin had set it, which no checkpoint can hold, and has not set it again"
_ORDER = (
    "sets, to whose items pop() and loops may come in another order after a resume, while "
    "sorted(…) is the same in every process"
)


class Told:
    """Names attributes that have changed and cannot be saved.

    Args:
        reach: What the experiment leads to.
        warn: Called with a line about a value that is in no checkpoint.
        say: Called with a line that is no warning.
    """

    def __init__(
        self, reach: Reach, warn: Callable[[str], object], say: Callable[[str], object]
    ) -> None:
        self._reach = reach
        self._warn = warn
        self._say = say
        self.paths: dict[str, None] = {}  # of what was told, in any start
        self._orders: dict[str, None] = {}  # of sets
        self._beside: set[str] = set()  # of flags beside what training has opened
        self._hooked: list[str] = []  # paths of what on_train_begin has set
        self._hooked_then: list[str] = []  # of the checkpoint that was restored
        self._unset: list[str] = []  # of that, what it has not set again
        self._pending: list[str] = []  # of which a line is to be said
        self._lines = 0

    def tell(self, path: str, value: Any) -> None:
        """Names a value that cannot be saved, once; `say_all` says it."""
        if path not in self.paths:
            self.paths[path] = None
            self._pending.append(f"{shown(path)} ({type(value).__name__})")

    def tell_order(self, path: str) -> None:
        """Says of a set that it is restored, but for an order; once."""
        if path not in self._orders:
            self._orders[path] = None
            self._say(f"{_ORDER}: {shown(path)}")

    def tell_flag(self, path: str) -> None:
        """Says of a flag that it stands beside what training has opened; once."""
        if path not in self._beside:
            self._beside.add(path)
            self._say(
                f"{shown(path)}: is in no checkpoint, as it stands beside a file or the like that "
                "was opened since setup; a resumed run has what setup makes of it"
            )

    def say_all(self) -> None:
        """Says in one line what was told since the last one."""
        names, self._pending = self._pending, []
        room = max(MOST_LINES - self._lines, 0)
        self._lines += len(names)
        if names and room:
            self._warn(changed(names, room))

    def note_hooked(self, paths: Sequence[str]) -> None:
        """Notes what on_train_begin has set and no checkpoint can hold."""
        self._hooked = [*paths]

    # --- over a resume ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resume is to know; nothing of what was told, in most runs."""
        everything = {
            "told": [*self.paths],
            "orders": [*self._orders],
            "hooked": [*self._hooked, *self._unset],
        }
        return {name: entry for name, entry in everything.items() if entry}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Notes what the checkpoint that was restored has told."""
        self.paths = dict.fromkeys(state.get("told", ()))
        self._orders = dict.fromkeys(state.get("orders", ()))
        self._hooked_then = [*state.get("hooked", ())]

    def differences(
        self, restored: Sequence[str], tensors: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Compares the values before the first batch with those of the checkpoint.

        Args:
            restored: Paths of values that were put back and have changed again since.
            tensors: Names of tensors of which that is so.

        Returns:
            One line for each value that is lost, and further lines about them.
        """
        is_left_out = self._reach.is_left_out
        # What on_train_begin sets at each start is as the code wants it.
        self._unset = [
            path for path in self._hooked_then if path not in self._hooked and not is_left_out(path)
        ]
        told = {path for path in self.paths if not is_left_out(path)}
        lost = [f"{shown(path)}: {LOST}" for path in (*restored, *sorted(told - {*self._unset}))]
        lost += [f"{shown(path)}: {UNSET}" for path in self._unset]
        other = "on_train_begin sets it to another value than the checkpoint has"
        lost += [f"{shown(name)}: {other}" for name in tensors]
        further = [in_one_line(_ORDER, [*map(shown, self._orders)])] * bool(self._orders)
        return shortened(lost), further + ways_out(lost)


def changed(names: Sequence[str], room: int) -> str:
    """Returns the warning about values that have changed and are in no checkpoint."""
    more = f" and {len(names) - room} more" if len(names) > room else ""
    return (
        f"{', '.join(names[:room])}{more}: changed in training, and in no checkpoint: a "
        f"resumed run has what setup makes of it. {WAYS_OUT}"
    )


def shown(path: str) -> str:
    """Returns a path as a message shows it."""
    path = path.removesuffix("[:]")
    return path if path.startswith(BEYOND) else f"self.{path}"


def shortened(lines: Sequence[str]) -> list[str]:
    """Returns the first of many lines, and how many more there are."""
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES]] + [f"and {more} more values"] * (more > 0)


def ways_out(lost: Sequence[str]) -> list[str]:
    """Returns what to do about values that are lost, if there are any."""
    return [f"of values that are not what they were: {WAYS_OUT}"] * bool(lost)


def in_one_line(text: str, names: Sequence[str]) -> str:
    """Returns a text with the names that it is about, the first of many."""
    left = len(names) - MOST_LINES
    return f"{text}: {', '.join(names[:MOST_LINES])}" + f" and {left} more" * (left > 0)
