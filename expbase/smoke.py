"""`--smoke`: takes an experiment through a whole life in seconds, before a long run.

Setup, two updates, two batches of validation, a save, a load, and an export if there is an
input_spec; cli.py gives it a temporary directory. If no parameter has changed by then, because a
learning rate begins at 0 or a buffer is filled first, it makes up to 50 more updates. Of the config
only the intervals of logging, validating and saving are changed, so schedules are as long as they
will be. Training counts as finished, so what on_train_end does `if self.finished` is tried, too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from expbase.base.errors import RuntimeMistake
from expbase.base.terminal import show
from expbase.config import ConfigError, fill
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.mixins_in_front import users_class
from expbase.ranks import collectives
from expbase.state.sampled_elements import Samples

UPDATES = 2
MORE_UPDATES = 50  # at most, until a parameter has changed
VALIDATION_BATCHES = 2


class FirstChange:
    """Sees whether updates have changed a parameter, or at least should have.

    Args:
        optimizers: By name; one that is not derived from paddle's is not looked at.
    """

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        self._before = Samples(optimizers)
        self.has_come = not self._before.of
        self.rate = 0.0  # the greatest one before an update
        self.has_gradients = False  # whether a backward has reached a parameter
        self._hooks = [p.register_hook(self._note_backward) for p, _ in self._before.of]

    @property
    def is_missing(self) -> bool:
        """Whether a parameter should have changed, and none has."""
        return not self.has_come and self.has_gradients and self.rate > 0

    def _note_backward(self, gradient: Any) -> None:
        self.has_gradients = True

    def note_rates(self, rates: Iterable[float]) -> None:
        """Notes the learning rates of the update to come."""
        self.rate = max(self.rate, *rates)

    def look(self) -> None:
        """Looks, after an update, on all ranks."""
        has_come = self.has_come or self._before.have_changed()
        [self.has_come] = map(bool, collectives.max_over_ranks(has_come))

    def close(self) -> None:
        """Ends it."""
        while self._hooks:
            self._hooks.pop().remove()


class Smoke(ExperimentBase):
    """Goes in front of an experiment class, shortens its run, and says how it went."""

    is_trial = True  # listeners with every=100 act at the first time, too
    smoke_updates = 0
    smoke_seen: FirstChange | None = None
    smoke_is_trained = False
    smoke_did = ""

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        config = fill(config)
        # Of two iterations in a row one is even: wherever training begins, both happen.
        config.training.update(log_interval=1, save_interval=UPDATES)
        validates = users_class(type(self)).valid is not ExperimentBase.valid
        if validates:
            config.training.valid_interval = UPDATES
        super().__init__(config, args)
        self.smoke_did = "validated, saved and loaded" if validates else "saved and loaded"

    def check_setup(self) -> None:
        """Leaves out of the checkpoints what the trial itself notes."""
        self.exclude_from_state("smoke_seen")
        super().check_setup()

    def train_batch(self) -> None:
        """Makes an update, and asks for the end after a few."""
        if self.smoke_seen is None:
            self.smoke_seen = FirstChange(self.internals.state.optimizers())
        seen = self.smoke_seen
        seen.note_rates(self.internals.learning_rates().values())
        super().train_batch()
        self.smoke_updates += 1
        if self.smoke_updates < UPDATES:
            return
        seen.look()
        if seen.has_come or self.smoke_updates >= UPDATES + MORE_UPDATES:
            self.stop("--smoke, which needs no more updates", on_all_ranks=True)

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """Yields the first batches, and no others."""
        return itertools.islice(super().valid_batches(loader), VALIDATION_BATCHES)

    def train(self) -> None:
        """Trains, and notes that it went well."""
        try:
            super().train()
        finally:
            if self.smoke_seen is not None:
                self.smoke_seen.close()
        self.smoke_is_trained = True

    @on("on_train_end")
    def load_smoke_checkpoint(self) -> None:
        """Loads what training has saved; not after a failure, when this event comes, too.

        An experiment that has an input_spec is exported.
        """
        if self.smoke_is_trained:
            self.load_checkpoint("last")
            if getattr(self, "input_spec", None) is not None:
                self.export(self.output_dir / "export" / "model")
                self.smoke_did = self.smoke_did.replace(" and", ",") + " and exported"

    def run(self) -> None:
        """Runs, and says on rank 0 that it went well."""
        super().run()
        if not self.smoke_updates:
            raise ConfigError(f"--smoke: made no update; training ended at {self.iteration}.")
        seen = self.smoke_seen
        assert seen is not None  # since the first update
        # Also if early stopping has ended it before: without a step no metric becomes better.
        if seen.is_missing and self.end_reason.startswith("stopped"):
            raise RuntimeMistake(
                f"--smoke: in {self.smoke_updates} updates no parameter has changed, though there "
                f"were gradients, and a learning rate of {seen.rate:g}; expected "
                "self.step_optimizers() in train_batch, or optimizer.step() by hand."
            )
        if self.rank == 0:
            did = self.smoke_did if seen.has_come else f"no parameter changed, {self.smoke_did}"
            show(f"smoke test passed: {self.smoke_updates} updates, {did}")
