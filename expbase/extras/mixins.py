"""Behaviour to mix into an experiment: early stopping, averaged weights, gradient clipping.

    class Experiment(EarlyStopping, GradientClipping, ExperimentBase): ...

Each mixin is a class to name before ExperimentBase, in any order. An experiment that overrides one
of these methods calls `super()`, too: `default_config`, `check_setup`, `evaluate`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from expbase.base.errors import ValueMistake
from expbase.checkpoint.best import criterion, merit
from expbase.config import Config, ConfigError
from expbase.engine.evaluation import check_monitor
from expbase.engine.run_states import Life
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.state.parts import parameters_of, running_statistics

_HALVES = (paddle.float16, paddle.bfloat16)
_AVERAGED = (*_HALVES, paddle.float32, paddle.float64, paddle.complex64, paddle.complex128)


class EarlyStopping(ExperimentBase):
    """Ends training when the metric `training.monitor` has not become better for a while.

    It counts the validations after updates, on `self.valid_loader`. Better is what is better for
    the best checkpoint, by `training.monitor_mode`, and by more than `early_stopping.min_delta`;
    nan and infinite values never are. After `early_stopping.patience` in a row that are not better
    all ranks stop at the same iteration; 0 switches it off. A run that was stopped early stays
    stopped: started again, it does not train on. With another metric or mode it counts anew.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.early_stopping = {
            "patience": 3,  # validations in a row without a better value; 0: never stop
            "min_delta": 0.0,  # by which a value must be better to count
        }
        return config

    def check_setup(self) -> None:
        if self.config.early_stopping.patience and not self.config.training.monitor:
            raise ConfigError(
                "training.monitor: not given; expected the metric of valid() that early_stopping "
                "watches."
            )
        # The metric and mode, the best value, the number of validations since that were not better,
        # and the iteration of the last validation that was counted.
        self.early_stopping: dict[str, Any] = {
            "monitor": "", "best": None, "failures": 0, "iteration": 0,
        }  # fmt: skip
        super().check_setup()

    def evaluate(self, loader: Any = None, **options: Any) -> dict[str, float]:
        results = super().evaluate(loader, **options)
        # Other data does not count, and neither does an iteration that was judged before: valid()
        # may be called by hand, or again after a resume, or before the first update.
        is_own = loader is None or loader is self.valid_loader
        is_own = is_own and options.get("name", "") in ("", "valid")
        is_new = self.iteration > self.early_stopping["iteration"]
        if (
            self.config.early_stopping.patience
            and self.internals.life is Life.TRAINING
            and is_own
            and is_new
        ):
            monitor = self.config.training.monitor
            check_monitor(monitor, results)
            value = results[monitor.removeprefix("valid/")]
            self.begin_count()
            self.early_stopping["iteration"] = self.iteration
            if self.is_better(value):
                self.early_stopping |= {"best": value, "failures": 0}
            else:
                self.early_stopping["failures"] += 1
            self.stop_when_exhausted()
        return results

    def is_better(self, value: float) -> bool:
        """Compares a value with the best one so far.

        Args:
            value: Of the metric `training.monitor`.

        Returns:
            Whether it is better by more than `early_stopping.min_delta`; never if it is not finite.
        """
        mode = self.config.training.monitor_mode
        best = self.early_stopping["best"]
        if best is None:
            return not math.isnan(merit(value, mode))
        gain = merit(value, mode) - merit(best, mode)
        return bool(gain > self.config.early_stopping.min_delta)

    def begin_count(self) -> None:
        """Begins to count; anew, with a line, if it was by another metric or another mode."""
        state = self.early_stopping
        before, now = state.get("monitor"), criterion(self.config.training)
        if before == now:
            return
        if state["iteration"]:
            self.logger.info(
                f"[{self.iteration}] early stopping: counts anew, by {now!r}; until iteration "
                f"{state['iteration']} it was by {before!r}"
            )
        state |= {"monitor": now, "best": None, "failures": 0}

    @on("on_train_begin")  # patience may have run out before this start
    def stop_when_exhausted(self) -> None:
        """Stops if the metric has not become better for too long."""
        best = self.early_stopping["best"]
        failures = self.early_stopping["failures"]
        is_same = self.early_stopping.get("monitor") == criterion(self.config.training)
        if is_same and 0 < self.config.early_stopping.patience <= failures:
            reached = "never finite" if best is None else f"{best:.6g} at best"
            self.stop(
                f"early stopping: {self.config.training.monitor} was {reached}, and not better in "
                f"the last {failures} validations (to train on: --force "
                f"early_stopping.patience={2 * failures}, or 0: never stop)",
                on_all_ranks=True,
            )


