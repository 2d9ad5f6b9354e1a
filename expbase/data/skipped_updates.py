"""Which updates' batches are left out, and which of them come next: training.skip_updates.

Numbers are those of a run that leaves nothing out: slot 5 is what update 5 of it reads. Which slots
were left out is part of a checkpoint. So a number means the same batches whenever it is given, and
one that comes too late, or is taken out too late, moves no other.

    skips = Skips([3, 4])
    slots = skips.before(3)  # 3 and 4 are read past, and update 3 has the batches of slot 5
    skips.note(slots)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable


class Skips:
    """The slots that are left out.

    Args:
        numbers: Those of training.skip_updates, in any order.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.to_come = {*numbers}
        self.done: list[int] = []  # in the order in which they were left out

    def before(self, iteration: int) -> list[int]:
        """Returns the slots that lie before that of an update, and were not left out yet."""
        slot = iteration + len(self.done)
        return [*itertools.takewhile(self.to_come.__contains__, itertools.count(slot))]

    def note(self, slots: Iterable[int]) -> None:
        """Notes that slots were read past."""
        self.to_come.difference_update(slots)
        self.done.extend(slots)

    def go_on(self, iteration: int) -> tuple[list[int], list[int]]:
        """Drops the numbers that lie behind an update, after which a run goes on.

        Args:
            iteration: The number of that update.

        Returns:
            Numbers of the config whose batches were used, and slots that were left out and are not
            in the config any more.
        """
        last = iteration + len(self.done)
        behind = {number for number in self.to_come if number <= last}
        self.to_come -= behind
        return sorted(behind.difference(self.done)), sorted({*self.done} - behind)

    @property
    def numbers(self) -> set[int]:
        """All slots that are left out, and those that were."""
        return self.to_come.union(self.done)
