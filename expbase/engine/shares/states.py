"""What each share of an update has alone: its number, its statistics, values that a user names.

With training.shares: V an update is made of V shares, of one batch each. Rank r of w computes the
V/w shares from r·V/w on, one after the other, each as if it were a process: its random numbers are
derived from its number, and the statistics of the layers are the share's own: every buffer, and
the running mean and variance of each normalization. Outside of shares the layers have what share 0
has, on all ranks. What else changes within the loop would depend on the number of ranks, and is an
error: it is looked for in the updates that a checkpoint follows, and in the second, third, fifth,
ninth … of a start. Not in each one, nor at each line: a look may take longer than an update.

    states = ShareStates(training, state)
    states.begin(iteration)
    for number in states.numbers:
        with states.computing(number): ...           # forward and backward of its batch
    states.end()

Source: EasyScale (Li et al., SC 2023), where one process stands in for several workers.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from expbase.base.any_object import state_setter
from expbase.base.arrays import Array
from expbase.base.checkpoint_part import Part
from expbase.base.errors import RuntimeMistake
from expbase.base.generator_states import copied_generator
from expbase.base.json_values import checksum
from expbase.engine.due import due_at
from expbase.ranks import collectives
from expbase.state.compare import is_same
from expbase.state.parts import StatefulObjects, get_state, set_state, statistics
from expbase.state.user_state import UserState

ShareState = dict[str, Any]  # of one share: tensors and values by path


class BesideStatistics(NamedTuple):
    """What there is beside the statistics, at a moment."""

    values: dict[str, Any]  # checksums by path
    tables: dict[str, dict[Any, Any]]  # copies of the dicts among them
    frozen: dict[str, int]  # checksums of the tensors that are not trained


class ShareStates(Part):
    """The shares of one rank; in a checkpoint those of all ranks."""

    def __init__(self, training: Any, state: UserState) -> None:
        self._count: int = training.shares
        on_a_rank = self._count // collectives.world_size()
        first = collectives.rank() * on_a_rank
        self.numbers = range(first, first + on_a_rank)
        self.is_computing = False
        self._training = training
        self._state = state
        self._kept: dict[int, ShareState] = {number: {} for number in self.numbers}
        self._statistics: dict[str, Any] = {}  # the tensors in the layers, by path
        self._first_iteration = -1  # of this start
        self._before: BesideStatistics | None = None  # if the update is looked at

    def begin(self, iteration: int) -> None:
        """Prepares the first share of an update."""
        found = self._state.saved()
        now = dict(statistics(found))
        for path, tensor in now.items():
            # Of a layer that has taken the place of another one each share begins alike.
            is_other = self._statistics.get(path, tensor) is not tensor
            for kept in self._kept.values():
                if is_other or path not in kept:
                    kept[path] = tensor.clone()
        self._statistics = now
        if self._first_iteration < 0:
            self._first_iteration = iteration
            for kept in self._kept.values():
                for path in self._state.reach.apart:
                    kept[path] = _copy(self._state.reach.spot(path).value, kept, path)
        due = due_at(self._training, iteration, 0, 0, is_epoch_end=False)
        # Not in the first one, in which a layer may set up something.
        made = iteration - self._first_iteration
        looks = due.checkpoint or made & (made - 1) == 0 < made
        self._before = self._look(found, with_tensors=due.checkpoint) if looks else None

    @contextlib.contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """Makes the block this share's: its statistics, its random numbers."""
        kept = self._kept[number]
        self._install(kept)
        self.is_computing = True
        try:
            yield
        finally:
            self.is_computing = False
            kept |= {path: tensor.clone() for path, tensor in self._statistics.items()}
            kept |= {path: self._state.reach.spot(path).value for path in self._state.reach.apart}

    def end(self) -> dict[str, Any]:
        """Ends an update after its last share.

        Returns:
            The statistics, which all ranks are to get from rank 0, which has share 0.

        Raises:
            RuntimeError: Something else has changed within the loop.
        """
        if self._before is not None:
            self._refuse_changes(self._before)
        self._install(self._kept[self.numbers.start])
        return self._statistics

    def _install(self, kept: Mapping[str, Any]) -> None:
        for path, tensor in self._statistics.items():
            tensor.copy_(kept[path], False)  # behind what is queued; no wait
        for path in self._state.reach.apart:
            self._state.reach.spot(path).put(kept[path])

    def _look(self, found: StatefulObjects, *, with_tensors: bool) -> BesideStatistics:
        state = self._state
        looked = state.values.looked()
        values: dict[str, Any] = {path: seen for path, (seen, _) in looked.items()}
        values |= {name: checksum(get_state(o)) for name, o in found.objects.items()}
        beyond = [path for path in state.reach.registered if path not in values]
        values |= {path: checksum(state.reach.spot(path).value) for path in beyond}
        tables = {p: dict(value) for p, (_, value) in looked.items() if isinstance(value, dict)}
        frozen = {
            f"{path}.{name}": zlib.crc32(Array.of(tensor).data)  # type: ignore[arg-type]
            for path, part in (found.sublayers() if with_tensors else ())
            for name, tensor in part.named_parameters(include_sublayers=False)
            if tensor.stop_gradient and tensor._is_initialized()
        }
        known = self._statistics.keys()
        return BesideStatistics(
            {p: value for p, value in values.items() if p.removesuffix("[:]") not in known},
            tables,
            {path: value for path, value in frozen.items() if path not in known},
        )

    def _refuse_changes(self, before: BesideStatistics) -> None:
        """Raises a RuntimeError for what changes once for each batch of a rank."""
        now = self._look(self._state.saved(), with_tensors=bool(before.frozen))
        for path, value in now.frozen.items():
            if before.frozen.get(path, value) != value:
                raise RuntimeMistake(
                    f"self.{path}: a weight that is not trained has changed within the loop over "
                    "micro_batches(), which is shorter with more ranks. Change it outside of the "
                    "loop, or make it a statistic, by register_buffer: of these each share has its "
                    "own."
                )
        for path, value in now.values.items():
            if is_same(before.values.get(path), value) or _is_filled(path, before, now):
                continue
            path = path.removesuffix("[:]")
            raise RuntimeMistake(
                f"self.{path}: a value that has changed within the loop over micro_batches(), "
                "which is shorter with more ranks. Change it outside of the "
                f"loop, or call in setup_model register_stateful({path!r}, by_share=True), so that "
                "each share has its own, or exclude_from_state, if training does not depend on it."
            )

    def state_dict(self) -> dict[str, ShareState]:
        """Returns the state of the shares of this rank, by their numbers."""
        return {
            str(number): {p: get_state(v) if state_setter(v) else v for p, v in kept.items()}
            for number, kept in self._kept.items()
        }

    def load_state_dict(self, state: Mapping[str, ShareState]) -> list[str]:
        """Takes what the shares of this rank had; returns why continuing is not exact."""
        for number in self.numbers:
            self._kept[number] = {**state.get(str(number), {})}
        if len(state) == self._count:
            return []
        return [f"training.shares: {len(state)} there, {self._count} now"]


def _is_filled(path: str, before: BesideStatistics, now: BesideStatistics) -> bool:
    """Returns whether a cache was filled: what was there has not changed."""
    old = before.values.get(path)
    if old is None:  # there was none, or None
        return True
    table = before.tables.get(path)
    return table is not None and all(now.tables[path].get(k) is item for k, item in table.items())


def _copy(value: Any, restored: Mapping[str, Any], path: str) -> Any:
    """Returns a copy of a value, as it was restored if it was."""
    if path in restored and not state_setter(value):
        return restored[path]
    if isinstance(value, np.random.Generator):
        value = copied_generator(value)
    else:
        value = copy.deepcopy(value)
    if path in restored:
        set_state(value, restored[path])
    return value
