"""What each share of an update has alone: its number, its statistics, values that a user names.

With training.shares: V an update is made of V shares, of one batch each. Rank r of w computes the
V/w shares from r·V/w on, one after the other, each as if it were a process: its random numbers are
derived from its number, and what an update changes in a layer besides what is trained (the running
statistics of batch norm, a buffer) is the share's own. Outside of shares the layers have what
share 0 has, on all ranks.

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
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from expbase.ranks import world
from expbase.state.arrays import Array
from expbase.state.objects import OF_PADDLE, get_state, has_state, set_state
from expbase.state.user_state import UserState
from expbase.state.values import fingerprint, plain_values

ShareState = dict[str, Any]  # of one share: tensors and values by path
Tensors = list[tuple[str, dict[str, Any], str]]  # of layers: the path; where one stands


class ShareStates:
    """The shares of one rank; in a checkpoint those of all ranks."""

    def __init__(self, training: Any, state: UserState) -> None:
        self._count: int = training.shares
        on_a_rank = self._count // world.world_size()
        first = world.rank() * on_a_rank
        self.numbers = range(first, first + on_a_rank)
        self.is_computing = False
        self._state = state
        self._kept: dict[int, ShareState] = {number: {} for number in self.numbers}
        self._statistics: set[str] = set()  # paths of tensors that a share has changed
        self._first_iteration = -1  # of this start
        self._tensors: Tensors = []  # what may be a statistic
        # As they are before the first update of this start, in which it is seen which are.
        self._before: dict[str, Any] = {}
        self._values: dict[str, int] = {}  # fingerprints of all other values, before the second

    def begin(self, iteration: int) -> None:
        """Before the first share of an update."""
        if self._first_iteration < 0:
            self._first_iteration = iteration
            self._tensors = _possible_statistics(self._state)
            for kept in self._kept.values():
                for path in self._state.by_share:
                    kept[path] = _copy(getattr(*self._state.owner_of(path)), kept, path)
        is_first = iteration == self._first_iteration
        self._before = {p: of[name].clone() for p, of, name in self._tensors if is_first}
        # In the second update: a layer may set up something in its first forward.
        self._values = self._fingerprints() if iteration == self._first_iteration + 1 else {}

    @contextlib.contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """What is computed in the block is this share's."""
        self._install(self._kept[number])
        self.is_computing = True
        try:
            yield
        finally:
            self.is_computing = False
            self._keep(self._kept[number])
        if self._values:
            self._refuse_changes()

    def end(self) -> dict[str, Any]:
        """After the last share of an update; collective in the first one.

        Returns:
            The tensors of the layers that all ranks are to get from rank 0, which has share 0.
        """
        if self._before:
            self._statistics = set().union(*world.gather_objects(self._statistics))
            for kept in self._kept.values():
                for path in self._statistics - kept.keys():
                    kept[path] = self._before[path].clone()
        self._install(self._kept[self.numbers.start])
        return self._live()

    def _live(self) -> dict[str, Any]:
        """The statistics in the layers."""
        return {path: of[name] for path, of, name in self._tensors if path in self._statistics}

    def _install(self, kept: Mapping[str, Any]) -> None:
        known = {**self._before, **kept}
        for path, tensor in self._live().items():
            tensor.copy_(known[path], True)
        for path in self._state.by_share:
            setattr(*self._state.owner_of(path), kept[path])

    def _keep(self, kept: ShareState) -> None:
        for path, of, name in self._tensors:
            if path in self._before and not _same(of[name], self._before[path]):
                self._statistics.add(path)
        kept |= {path: tensor.clone() for path, tensor in self._live().items()}
        kept |= {path: getattr(*self._state.owner_of(path)) for path in self._state.by_share}

    def _refuse_changes(self) -> None:
        """Raises a RuntimeError for a value that changes once for each batch of a rank."""
        for path, value in self._fingerprints().items():
            if self._values.get(path) != value:
                raise RuntimeError(
                    f"self.{path}: has changed within the loop over micro_batches(), which is "
                    "shorter with more ranks. Change it outside of the loop, or call in "
                    f"setup_model register_stateful({path!r}, by_share=True), so that each share "
                    "has its own, or exclude_from_state, if training does not depend on it."
                )

    def _fingerprints(self) -> dict[str, int]:
        """Of plain values, generators, schedules and other objects with state, by path."""
        tensors = {path for path, _, _ in self._tensors}
        values = plain_values(self._state.owners())
        values |= {name: get_state(o) for name, o in self._state.saved().objects.items()}
        return {path: fingerprint(v) for path, v in values.items() if path not in tensors}

    def state_dict(self) -> dict[str, ShareState]:
        """What the shares of this rank have, by their numbers."""
        return {
            str(number): {p: get_state(v) if has_state(v) else v for p, v in kept.items()}
            for number, kept in self._kept.items()
        }

    def load_state_dict(self, state: Mapping[str, ShareState]) -> list[str]:
        """Takes what the shares of this rank had; returns why continuing is not exact."""
        for number in self.numbers:
            self._kept[number] = {**state.get(str(number), {})}
            self._statistics |= self._kept[number].keys() - {*self._state.by_share}
        if len(state) == self._count:
            return []
        return [f"training.shares: {len(state)} there, {self._count} now"]


def _possible_statistics(state: UserState) -> Tensors:
    """Buffers, and parameters that are not trained: their paths, and where they stand."""
    return [
        (f"{path}.{name}", of, name)
        for path, part in state.saved().sublayers()
        for of in (part._parameters, part._buffers)
        for name, tensor in of.items()
        if tensor is not None and tensor._is_initialized() and name not in OF_PADDLE
        if of is part._buffers or tensor.stop_gradient
    ]


def _copy(value: Any, restored: Mapping[str, Any], path: str) -> Any:
    """A copy of a value, as it was restored if it was."""
    if path in restored and not has_state(value):
        return restored[path]
    value = copy.deepcopy(value)
    if path in restored:
        set_state(value, restored[path])
    return value


def _same(tensor: Any, other: Any) -> bool:
    # As bytes: nan is not equal to itself.
    return np.array_equal(Array.of(tensor).data, Array.of(other).data)