class WeightAverages:
    """Moving averages of all weights of a layer; the checkpoint holds them.

    Frozen weights are averaged, too: they may be thawed later. Running statistics (batch norm) and
    quantized weights are not averaged: they are the layer's own.
    """

    def __init__(self, layer: Any) -> None:
        parts = layer.sublayers(include_self=True)
        running = {id(p) for part in parts for p in running_statistics(part).values()}
        self._weights = {
            name: parameter
            for name, parameter in layer.named_parameters()
            if id(parameter) not in running and parameter.dtype in _AVERAGED
        }
        self.updates = 0  # how often the averages were updated
        self._warms_up = True  # not of a run that 1.0 has begun: it goes on to the same bits
        self.begin()

    def begin(self) -> None:
        """Starts from the present weights."""
        # At least float32: in float16 the small change of one update would be rounded away.
        with paddle.no_grad():  # a copy in any case: astype to the same type would share the memory
            self._averages = {
                name: weight.astype("float32") if weight.dtype in _HALVES else weight.clone()
                for name, weight in self._weights.items()
            }

    def update(self, decay: float) -> None:
        """Moves the averages towards the present weights.

        Args:
            decay: The share of the old averages that stays, from 0 to 1; less at first.

        Source:
            The warm-up: TensorFlow's tf.train.ExponentialMovingAverage, `num_updates`.
        """
        self.updates += 1
        if self._warms_up:  # else the first weights, which are random, would weigh for long
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        with paddle.no_grad():
            for name, average in self._averages.items():
                weight = self._weights[name].detach().astype(average.dtype)
                # In this form the average of a weight that does not move has that weight's bits.
                average.add_((weight - average) * (1 - decay))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the averages into the layer for a block.

        Yields:
            Nothing; afterwards the weights are restored, bit for bit.
        """
        if not self.updates:  # weights that were loaded since are newer than the averages
            yield
            return
        weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        try:
            self._set_weights(self._averages)
            yield
        finally:
            self._set_weights(weights)

    def _set_weights(self, values: Mapping[str, Any]) -> None:
        for name, weight in self._weights.items():
            weight.set_value(values[name].astype(weight.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Gives what a checkpoint holds.

        Returns:
            The averages, how often they were updated, and that they warm up, unless 1.0 began them.
        """
        state = {"updates": self.updates, "averages": self._averages}
        return state | ({"warms_up": True} if self._warms_up else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores the averages.

        Args:
            state: What `state_dict` returned.

        Returns:
            What could not be put back as it was: nothing.
        """
        self.updates = state["updates"]
        self._warms_up = state.get("warms_up", False)
        self._averages = dict(state["averages"])
        return []


class ExponentialMovingAverage(ExperimentBase):
    """Averages the weights of self.model, and evaluates, predicts and exports with the averages.

    After each update average = decay * average + (1 - decay) * weight: a mean over about
    1 / (1 - decay) updates. It warms up: of n updates so far decay is
    min(`ema.decay`, (1 + n) / (10 + n)), so that the first weights do not weigh for long; 0.999 is
    reached at update 8990. Training itself goes on with the weights as they are; they
    are restored, bit for bit, after each evaluation, and `save_model` writes them. All weights
    are averaged, also while they are frozen, so memory and checkpoints have each of them twice.
    Running statistics (batch norm) are not averaged: they are the model's own.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.ema = Config(
            {"decay": 0.999}
        )  # the share of the old average that stays, 0 to 1; less at first
        return config

    def check_setup(self) -> None:
        if not 0 <= self.config.ema.decay < 1:
            raise ConfigError(f"ema.decay: {self.config.ema.decay!r} given; expected 0 to 1.")
        if self.model is None:
            raise ValueMistake("ema: expected the layer to average as self.model.")
        self.weight_averages = WeightAverages(self.unwrap(self.model))
        self.internals.surround_phases(lambda: self.weight_averages.applied())
        super().check_setup()

    @on("on_train_begin")
    def begin_averages(self) -> None:
        """Starts from the weights that training starts from: they may have been loaded."""
        if not self.weight_averages.updates:
            self.weight_averages.begin()

    @on("on_train_batch_end")
    def update_averages(self) -> None:
        """Takes the new weights into the averages."""
        self.weight_averages.update(self.config.ema.decay)


class GradientClipping(ExperimentBase):
    """Scales gradients down to a greatest norm in step_optimizers, and logs the norm before.

    The norm is taken over all parameters that step together, each once; `clipping.max_norm` is the
    greatest one, and `train/grad_norm` what it was. In a step that is written by hand call
    `self.clip_gradients(optimizer)` between backward and step, and once for all that share a
    parameter.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.clipping = Config({"max_norm": 1.0})  # for all gradients together; 0: only logged
        return config

    def check_setup(self) -> None:
        max_norm = self.config.clipping.max_norm
        if not 0 <= max_norm < math.inf:
            raise ConfigError(f"clipping.max_norm: {max_norm!r} given; expected 0 or more.")
        super().check_setup()

    @on("on_before_optimizers_step")
    def clip_gradients(self, *optimizers: Any) -> None:
        """Clips the gradients of optimizers, and logs their norm.

        Args:
            optimizers: By default those that step_optimizers steps now.

        Raises:
            ValueError: A gradient is sparse.
        """
        self.internals.fire("clip_gradients")  # for guests
        stepping = optimizers or self.internals.stepping
        # By identity: several optimizers may have a parameter, or one has it twice.
        parameters = {id(p): p for each in stepping for p in parameters_of(each)}
        gradients = [p.grad_ for p in parameters.values() if p.grad_ is not None]
        if any(gradient.is_selected_rows() for gradient in gradients):
            raise ValueMistake(
                "clip_gradients: an Embedding with sparse=True; expected dense gradients."
            )
        if not gradients:
            return
        # In float32: paddle/nn/utils/clip_grad_norm_.py, clip_grad_norm_, fails where types are
        # mixed, as in amp O2.
        with paddle.no_grad():
            squares = [paddle.square(gradient.astype("float32")).sum() for gradient in gradients]
            norm = paddle.add_n(squares).sqrt()
            if max_norm := self.config.clipping.max_norm:
                factor = max_norm / norm.clip(min=max_norm)  # at most 1; no wait for the device
                for gradient in gradients:
                    gradient.multiply_(factor.astype(gradient.dtype))
        if self.internals.grad_scaler is None:
            self.log(grad_norm=norm)
        else:  # an overflow is normal, and its step is left out: not worth an error
            self.internals.log_finite(grad_norm=norm)
