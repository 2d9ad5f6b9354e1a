"""The wrappers that average gradients over the ranks, and what they leave out.

Paddle decides twice, for good, which gradients a DataParallel averages: of a parameter that is
frozen when it is made never (parallel.py, init_reducer); and of one that its first forward does not
use, because it is frozen then, say, neither (reducer.cc, find_unused_vars_once_), unless
find_unused_parameters is set. If such a parameter is trained later, each rank trains its own.

    wrappers = Wrappers(state.found)
    wrappers.note(paddle.DataParallel(layer))
    wrappers.check()             # after each update
    wrappers.follow()            # what a checkpoint has unfrozen
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import paddle

from expbase.state.objects import StatefulObjects, named_parameters, statistics, unwrap


class Wrappers:
    """Every DataParallel that this start has made or found.

    All are kept: the hooks of one on its parameters have a bare pointer to its reducer, and with
    that gone the next backward is a segmentation fault, also where another one has taken its place.

    Args:
        find: Returns what has state now.
    """

    def __init__(self, find: Callable[[], StatefulObjects]) -> None:
        self._noted: dict[Any, _Noted] = {}
        self._find = find

    def note(self, wrapper: Any) -> None:
        """Notes what a wrapper leaves out; one that is known keeps its note."""
        if wrapper not in self._noted:
            self._noted[wrapper] = _Noted(wrapper)

    def note_all(self) -> None:
        """Notes the wrappers that a user has made without data_parallel, too."""
        for wrapper in _averaging(self._find()):
            self.note(wrapper)

    def check(self) -> None:
        """Raises a RuntimeError if a parameter is trained that no wrapper averages."""
        if any(noted.thawed() for noted in self._noted.values()):  # all else takes milliseconds
            self._check_thawed()

    def _check_thawed(self) -> None:
        found = self._find()
        here = _averaging(found)
        for wrapper in here:
            self.note(wrapper)
        averaged = {
            id(parameter)
            for wrapper in here
            for parameter in wrapper.parameters()
            if id(parameter) not in self._noted[wrapper].left_out
        }
        for wrapper, noted in self._noted.items():
            for parameter in noted.thawed():
                if wrapper in here and id(parameter) not in averaged:
                    _refuse(parameter, wrapper, found)
                del noted.left_out[id(parameter)]  # it has been wrapped again

    def follow(self) -> None:
        """Makes those reducers again that leave out what a checkpoint has unfrozen."""
        for wrapper in _averaging(self._find()):
            self.note(wrapper)
            if self._noted[wrapper].thawed():
                self._noted[wrapper].make_reducer()


class _Noted:
    """What one wrapper leaves out."""

    def __init__(self, wrapper: Any) -> None:
        self.left_out: dict[int, Any] = {}  # parameters, by id
        self._wrapper = wrapper
        self._reducers: list[Any] = []  # that it had
        self._is_open = False  # whether the first forward is still to decide
        self._begin()
        wrapper.register_forward_pre_hook(self._before_forward)

    def _begin(self) -> None:
        self._is_open = not self._wrapper.find_unused_parameters
        self.left_out = self._frozen()

    def _frozen(self) -> dict[int, Any]:
        # Statistics are written, not trained, also where a loop over all parameters reaches them.
        whole = StatefulObjects(layers={"": self._wrapper})
        written = {id(tensor) for _, tensor in statistics(whole)}
        frozen = {id(p): p for p in self._wrapper.parameters() if p.stop_gradient}
        return {key: p for key, p in frozen.items() if key not in written}

    def _before_forward(self, wrapper: Any, inputs: Any) -> None:
        if self._is_open and paddle.is_grad_enabled() and wrapper.grad_need_sync:
            self._is_open = False
            self.left_out |= self._frozen()

    def thawed(self) -> list[Any]:
        """Returns the parameters that are left out and trained now."""
        return [p for p in self.left_out.values() if not p.stop_gradient]

    def make_reducer(self) -> None:
        """Makes the reducer again: it averages what is trained now."""
        self._reducers.append(self._wrapper._reducer)
        self._wrapper.init_reducer()
        self._begin()


def _averaging(found: StatefulObjects) -> list[Any]:
    """Returns the wrappers that decide so. Fleet's average what has a gradient, when they step."""
    wrappers = [w for w in found.parallel.values() if isinstance(w, paddle.DataParallel)]
    return [wrapper for wrapper in wrappers if hasattr(wrapper, "_reducer")]  # not of one process


def _refuse(parameter: Any, wrapper: Any, found: StatefulObjects) -> NoReturn:
    names = {id(p): name for name, p in named_parameters(found)}
    paths = {id(layer): path for path, layer in found.sublayers()}
    path = paths.get(id(unwrap(wrapper)), "model")
    raise RuntimeError(
        f"self.{names.get(id(parameter))}: was frozen when its layer was given to data_parallel, "
        "or in the first forward after that, and is trained now; its gradients are not averaged, "
        "so each rank trains its own. Wrap the layer again where you unfreeze it: "
        f"self.{path} = self.data_parallel(self.{path})."
    )
