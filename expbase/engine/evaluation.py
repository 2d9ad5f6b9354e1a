"""Phases that have no effect on training: validation, prediction.

In a phase other than "train" the models are in eval mode, no gradients are kept, and the random
numbers are the phase's own, derived from (seed, iteration); everything is as before afterwards.
What a validation is, the user's `valid` says.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import paddle

from expbase.base import rng
from expbase.base.arrays import in_words, number
from expbase.base.errors import RuntimeMistake, TypeMistake, ValueMistake
from expbase.base.gradients import copies_of, set_gradient
from expbase.config import ConfigError
from expbase.data.evaluated_samples import (
    Read,
    check_loops,
    check_read,
    counted_twice,
    what_was_read,
)
from expbase.data.loaders import (
    Batches,
    LoaderAdapter,
    Shard,
    adapt_loader,
    several_loaders,
)
from expbase.engine.leave_validation import ValidationExit
from expbase.engine.start import Start
from expbase.ranks import collectives, compare_gathered
from expbase.record.meter import Reading, SampleMeter, Taken, means_over
from expbase.record.speed import Stopwatch
from expbase.state.rollback import Rollback
from expbase.state.user_state import UserState
from expbase.state.walk import LOADERS

T = TypeVar("T")

OF_SEVERAL = (
    "Evaluate each: self.evaluate(loader, name=name) in a loop, for example in on_train_epoch_end; "
    "or read each by self.valid_batches(loader) in valid."
)
_PURPOSES = {"valid": rng.VALID, "predict": rng.PREDICT}


class Evaluation:
    """The phases of one experiment.

    Args:
        state: The attributes of the experiment.
        stopwatch: Counts the time of training without these phases.
        has_all: Whether each rank has all of the data, and not a part of it.
    """

    def __init__(
        self,
        start: Start,
        state: UserState,
        stopwatch: Stopwatch,
        *,
        has_all: bool,
    ) -> None:
        training = start.training
        self.phase = "train"
        self.loader: Any = None  # what evaluate was given
        self.batches_read = 0  # in all; who watches for a hang asks
        self._loops_begun = 0  # over a loader, in this call of valid()
        self._has_warned = False  # of results that are missing, or differ between the ranks
        self.exit: ValidationExit | None = None  # how a validation is left when the run stops
        self._training = training
        self._state = state
        self._stopwatch = stopwatch
        self._start = start
        # By the id of their loader: persistent workers serve every loop over it.
        self._adapters: dict[int, LoaderAdapter] = {}
        self._has_all = has_all  # where sums over parts would depend on the number of ranks
        ranks = (0, 1) if self._has_all else (collectives.rank(), collectives.world_size())
        self._shard = Shard(training.seed, *ranks)
        self._running: list[Batches] = []  # loops that may have been left early
        self._read_last: Batches | None = None  # the loop that read a batch last
        self._told: set[str] = set()  # of what a line was said already
        self._reading = Reading()
        self.logged = SampleMeter(self._reading)  # what `log` adds to in another phase
        # A loader of this phase whose batches may weigh something else, and what they weigh.
        self._doubt = ("", "")
        self._around: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []

    def need_training(self) -> None:
        """Raises a RuntimeError in another phase, where a training batch would be taken."""
        if self.phase != "train":
            raise RuntimeMistake(
                f"read_batch: called in the phase {self.phase!r}, where it would take training "
                "data; expected valid_batches()."
            )

    def surround(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Puts a context round each phase to come that is not training; see Internals."""
        self._around.append(context)

    @contextlib.contextmanager
    def begin(
        self, phase: str, iteration: int, loader: Any = None, layers: Iterable[Any] = ()
    ) -> Iterator[None]:
        """Begins a phase for a block; within a phase that is not training it changes nothing.

        `loader` is what valid_batches reads by default, `layers` are no attributes.
        """
        before = self.phase, self.loader, self.logged
        isolation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.phase == "train":
            self.phase = phase
            isolation = self._isolated(_PURPOSES[phase], iteration, layers)
        if loader is not None:
            self.loader = loader
        if before[0] == "train" or phase == "predict":
            self.logged = SampleMeter(self._reading)
            self._doubt = ("", "")
        try:
            with isolation, contextlib.ExitStack() as surrounded:
                for context in self._around if before[0] == "train" else ():
                    surrounded.enter_context(context())
                yield
            if before[0] == "train" and any(self.logged.take()):
                raise RuntimeMistake(
                    "log: called in an evaluation after its results were taken; expected it in "
                    "valid or on_evaluate_end."
                )
        finally:
            self.phase, self.loader, self.logged = before

    @contextlib.contextmanager
    def may_be_left_by(self, way_out: ValidationExit) -> Iterator[None]:
        """Makes the block a validation that all ranks leave when the run stops."""
        self.exit = way_out
        try:
            with collectives.barriers_that_may_be_left(way_out.while_waiting):
                yield
        finally:
            self.exit = None

    def validate(
        self, valid: Callable[[], Any], num_drawn: Callable[[], int], iteration: int
    ) -> dict[str, float]:
        """Returns the results of a validation, the same on every rank.

        They are what valid() returns on rank 0, and the means of the scalars that are logged in it,
        over all ranks.

        `num_drawn` counts what is on the board.

        Raises:
            TypeError: It returned something else than numbers by name.
            RuntimeError: Some ranks left out their part of the data.
        """
        self._loops_begun = 0
        drawn_before = num_drawn()
        results = valid()
        here = numbers_of_valid(results), self.logged.take(), self._loops_begun
        collectives.barrier("the end of valid()")
        read = what_was_read(self._running, with_indices=True)
        of_all = collectives.all_gather_object((*here, read))
        returned, taken, begun, read_on_ranks = zip(*of_all, strict=True)
        check_loops(begun)
        if not any(begun):
            self._tell_unread_loader(has_logged=any(map(any, taken)))
        self._check_read([*read_on_ranks], iteration)
        of_ranks = [
            {**means, **numbers}
            for means, numbers in zip(self._means_on_ranks(taken), returned, strict=True)
        ]
        first = of_ranks[0]  # what only rank 0 returns was left to it
        is_silent = results is None and drawn_before == num_drawn()
        difference = compare_gathered.first_difference(
            [{**first, **numbers} for numbers in of_ranks]
        )
        if self._has_warned:
            return first
        if is_silent and not first:
            self._has_warned = True
            self._start.logger.info(  # no warning: its numbers may go elsewhere
                f"[{iteration}] valid: returned None and logged nothing, so it has no result; "
                "expected numbers by name, or `return {}` if that is meant."
            )
        elif difference:
            self._has_warned = True
            self._start.warn(
                f"[{iteration}] valid: {difference}; rank 0's is used for all. For the mean over "
                "all samples call self.log(name=value) for each batch; for what is no mean over "
                "samples self.average(metrics, weight) or self.gather(value), after the loop."
            )
        return first

    def logged_since(self) -> dict[str, float]:
        """Returns the means over all ranks of what was logged after valid(), on every rank."""
        here = self.logged.take()
        collectives.barrier("the end of on_evaluate_end")
        return self._means_on_ranks(collectives.all_gather_object(here))[0]

    def _check_read(self, of_ranks: list[list[Read]], iteration: int) -> None:
        """Raises a ValueError if no rank had a batch; warns, once, of what counts twice."""
        check_read(self._running, of_ranks)
        for name, text in counted_twice(self._running, of_ranks).items():
            if self._is_first(name):
                self._start.warn(f"[{iteration}] {name}: {text}")

    def _is_first(self, what: str) -> bool:
        """Returns whether a line is to be said: once of each thing."""
        is_first = what not in self._told
        self._told.add(what)
        return is_first

    def _means_on_ranks(self, taken: Sequence[Taken]) -> list[dict[str, float]]:
        """Returns the means of what was logged, for each rank: over all ranks, the same on each.

        If each rank has all samples its own means are those over all.
        """
        if self._has_all:
            return [means_over([of_rank]) for of_rank in taken]
        return [means_over(taken)] * len(taken)

    def _tell_unread_loader(self, *, has_logged: bool) -> None:
        """Says, once of each, that valid() has not asked for the batches of a loader that is set.

        A loop over self.valid_loader itself is right on one process, if its means are valid's own.
        """
        is_own = self.evaluated_loader is self._state.reach.spot("valid_loader").value
        if self.evaluated_loader is None or (
            is_own and not has_logged and not self._start.parallel
        ):
            return
        name = self._name_of(self.evaluated_loader)
        if self._is_first(name):
            self._start.warn(
                f"valid: did not call self.valid_batches(), which reads {name}; a loop over a "
                "loader of its own takes the same data whatever evaluate() is given, all of it on "
                "each rank, and log() weighs its batches alike."
            )

    @contextlib.contextmanager
    def _isolated(self, purpose: int, iteration: int, layers: Iterable[Any]) -> Iterator[None]:
        rng.seed_for(self._training.seed, purpose, iteration, self._shard.rank)
        found = self._state.found()
        roots = [*found.layers.values(), *layers]
        sublayers = [part for layer in roots for part in layer.sublayers(include_self=True)]
        modes = [layer.training for layer in sublayers]
        of_layers = [p for layer in roots for p in layer.parameters()]
        gradients = copies_of([*found.parameters.values(), *of_layers])
        before = Rollback(self._state.moved_by_forwards(roots))
        try:
            with self._stopwatch.exclude(), paddle.no_grad():
                for layer in sublayers:
                    layer.training = False
                yield
        finally:
            for layer, mode in zip(sublayers, modes, strict=True):
                layer.training = mode
            for parameter, kept in gradients:  # those of a saliency map, say, would be added up
                set_gradient(parameter, kept)
            before.restore()
            self.let_go(kept=self._state.reach.everything.values())

    def log(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Notes numbers of this phase, each for the samples that it counts for."""
        self._say_doubt(iteration)
        self.logged.add(iteration, scalars)

    def _say_doubt(self, iteration: int) -> None:
        """Says, once of each loader, if its batches may weigh something else than their samples."""
        name, text = self._doubt
        if name and self._is_first(f"the batches of {name}"):
            self._start.logger.info(
                f"[{iteration}] log: the batches of {name} {text} in the means. If that is not "
                "their number of samples, call self.average(metrics, weight) after the loop."
            )

    def batches(self, loader: Any, iteration: int) -> Iterator[Any]:
        """Begins a loop over this rank's part of a loader's batches, at once."""
        loader = self.evaluated_loader if loader is None else loader
        if kind := several_loaders(loader):
            raise TypeMistake(
                f"{self._name_of(loader)}: a {kind} of loaders given; expected one. {OF_SEVERAL}"
            )
        purpose = _PURPOSES.get(self.phase, rng.VALID)
        loop = self.adapter(loader).once(purpose, iteration)
        self._loops_begun += 1
        self._running.append(loop)
        return self._watched(loop, purpose, iteration)

    def _watched(self, loop: Batches, purpose: int, iteration: int) -> Iterator[Any]:
        try:
            for batch in loop:
                self.batches_read += 1
                self._read_last = loop
                rng.seed_for(self._training.seed, purpose, iteration, loop.taken[0], 1)
                if self.exit is not None:
                    self.exit.before_batch()
                num_samples = self._samples_in(batch, loop)
                self._reading.enter(loop, num_samples)
                self._reading.num_samples += num_samples
                yield batch
                self._reading.enter(loop, num_samples)  # loops within it are over
        finally:  # at once after a `break`, too: nobody has this generator then
            self._reading.leave(loop)

    def _samples_in(self, batch: Any, loop: Batches) -> int:
        adapter = loop.adapter
        num_samples, why = adapter.samples_in(batch, loop.taken)
        if num_samples is None:
            why = "are ready-made (batch_size=None)" if adapter.is_ready_made else "hold no tensor"
            self._doubt = adapter.name, f"{why}, so each batch weighs 1"
            return 1
        if why:
            self._doubt = adapter.name, f"{why}, so such a batch weighs {num_samples}"
        return num_samples

    @property
    def evaluated_loader(self) -> Any:
        """What valid_batches() reads by default."""
        return self._state.reach.spot("valid_loader").value if self.loader is None else self.loader

    @property
    def indices(self) -> list[Any] | None:
        """Of the samples of the batch that was read last; None: unknown."""
        return None if self._read_last is None else self._read_last.indices

    def adapter(self, loader: Any, name: str = "") -> LoaderAdapter:
        """Returns the adapter of a loader that does not train; it is made once."""
        if id(loader) not in self._adapters:
            if loader is None:
                raise LoaderAdapter(None, "self.valid_loader", self._shard).not_set()
            self._adapters[id(loader)] = adapt_loader(
                loader, name or self._name_of(loader), self._shard, self._start.logger.info
            )
        return self._adapters[id(loader)]

    def _name_of(self, loader: Any) -> str:
        """Returns the name of a loader in a message: its attribute, or the method that got it."""
        everything = self._state.reach.everything
        for name in (*LOADERS, *everything):
            if everything.get(name) is loader:
                return f"self.{name}"
        given_to = "predict" if self.phase == "predict" else "valid_batches"
        return f"the loader given to {'evaluate' if loader is self.loader else given_to}"

    def let_go(self, kept: Iterable[Any] = ()) -> None:
        """Ends loops that were left early, and the workers of loaders that are not kept."""
        self._read_last = None
        while self._running:
            loop = self._running.pop()
            self._reading.leave(loop)
            loop.close()
        for key in self._adapters.keys() - {id(loader) for loader in kept}:
            self._adapters.pop(key).close()

    def gather(self, value: T, name: str) -> list[T]:
        """Returns the values of all ranks that have a part of the data of this phase."""
        if self._has_all and self.phase != "train":
            return [value]
        collectives.barrier(name)
        of_ranks = collectives.all_gather_object((value, what_was_read(self._running)))
        check_read(self._running, [read for _, read in of_ranks])
        return [value for value, _ in of_ranks]

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """Returns the mean of each metric over the parts of the data; see ExperimentBase."""
        gather = functools.partial(self.gather, name="self.average()")
        means = collectives.weighted_average(metrics, weight, gather)
        if metrics and not means and self._is_first("average"):
            self._start.warn(
                f"average: weight 0 given on all ranks, so {', '.join(metrics)} has no value here; "
                "expected the number of samples."
            )
        return means


def numbers_of_valid(results: Any) -> dict[str, float]:
    """Returns the results of valid() as numbers; a TypeError if they are no numbers by name."""
    if results is not None and not isinstance(results, Mapping):
        raise TypeMistake(
            f"valid: returned {in_words(results)}; expected numbers by name, or None."
        )
    numbers = {}
    for name, value in (results or {}).items():
        try:
            numbers[name] = number(value)
        except (TypeError, ValueError):
            raise TypeMistake(
                f"valid: the metric {name!r} is {in_words(value)}; expected a number or a tensor "
                "of one."
            ) from None
    return numbers


def named_scalars(mapping: Any, others: tuple[Any, ...]) -> Mapping[str, Any]:
    """Returns the scalars that `log` was given as a mapping; a TypeError if they have no names."""
    if mapping is None and not others:
        return {}
    if others or not isinstance(mapping, Mapping):
        raise TypeMistake(
            f"log: {in_words(mapping)} given without a name; expected self.log(loss=loss) or "
            'self.log({"loss": loss}).'
        )
    return mapping


def check_group(name: str) -> None:
    """Raises a ValueError if a word cannot stand before the metrics of an evaluation."""
    if name in ("train", "speed", "valid") or not re.fullmatch(r"[\w-]+", name):
        raise ValueMistake(
            f"evaluate: name={name!r} given; expected a word of letters, digits, _ and -, and none "
            "of train, speed and valid."
        )


def check_metric(key: str, name: str, results: Mapping[str, float]) -> None:
    """Raises a ConfigError if valid() did not return the metric that a config key names, if any."""
    if name and name.removeprefix("valid/") not in results:
        raise ConfigError(
            f"{key}: {name!r} given; expected one of the metrics that valid() returned: "
            f"{', '.join(results) or 'nothing'}."
        )
