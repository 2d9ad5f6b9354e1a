"""Phases that have no effect on training: validation, prediction.

In a phase other than "train" the models are in eval mode, no gradients are kept, and the random
numbers are the phase's own, derived from (seed, iteration); everything is as before afterwards.
What a validation is, the user's `valid` says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import paddle

from expbase.base import rng
from expbase.base.arrays import gradient
from expbase.base.generators import GENERATORS
from expbase.data.loaders import Batches, LoaderAdapter, Shard, adapt_loader
from expbase.engine.stop import ValidationExit, ValidationLeft
from expbase.ranks import collectives
from expbase.record.meter import Meter
from expbase.record.speed import Stopwatch
from expbase.state import objects
from expbase.state.attributes import UserState
from expbase.state.inventory import LOADERS
from expbase.state.values import Places, Snapshot

T = TypeVar("T")

_COPIED_BYTES = 1 << 24  # of a value that is put back when a validation was left
_PURPOSES = {"valid": rng.VALID, "predict": rng.PREDICT}


class Evaluation:
    """The phases of one experiment.

    Args:
        training: That section of the config.
        state: The attributes of the experiment.
        stopwatch: Counts the time of training without these phases.
        fire: Calls an event.
        warn: Writes a line.
    """

    def __init__(
        self,
        training: Any,
        state: UserState,
        stopwatch: Stopwatch,
        fire: Callable[..., Any],
        warn: Callable[[str], None],
    ) -> None:
        self.phase = "train"
        self.meter = Meter()  # what `log` adds to; in training that of the lines
        self.loader: Any = None  # what evaluate was given
        self.batches_read = 0  # in all; who watches for a hang asks
        self.loops_begun = 0  # over a loader, in this call of valid()
        self.has_warned = False  # that the ranks have other results
        self.exit: ValidationExit | None = None  # how a validation is left when the run stops
        self._training = training
        self._state = state
        self._stopwatch = stopwatch
        self._fire = fire
        self._warn = warn
        # By the id of their loader: persistent workers serve every loop over it.
        self._adapters: dict[int, LoaderAdapter] = {}
        # With shares each rank has all of the data: sums over parts of it would depend on them.
        self._has_all: bool = training.shares > 0
        ranks = (0, 1) if self._has_all else (collectives.rank(), collectives.world_size())
        self._shard = Shard(training.seed, *ranks)
        self._running: list[Batches] = []  # loops that may have been left early

    @contextlib.contextmanager
    def begin(
        self, phase: str, iteration: int, loader: Any = None, layers: Iterable[Any] = ()
    ) -> Iterator[None]:
        """The phase of that name; within a phase that is not training it changes nothing.

        `loader` is what valid_batches reads by default, `layers` are no attributes.
        """
        before = self.phase, self.loader, self.meter
        isolation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.phase == "train":
            self.phase = phase
            isolation = self._isolated(_PURPOSES[phase], iteration, layers)
        if loader is not None:
            self.loader = loader
        if before[0] == "train" or phase == "predict":
            self.meter = Meter()
        try:
            with isolation:
                yield
        finally:
            self.phase, self.loader, self.meter = before

    @contextlib.contextmanager
    def may_be_left(
        self, way_out: ValidationExit, listeners: Callable[[], object]
    ) -> Iterator[None]:
        """A validation, in the block, that all ranks leave when the run stops.

        Then, and if it fails, the experiment is as it was before, but for what valid() itself
        changed in tensors of layers and optimizers; `listeners` puts their counters back.
        """
        before = Snapshot(self._places, _COPIED_BYTES)
        found = self._state.found()
        rates = found.values(objects.LEARNING_RATES)
        self.exit = way_out
        try:
            yield
        except (ValidationLeft, Exception):
            listeners()
            found.set_values(rates)
            for path in before.restore():
                self._warn(
                    f"self.{path}: was changed by a validation that did not end, and is too large "
                    "to be put back: the run that goes on is not exact."
                )
            collectives.renumber_barriers()
            raise
        finally:
            self.exit = None

    def _places(self) -> Places:
        """What valid() may change: all but what belongs to a loader."""
        places = self._state.values.places()
        return {path: place for path, place in places.items() if not path.startswith(LOADERS)}

    @contextlib.contextmanager
    def _isolated(self, purpose: int, iteration: int, layers: Iterable[Any]) -> Iterator[None]:
        rng.seed_for(self._training.seed, purpose, iteration, self._shard.rank)
        found = self._state.found()
        roots = [*found.layers.values(), *layers]
        sublayers = [part for layer in roots for part in layer.sublayers(include_self=True)]
        modes = [layer.training for layer in sublayers]
        of_layers = [p for layer in roots for p in layer.parameters()]
        gradients = _copied_gradients([*found.parameters.values(), *of_layers])
        drawn_from = found.values(GENERATORS)
        before = Snapshot(lambda: _places_in_layers(found))
        try:
            with self._stopwatch.exclude(), paddle.no_grad():
                for layer in sublayers:
                    layer.training = False
                yield
        finally:
            for layer, mode in zip(sublayers, modes, strict=True):
                layer.training = mode
            _set_gradients(gradients)
            found.set_values(drawn_from)
            before.restore()
            self.let_go(kept=self._state.everything.values())

    def log(self, iteration: int, scalars: Mapping[str, Any], *, repeats_rank_zero: bool) -> None:
        """Adds to the meter; but what a rank logs in training that only repeats rank 0's."""
        if repeats_rank_zero and self.phase == "train":
            self.meter.is_used = True
        else:
            self.meter.add(iteration, scalars)

    def batches(self, loader: Any, iteration: int) -> Iterator[Any]:
        """This rank's part of a loader's batches, from now on and not from the first one on."""
        loader = self.evaluated_loader if loader is None else loader
        purpose = _PURPOSES.get(self.phase, rng.VALID)
        loop = self.adapter(loader).once(purpose, iteration)
        self.loops_begun += 1
        self._running.append(loop)
        return self._watched(loop, purpose, iteration)

    def _watched(self, loop: Batches, purpose: int, iteration: int) -> Iterator[Any]:
        for batch in loop:
            self.batches_read += 1
            rng.seed_for(self._training.seed, purpose, iteration, loop.taken[0], 1)
            if self.exit is not None:
                self.exit.before_batch()
            yield batch
            if purpose == rng.VALID:
                self._fire("on_valid_batch_end", batch, loop.indices)

    @property
    def evaluated_loader(self) -> Any:
        """What valid_batches() reads by default."""
        return self._state.everything.get("valid_loader") if self.loader is None else self.loader

    @property
    def indices(self) -> list[Any] | None:
        """Of the samples of the batch that was read last; None: unknown."""
        return self._running[-1].indices if self._running else None

    def adapter(self, loader: Any) -> LoaderAdapter:
        """What drives a loader that is not the training's."""
        if id(loader) not in self._adapters:
            is_own = loader is self._state.everything.get("valid_loader")
            name = "self.valid_loader" if is_own else "valid_batches"
            if loader is None:
                raise LoaderAdapter(None, name, self._shard).not_set()
            self._adapters[id(loader)] = adapt_loader(loader, name, self._shard)
        return self._adapters[id(loader)]

    def let_go(self, kept: Iterable[Any] = ()) -> None:
        """Ends loops that were left early, and the workers of loaders that are not kept."""
        while self._running:
            self._running.pop().close()
        for key in self._adapters.keys() - {id(loader) for loader in kept}:
            self._adapters.pop(key).close()

    def gather(self, value: T, name: str) -> list[T]:
        """The values of all ranks that have a part of the data of this phase."""
        if self._has_all and self.phase != "train":
            return [value]
        self.wait(name)
        return collectives.all_gather_object(value)

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """The mean of each metric over the parts of the data; see ExperimentBase."""
        gather = functools.partial(self.gather, name="self.average()")
        return collectives.weighted_average(metrics, weight, gather)

    def wait(self, name: str) -> None:
        """Before a collective in a phase: other ranks may take longer than it waits."""
        collectives.need_all_ranks(name)
        if self.phase != "train":
            meanwhile = [self.exit.while_waiting] if self.exit else []
            collectives.barrier(name, *meanwhile)


def _places_in_layers(found: objects.StatefulObjects) -> Places:
    """The attributes of all layers, and all of their buffers."""
    return {
        f"{path}.{name}": (layer, name, value)
        for path, layer in found.sublayers()
        for name, value in {**objects.own_attributes(layer), **layer._buffers}.items()
    }


def _copied_gradients(parameters: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each parameter with a copy of its gradient, None if it has none; but not the sparse ones."""
    copied = []
    for parameter in {id(p): p for p in parameters}.values():
        grad = gradient(parameter)
        if grad is None:
            copied.append((parameter, None))
        elif not grad.is_selected_rows():  # which cannot be copied
            copied.append((parameter, grad.clone()))
    return copied


def _set_gradients(copied: Iterable[tuple[Any, Any]]) -> None:
    """Sets what was copied: of a saliency map, say, gradients are left, and would be added up."""
    for parameter, kept in copied:
        if gradient(parameter) is not None:
            parameter.clear_gradient(False)
        if kept is not None:
            # Not set or copied to: after clear_gradient the next backward would overwrite it.
            parameter._set_grad_ivar(kept)
