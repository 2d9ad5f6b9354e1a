"""The wrappers that average gradients over the ranks, and what they leave out.

Paddle decides twice, for good, which gradients a DataParallel averages: never those of a parameter
that is frozen when it is made (paddle/distributed/parallel.py, init_reducer); nor those of one that
its first forward does not use, because it is frozen then, say (reducer.cc, find_unused_vars_once_),
unless find_unused_parameters is set. Trained later, each rank would train its own: that is an error
in the next forward.

    wrappers = Wrappers(state.found)
    wrappers.note(paddle.DataParallel(layer))
    wrappers.follow()            # what a checkpoint has unfrozen
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from expbase.base.errors import RuntimeMistake
from expbase.state.parts import StatefulObjects, named_parameters, statistics
from expbase.state.walk import unwrap


class Wrappers:
    """Every DataParallel that this start has made or found.

    All are kept: the hooks of one on its parameters have a bare pointer to its reducer, and with
    that gone the next backward is a segmentation fault, also where another one has taken its place
    (paddle/fluid/distributed/collective/reducer.cc, EagerReducer).

    Args:
        find: Returns the objects that have state now.
    """

    def __init__(self, find: Callable[[], StatefulObjects]) -> None:
        self._noted: dict[Any, _Noted] = {}
        self._find = find

    def note(self, wrapper: Any) -> None:
        """Notes what a wrapper leaves out; one that is known keeps its note."""
        if wrapper not in self._noted:
            self._noted[wrapper] = _Noted(wrapper, self._find)

    def note_all(self) -> None:
        """Notes the wrappers that a user has made without data_parallel, too.

        Not fleet's: they average whatever has a gradient when its optimizer steps
        (paddle/distributed/fleet/utils/hybrid_parallel_util.py, fused_allreduce_gradients).
        """
        for wrapper in self._find().parallel.values():
            if hasattr(wrapper, "_reducer"):  # not a DataParallel of one process
                self.note(wrapper)

    def follow(self) -> None:
        """Makes those reducers again that leave out what a checkpoint has unfrozen."""
        for noted in self._noted.values():
            if noted.thawed():
                noted.make_reducer()


class _Noted:
    """What one wrapper leaves out."""

    def __init__(self, wrapper: Any, find: Callable[[], StatefulObjects]) -> None:
        self._wrapper = wrapper
        self._find = find
        self._reducers: list[Any] = []  # that it had
        self._left_out: list[Any] = []  # parameters
        self._is_first = True  # whether the next forward decides, too
        self._begin()
        wrapper.register_forward_pre_hook(self._before_forward)

    def _begin(self) -> None:
        self._left_out = self._frozen()
        self._is_first = not self._wrapper.find_unused_parameters

    def _frozen(self) -> list[Any]:
        # Statistics are written, not trained, also where a loop over all parameters reaches them.
        whole = StatefulObjects(layers={"": self._wrapper})
        written = {id(tensor) for _, tensor in statistics(whole)}
        parameters = self._wrapper.parameters()
        return [p for p in parameters if p.stop_gradient and id(p) not in written]

    def _before_forward(self, wrapper: Any, inputs: Any) -> None:
        if not (paddle.is_grad_enabled() and wrapper.grad_need_sync):
            return
        if thawed := self.thawed():
            self._refuse(thawed[0])
        if self._is_first:
            self._is_first = False
            self._left_out = self._frozen()

    def thawed(self) -> list[Any]:
        """Returns the parameters that are left out and trained now."""
        return [p for p in self._left_out if not p.stop_gradient]

    def make_reducer(self) -> None:
        """Makes the reducer again: it averages what is trained now."""
        self._reducers.append(self._wrapper._reducer)
        self._wrapper.init_reducer()
        self._begin()

    def _refuse(self, parameter: Any) -> None:
        found = self._find()
        names = {id(p): name for name, p in named_parameters(found)}
        paths = {id(layer): path for path, layer in found.sublayers()}
        path = paths.get(id(unwrap(self._wrapper)), "model")
        raise RuntimeMistake(
            f"self.{names.get(id(parameter), path)}: was frozen when its layer was given to "
            "data_parallel, or in the first forward after that, and is trained now. Its gradients "
            "are not averaged, so each rank would train its own. Wrap the layer again where you "
            f"unfreeze it: self.{path} = self.data_parallel(self.{path})."
        )
