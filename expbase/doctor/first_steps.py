"""What the first step of an optimizer has left out, if it was made by hand.

A step by hand is right, and calls no hook. So a method at `on_before_optimizers_step` never acts,
the mixin GradientClipping clips nothing, and a GradScaler may have scaled the loss alone, or the
gradients. It is told after the first update in which a parameter has changed.

    first = FirstSteps(experiment, internals, gradients)
    first.watch(optimizers)                            # before the first update
    for text in first.look(): ...                      # after each of them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expbase.doctor.first_gradients import BY_EXPBASE, PLAIN, FirstGradients, StepTrace
from expbase.engine.internals import Internals
from expbase.events import CALLED_BY


class FirstSteps:
    """Waits for the first step of each optimizer.

    Args:
        experiment: Its class is asked who has written clip_gradients.
        internals: What can be read of its run.
        gradients: Has seen the backwards of the update.
    """

    def __init__(self, experiment: Any, internals: Internals, gradients: FirstGradients) -> None:
        self._experiment = experiment
        self._internals = internals
        self._gradients = gradients
        self._waits_for: list[tuple[str, StepTrace]] = []  # optimizers that have not stepped
        self._has_clipped = False
        self._unscaled: Any = None  # what the scaler's last unscaling left
        self.told: set[str] = set()  # events that were told not to have come
        self._leave = internals.listen("clip_gradients", self._note_clipping)

    def watch(self, optimizers: Mapping[str, Any]) -> None:
        """Begins to wait, before the first update."""
        self._waits_for = [(name, StepTrace(each)) for name, each in optimizers.items()]
        self._unscaled = _unscaled_by(self._internals.grad_scaler)

    @property
    def is_waiting(self) -> bool:
        """Whether there is an optimizer of which no step was seen."""
        return bool(self._waits_for)

    def close(self) -> None:
        """Ends it."""
        self._waits_for = []
        self._leave()

    def _note_clipping(self) -> None:
        self._has_clipped = True

    def look(self) -> Iterator[str]:
        """Yields what the step of the update has left out, after an update, once."""
        if not self._waits_for:
            return
        unscaled = _unscaled_by(self._internals.grad_scaler)
        has_unscaled, self._unscaled = unscaled is not self._unscaled, unscaled
        for one in [*self._waits_for]:
            name, trace = one
            if not trace.has_changed():
                continue
            self._waits_for.remove(one)
            left_out = [*self._left_out(name, has_unscaled=has_unscaled)]
            if left_out:
                missing, ways = zip(*left_out, strict=True)
                yield (
                    f"self.{name} has stepped, and {'; '.join(missing)}; expected "
                    f"{', and '.join(dict.fromkeys(ways))}."
                )
                self._waits_for = []
                break
        if not self._waits_for:
            self.close()

    def _left_out(self, name: str, *, has_unscaled: bool) -> Iterator[tuple[str, str]]:
        """Yields what is missing, and what is expected instead."""
        step = "self.step_optimizers()"
        # What step_optimizers calls has come by now, if it was that.
        for event in self._internals.waiting:
            self.told.add(event)
            way = BY_EXPBASE if CALLED_BY[event] == "backward" else step
            yield f"{event}, at which the experiment acts, has not come", way
        if not self._has_clipped and _has_our_clipping(self._experiment):
            way = f"{step}, or self.clip_gradients(self.{name}) before the step"
            yield "GradientClipping has clipped nothing", way
        scaler = self._internals.grad_scaler
        if scaler is None or not scaler.is_enable():
            return
        backwards = self._gradients.backwards
        if BY_EXPBASE in backwards and not has_unscaled:
            yield "its gradients are still multiplied by the GradScaler's scale", step
        if PLAIN in backwards and has_unscaled:
            missing = "its gradients were divided by the GradScaler's scale, and the loss was not "
            yield f"{missing}multiplied by it", BY_EXPBASE


def _unscaled_by(scaler: Any) -> Any:
    """Returns what another unscaling will replace (AmpScaler._unscale); None without a scaler."""
    return getattr(scaler, "_found_inf", None)


def _has_our_clipping(experiment: Any) -> bool:
    """Returns whether a mixin of expbase clips the gradients, and nobody has overridden it."""
    method = getattr(type(experiment), "clip_gradients", None)
    module = getattr(method, "__module__", None)
    return str(module).startswith("expbase.")
