"""`--smoke`: takes an experiment through a whole life in seconds, before a long run.

Setup, two updates, two batches of validation, a save, a load, and an export if there is an
input_spec; cli.py gives it a temporary directory. Of the config only the intervals of logging,
validating and saving are changed, so schedules are as long as they will be. Training counts as
finished, so what on_train_end does `if self.finished` is tried, too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from expbase.base.terminal import show
from expbase.config import ConfigError, fill
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.mixins_in_front import users_class

UPDATES = 2
VALIDATION_BATCHES = 2


class Smoke(ExperimentBase):
    """Goes in front of an experiment class, shortens its run, and says how it went."""

    is_trial = True  # listeners with every=100 act at the first time, too
    smoke_updates = 0
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

    def train_batch(self) -> None:
        """Makes an update, and asks for the end after a few."""
        super().train_batch()
        self.smoke_updates += 1
        if self.smoke_updates == UPDATES:
            self.stop("--smoke, which needs no more updates", on_all_ranks=True)

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """Yields the first batches, and no others."""
        return itertools.islice(super().valid_batches(loader), VALIDATION_BATCHES)

    def train(self) -> None:
        """Trains, and notes that it went well."""
        super().train()
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
        if self.rank == 0:
            show(f"smoke test passed: {self.smoke_updates} updates, {self.smoke_did}")
