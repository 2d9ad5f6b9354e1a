"""What an experiment writes down while it trains: for each event a line, a record, points.

One event goes to three places: a line of text into the log, a line of JSON into metrics.jsonl, a
point on each curve of VisualDL. Knows an experiment and is a part of it; files and formats are in
logs.py and visualizer.py.

    journal.meter.add(iteration, {"loss": loss})
    journal.log()                                  # at log_interval
    journal.write({"valid/accuracy": 0.98})        # now
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from expbase.config import flatten
from expbase.logs import Meter, MetricsFile, line
from expbase.state import objects

if TYPE_CHECKING:
    from expbase.experiment import ExperimentBase


class NonFiniteError(FloatingPointError):
    """A logged training scalar was not a finite number."""


class Journal:
    """The journal of one experiment.

    Args:
        experiment: Whose.

    Attributes:
        meter: What `log` was given in training since the last line.
        file: metrics.jsonl; of no path on the ranks that write none.
        sizes: Of metrics.jsonl and of VisualDL's file in bytes, at the checkpoint that came back.
        has_hparams: Whether VisualDL's file has its row for the table of runs.
        last: What the last line of training said.
    """

    def __init__(self, experiment: ExperimentBase) -> None:
        self._exp = experiment
        self.meter = Meter()
        self.file = MetricsFile(None)
        self.sizes = (0, 0)
        self.has_hparams = False
        self.last: dict[str, float] = {}

    def log(self) -> None:
        """The means of what was logged since the last line, rates and speeds: one event.

        Raises:
            NonFiniteError: One is not finite, and training.nonfinite is "error".
        """
        exp = self._exp
        self.check_finite()  # waits for the device: that is training's time
        feed = exp._cursor.adapter
        samples = feed.batch_size and feed.batch_size * exp.world_size
        speed = exp._watch.speed(exp.iteration, samples)
        with exp._watch.apart("logging"):
            if (left := self.seconds_left()) is not None:
                speed["seconds_left"] = left
            metrics = {f"train/{name}": mean for name, mean in self.meter.means().items()}
            metrics |= self.learning_rates() | {f"speed/{name}": n for name, n in speed.items()}
            exp._fire("on_log", metrics)
            self.last = metrics
            self.write(metrics, is_routine=True)
            if not exp._is_wanted("valid"):
                self.compare([name for name in metrics if name.startswith("train/")])

    def write(self, metrics: Mapping[str, float], *, is_routine: bool = False) -> None:
        """One event.

        Args:
            metrics: Numbers by full name, `train/loss`.
            is_routine: Whether the progress line of a terminal shows it anyway.
        """
        exp = self._exp
        text = line(exp.iteration, {**metrics, "epoch": exp.epoch})
        exp.logger.info("%s", text, extra={"is_routine": is_routine})
        self.file.write(exp.iteration, exp.epoch, metrics)
        for tag, value in metrics.items():
            exp.visualizer.add_scalar(_on_board(tag), value, exp.iteration)

    def compare(self, names: Sequence[str]) -> None:
        """Has the board's table of runs show the config against these metrics; once in a run."""
        if names and not self.has_hparams:
            self.has_hparams = True
            self._exp.visualizer.add_hparams(flatten(self._exp.config), names)

    def cut(self, *, to_own: bool) -> None:
        """Takes away what this run wrote after the checkpoint that came back.

        Args:
            to_own: Whether it is one of this run; else everything goes.
        """
        metrics_bytes, visualdl_bytes = self.sizes if to_own else (0, 0)
        self.has_hparams = self.has_hparams and to_own
        if self._exp.rank == 0:
            self.file.cut(metrics_bytes)
            self._exp.visualizer.cut(visualdl_bytes)

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self.file.close()
        self._exp.visualizer.close()

    def learning_rates(self) -> dict[str, float]:
        """Of each optimizer on the experiment, by the name of its curve."""
        optimizers = objects.find(self._exp._user_attributes()).optimizers  # excluded ones, too
        rates = {f"train/lr/{name}": float(o.get_lr()) for name, o in optimizers.items()}
        return rates if len(rates) > 1 else {"train/lr": rate for rate in rates.values()}

    def seconds_left(self) -> float | None:
        """Until the end that the config asks for; None if nobody knows."""
        exp = self._exp
        training, per_pass = exp.config.training, exp.batches_per_epoch
        left = self.iterations_left()
        if left is None:
            return None
        coming = {}
        for name, key in (("validation", "valid"), ("saving", "save"), ("logging", "log")):
            interval = training[f"{key}_interval"]
            passes = training.get(f"{key}_every_epoch", 0)
            coming[name] = left // interval if interval else 0
            if passes and per_pass:
                coming[name] += left * training.accumulation_steps // (per_pass * passes)
        return exp._watch.seconds_left(exp.iteration, left, coming)

    def iterations_left(self) -> int | None:
        """Until the end that the config asks for; None if nobody knows."""
        training, per_pass = self._exp.config.training, self._exp.batches_per_epoch
        limits = [training.max_iteration] if training.max_iteration else []
        if training.max_epoch and per_pass:
            limits.append(training.max_epoch * per_pass // training.accumulation_steps)
        return max(min(limits) - self._exp.iteration, 0) if limits else None

    def check_finite(self) -> None:
        """Acts on a logged training scalar that is not finite, before a line or a checkpoint.

        Raises:
            NonFiniteError: There is one, and training.nonfinite is "error".
        """
        exp = self._exp
        policy = exp.config.training.nonfinite
        bad = self.meter.nonfinite() if policy != "ignore" else ""
        if bad and policy == "warn":
            exp.logger.warning("[%d] not finite: %s", exp.iteration, bad)
        elif bad:
            exp._checkpointer.close()  # one may still be under way
            newest = exp._checkpointer.newest_saved
            raise NonFiniteError(
                f"not finite: {bad}. No checkpoint holds it; the last good one is "
                f"{newest.name if newest else 'none yet'}. Lower the learning rate or "
                "clip gradients; with training.nonfinite=warn the run goes on."
            )


def _on_board(tag: str) -> str:
    # VisualDL sorts the groups of curves by name and opens the first: train, and not speed.
    return tag.replace("speed/", "wall_clock/", 1) if tag.startswith("speed/") else tag
