"""Behaviour to mix into an experiment: early stopping, an average of the weights, clipping.

Each is a class of its own, to be named before ExperimentBase, in any order. It adds a section to
`default_config`, keeps its state in the checkpoint, and acts through listeners and through methods
that call `super()`; an experiment that overrides one of these calls `super()`, too:
`default_config`, `check_setup`, `evaluate`, `predict`, `export`.

    class Experiment(EarlyStopping, GradientClipping, ExperimentBase): ...
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle

from expbase import state
from expbase.config import Config, ConfigError
from expbase.events import on
from expbase.experiment import ExperimentBase


class EarlyStopping(ExperimentBase):
    """Ends training when a metric of valid() has not become better for a while.

    The decision is the same on all ranks, and it stays: a run that was stopped early does not
    train on when it is started again. `early_stopping.patience: 0` switches it off.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.early_stopping = Config(
            {
                "patience": 3,  # validations in a row without a better value; 0: never stop
                "min_delta": 0.0,  # by which a value must be better to count
                "metric": "",  # of valid(); "": training.monitor
                "mode": "",  # "max" or "min"; "": training.monitor_mode
            }
        )
        return config

    def check_setup(self) -> None:
        own, training = self.config.early_stopping, self.config.training
        self._metric = (own.metric or training.monitor).removeprefix("valid/")
        mode = own.mode or training.monitor_mode
        if own.patience and (not self._metric or mode not in ("max", "min")):
            raise ConfigError(
                f"early_stopping: metric {self._metric!r} and mode {mode!r} given; expected the "
                "name of a metric of valid(), here or as training.monitor, and max or min."
            )
        self._sign = 1 if mode == "max" else -1
        self.best_value: float | None = None
        self.failures = self.judged_at = 0  # validations since the best one; the last one
        self.register_stateful("best_value", "failures", "judged_at")
        super().check_setup()

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        results = super().evaluate(loader)
        if loader is None and self.iteration > self.judged_at:
            self.judged_at = self.iteration
            self._judge(results)
            self.stop_when_exhausted()
        return results

    def _judge(self, results: dict[str, float]) -> None:
        if self.config.early_stopping.patience and self._metric not in results:
            raise ConfigError(
                f"early_stopping.metric: {self._metric!r} given; expected one of the metrics that "
                f"valid() returned: {', '.join(results) or 'nothing'}."
            )
        value, best = results.get(self._metric, math.nan), self.best_value
        least = self.config.early_stopping.min_delta
        better = best is None or (value - best) * self._sign > least
        if better and not math.isnan(value):
            self.best_value, self.failures = value, 0
        else:
            self.failures += 1

    @on("on_train_begin")  # it may have been before this start
    def stop_when_exhausted(self) -> None:
        """Stops if the metric did not become better for too long."""
        if 0 < self.config.early_stopping.patience <= self.failures:
            self.stop(
                f"early stopping: {self._metric} was {self.best_value} at best, and not better in "
                f"the last {self.failures} validations"
            )


class _Averages:
    """Averages of a layer's trained weights; a stateful object, so the checkpoint holds them."""

    def __init__(self, layer: Any) -> None:
        self._weights = {n: p for n, p in layer.named_parameters() if not p.stop_gradient}
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def update(self, decay: float) -> None:
        with paddle.no_grad():
            for name, weight in self._weights.items():
                average = self._averages[name]
                average.scale_(decay)
                average.add_(weight.detach() * (1 - decay))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Has the layer hold the averages; it gets its weights back, bit for bit."""
        weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        try:
            self._set(self._averages)
            yield
        finally:
            self._set(weights)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, weight in self._weights.items():
            weight.set_value(values[name])

    def state_dict(self) -> dict[str, Any]:
        return self._averages

    def set_state_dict(self, averages: Mapping[str, Any]) -> None:
        if averages.keys() != self._averages.keys():
            raise ValueError(
                f"averages: {sorted(averages)} given; expected {sorted(self._averages)}."
            )
        self._averages = dict(averages)


class ExponentialMovingAverage(ExperimentBase):
    """Averages the trained weights of self.model, and evaluates, predicts and exports with them.

    After each update average = decay * average + (1 - decay) * weight. Training itself goes on with
    the weights as they are; they come back, bit for bit, after each evaluation. Running statistics
    (batch norm) are the model's own.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.ema = Config({"decay": 0.999})  # the part of the old average that stays, 0 to 1
        return config

    def check_setup(self) -> None:
        if not 0 <= self.config.ema.decay < 1:
            raise ConfigError(f"ema.decay: {self.config.ema.decay!r} given; expected 0 to 1.")
        self.averages = _Averages(self.unwrap(self.model))
        super().check_setup()

    @on("on_train_batch_end")
    def update_averages(self) -> None:
        """Takes the new weights into the average."""
        self.averages.update(self.config.ema.decay)

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        with self.averages.applied():
            return super().evaluate(loader)

    def predict(self, loader: Any) -> list[Any]:
        with self.averages.applied():
            return super().predict(loader)

    def export(
        self, path: str | Path, input_spec: Sequence[Any] | None = None, layer: Any = None
    ) -> None:
        with self.averages.applied():
            super().export(path, input_spec, layer)


class GradientClipping(ExperimentBase):
    """Scales gradients down to a greatest norm in step_optimizers, and logs the norm before.

    The norm is taken over all parameters that step together. In a step that is written by hand
    call `self.clip_gradients(optimizer)` between backward and step.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.clipping = Config({"max_norm": 1.0})  # of all gradients together; 0: only logged
        return config

    @on("on_before_optimizers_step")
    def clip_gradients_of_step(self) -> None:
        """Clips what is about to step."""
        self.clip_gradients(*self.stepping)

    def clip_gradients(self, *optimizers: Any) -> None:
        """Clips the gradients of the optimizers' parameters, and logs their norm."""
        parameters = {id(p): p for o in optimizers for p in state.parameters_of(o)}
        gradients = [p.grad_ for p in parameters.values() if p.grad_ is not None]
        if any(gradient.is_selected_rows() for gradient in gradients):
            raise ValueError(
                "clip_gradients: an Embedding with sparse=True gave its gradient; expected dense "
                "ones."
            )
        if not gradients:
            return
        # In float32: paddle.nn.utils.clip_grad_norm_ fails where types are mixed, as in amp O2.
        with paddle.no_grad():
            squares = [paddle.square(gradient.astype("float32")).sum() for gradient in gradients]
            norm = paddle.add_n(squares).sqrt()
            if max_norm := self.config.clipping.max_norm:
                factor = max_norm / norm.clip(min=max_norm)  # at most 1; asks no device
                for gradient in gradients:
                    gradient.multiply_(factor.astype(gradient.dtype))
        self.log(grad_norm=norm)
