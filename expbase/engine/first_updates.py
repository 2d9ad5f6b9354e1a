"""What the first updates of a start did: has a parameter changed, was a loss logged?

Early, nothing is certain: a learning rate may begin at 0, a GradScaler may skip, gradients may wait
for more batches, a replay buffer may be filled first. So there is one look, after many updates or
after the last one; at schedules also after an epoch, by which many are stepped. Of a parameter a
few elements are compared: an optimizer leaves no other trace (not in `inplace_version`).

    first = FirstUpdates(optimizers)
    for text in first.look(has_logged=True): ...
    for text in first.look_at_schedules(has_validated=True): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paddle.optimizer.lr import LRScheduler, ReduceOnPlateau

from expbase.base.arrays import is_piece
from expbase.events import heard_by, own_classes
from expbase.state.optimizers import innermost
from expbase.state.parts import parameters_of

LOOK_AFTER = 1000  # updates
READS_NOTHING = (
    "train_batch did not call self.read_batch(): the data it takes is not in the order of the "
    "seed, is not continued after a stop, and ends no epoch."
)
_PARTS = 4  # parameters of an optimizer that are looked at often
# What an experiment writes that steps a schedule by epochs, or by validations.
_RARE = {"on_train_epoch_begin", "on_train_epoch_end", "on_evaluate_begin", "on_evaluate_end"}
_RARE |= {"new_epoch", "train", "evaluate"}
_ELEMENTS = 64  # of a tensor that are compared, at least


class FirstUpdates:
    """Compares the parameters of optimizers with what they were at the beginning of a start."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        parameters = [p for optimizer in optimizers.values() for p in parameters_of(optimizer)]
        # Running statistics, which change in the forward, are frozen parameters.
        trained = [p for p in parameters if p._is_initialized() and not p.stop_gradient]
        self._before = [(parameter, sample(parameter)) for parameter in trained]
        rates = {name: innermost(o)._learning_rate for name, o in optimizers.items()}
        # That nobody has stepped, as far as was looked: by their optimizers, and where each stands.
        schedules = {n: r for n, r in rates.items() if isinstance(r, LRScheduler)}
        self.schedules = {name: (rate, _place(rate)) for name, rate in schedules.items()}
        self._traces = {name: Trace(optimizers[name]) for name in self.schedules}

    def has_changed(self) -> bool:
        """Returns whether any parameter is another one than at the beginning."""
        return any(is_other(sample(p), before) for p, before in self._before)

    def look(self, *, has_logged: bool) -> Iterator[str]:
        """Yields each thing that is missing: how it goes on after "in 1000 updates"."""
        if self._before and not self.has_changed():  # an optimizer of no base has none
            yield (
                "no parameter has changed; expected loss.backward() and optimizer.step() in "
                "train_batch, with a learning rate above 0."
            )
        if not has_logged:
            yield (
                "nothing was logged, so a loss that is not finite is not noticed; expected "
                "self.log(loss=loss) in train_batch."
            )

    def look_at_schedules(self, *, has_validated: bool) -> Iterator[str]:
        """Yields which schedule nobody has stepped, once: how it goes on after "in 20 updates"."""
        schedules, self.schedules = self.schedules, {}
        for name, (schedule, before) in schedules.items():
            kind = type(schedule).__name__
            if isinstance(schedule, ReduceOnPlateau) and not has_validated:
                self.schedules[name] = schedule, before
            elif _place(schedule) == before and self._traces[name].has_changed():
                yield (
                    f"nobody has stepped the {kind} of self.{name}: its learning rate is still "
                    f"{schedule.last_lr!s:.10}; expected its step() after each update, or at each "
                    "epoch's end."
                )


class Trace:
    """What a step of an optimizer leaves: some parameters are others, and their accumulators.

    With a learning rate of 0 it is accumulators alone.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any] = ()) -> None:
        self._optimizer = optimizer
        self._parameters = parameters or some_parameters(optimizer)
        self._before = self._samples()

    def has_changed(self) -> bool:
        """Returns whether the optimizer has stepped since this was made."""
        now = self._samples()
        return len(now) != len(self._before) or any(map(is_other, now, self._before))

    def _samples(self) -> list[Any]:
        by_name = getattr(innermost(self._optimizer), "_accumulators", {}).values()
        found = [tensors.get(p.name) for tensors in by_name for p in self._parameters]
        return [sample(t) for t in (*self._parameters, *found) if t is not None]


def some_parameters(optimizer: Any) -> list[Any]:
    """Returns the first and the last trained parameter of an optimizer, and some between."""
    given = [p for p in parameters_of(optimizer) if p._is_initialized() and not p.stop_gradient]
    whole = [p for p in given if not is_piece(p)]
    numbers = {(len(whole) - 1) * part // (_PARTS - 1) for part in range(_PARTS) if whole}
    return [whole[number] for number in sorted(numbers)]


def steps_by_epochs(experiment: type) -> bool:
    """Returns whether something of a user's class may step a schedule more rarely than updates."""
    return bool(_RARE & heard_by(experiment).union(*map(vars, own_classes(experiment))))


def _place(schedule: Any) -> tuple[Any, Any]:
    return schedule.last_epoch, schedule.last_lr


def sample(tensor: Any) -> Any:
    """Returns a copy of some elements, from all over it."""
    step = max(1, int(tensor.size) // _ELEMENTS)
    return tensor.detach().flatten()[::step].clone()


def is_other(one: Any, other: Any) -> bool:
    """Returns whether a sample of a tensor is not what another one is, or a number."""
    return bool((one != other).any())
