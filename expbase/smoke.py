"""`--smoke`: whether an experiment gets through a whole life, in seconds, before a long run.

Setup, two updates, a save, a load and two batches of validation, in a temporary directory that is
gone afterwards. The config holds but for training.log_interval, so schedules are as long as they
will be. Training counts as broken off: what on_train_end does `if self.finished` is not tried, and
whether a resumed run has the same bits is shown by `python -m expbase verify`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expbase.config import ConfigError, complete
from expbase.experiment import ExperimentBase
from expbase.meter import line

UPDATES, VALIDATION_BATCHES = 2, 2


class _Trial(ExperimentBase):
    """Goes before an experiment class, and ends its training early."""

    trial_updates = 0

    @property
    def finished(self) -> bool:
        """It is not: training was broken off."""
        return False

    def train_batch(self) -> None:
        """One update, and no more than a few."""
        super().train_batch()
        self.trial_updates += 1
        if self.trial_updates == UPDATES:
            self.stop("--smoke, which needs no more updates", on_all_ranks=True)

    def _train_with_events(self) -> None:
        self._evaluation.limit = VALIDATION_BATCHES
        super()._train_with_events()
        self.save()
        self.load_checkpoint("last")
        self._validate()


def smoke(experiment: type[ExperimentBase], config: Mapping[str, Any], args: Any) -> None:
    """Tries an experiment.

    Raises:
        ConfigError: There was nothing to train.
        BaseException: Whatever the experiment raised.
    """
    trial = type(experiment.__name__, (_Trial, experiment), {})
    config = complete(config)
    config.training.log_interval = 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="expbase-smoke-") as folder:
        output = Path(folder) / "run"
        exp = trial(config, argparse.Namespace(**{**vars(args), "output": str(output)}))
        exp.setup()
        exp.run()
        size = sum(path.stat().st_size for path in exp.checkpoint_dir.rglob("*") if path.is_file())
    if not exp.trial_updates:
        raise ConfigError(f"--smoke: made no update; training ended at {exp.iteration} already.")
    if exp.rank == 0:
        print(
            f"smoke test passed in {time.perf_counter() - began:.1f} s: "
            f"{exp.trial_updates} updates, {size / 1e6:.1f} MB saved and loaded, validated: "
            f"{line(exp.iteration, exp._results)}"
        )
