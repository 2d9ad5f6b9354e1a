"""The validations and other evaluations of a start: what was made at which iteration, and came out.

results = Results(experiment, start, evaluation=…, …)
results.validate(iteration)                       # what is due: the user's evaluate()
results.evaluate(loader, name, iteration, epoch, is_point=True)   # what that calls
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from expbase.base.errors import TypeMistake
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.engine.evaluation import Evaluation, check_group, check_metric
from expbase.engine.leave_validation import ValidationExit
from expbase.engine.report import Report
from expbase.engine.start import Start
from expbase.engine.stop import StopRequests
from expbase.engine.subscribers import Subscribers
from expbase.ranks import collectives
from expbase.record.meter import means_over


class Results:
    """The evaluations of one start.

    Args:
        experiment: Its `evaluate` and `valid` are called, as a user may have overridden them.
    """

    under_way = -1  # the iteration of a validation that has begun, and not ended
    _noted_at = -1  # the iteration of the last validation whose results were noted

    def __init__(
        self,
        experiment: Any,
        start: Start,
        *,
        events: Subscribers,
        evaluation: Evaluation,
        report: Report,
        checkpointer: Checkpointer,
        stop: StopRequests,
    ) -> None:
        self._last: dict[str, float] = {}  # of the last validation
        # The last iteration, by the word, "valid" or "test", and the checkpoint of the weights.
        self._recorded_at: dict[tuple[str, str], int] = {}
        self._experiment = experiment
        self._start = start
        self._events = events
        self._evaluation = evaluation
        self._report = report
        self._checkpointer = checkpointer
        self._stop = stop

    @property
    def has_validated(self) -> bool:
        """Whether there was a validation of what is trained in this start."""
        return ("valid", "") in self._recorded_at

    def need_training(self) -> None:
        """Raises a RuntimeError if a training batch is asked for in an evaluation."""
        self._evaluation.need_training()

    def is_recorded(self, iteration: int, name: str = "valid", inspected: str = "") -> bool:
        """Returns whether an evaluation of this name was made after an iteration."""
        return self._recorded_at.get((name, inspected), -1) == iteration

    def validate(self, iteration: int) -> None:
        """Makes the validation of an iteration; a stop may leave it."""
        self.under_way = iteration
        # An evaluate() of the user's may not call super's, so the phase begins here.
        with (
            self._evaluation.begin("valid", iteration),
            self._evaluation.may_be_left_by(ValidationExit(self._stop)),
        ):
            self._last = dict(self._experiment.evaluate() or {})
        self.under_way = -1
        self._recorded_at["valid", ""] = iteration

    def note(self, iteration: int, epoch: int) -> bool:
        """Notes the results of an iteration's validation, if there was one; once.

        Returns:
            Whether the copy from before it is written, since it is among the best.
        """
        if not self.is_recorded(iteration) or self._noted_at >= iteration:
            return False
        self._noted_at = iteration
        check_metric("training.monitor", self._start.training.monitor, self._last)
        return self._checkpointer.note_validation(iteration, epoch, self._last)

    def evaluate(
        self, loader: Any, name: str, iteration: int, epoch: int, *, is_point: bool
    ) -> dict[str, float]:
        """Returns the results of an evaluation, and records them; see ExperimentBase.

        Args:
            loader: What is read; None: the validation's.
            name: The word for it, if one was given.
            iteration: Where training is.
            epoch: The same.
            is_point: Whether the weights are those after an update, so that a curve has the point.
        """
        experiment = self._experiment
        evaluation = self._evaluation
        if not self._start.has_valid:
            raise TypeMistake(
                f"evaluate: calls valid, and {type(experiment).__name__} has none; expected "
                "`def valid(self):` with `for batch in self.valid_batches(): self.log(…)`."
            )
        name = self._name_of(loader, name)
        collectives.barrier("self.evaluate()")
        with evaluation.begin("valid", iteration, loader):
            results = evaluation.validate(
                experiment.valid, lambda: int(experiment.visualizer.num_scalars), iteration
            )
            self._events.fire("on_evaluate_end", results)
            if "on_evaluate_end" in self._events.subscribed:
                results |= evaluation.logged_since()
        inspected = self._checkpointer.inspected
        # Of weights that were loaded the curve of those that are trained has no point.
        is_point = is_point and not (name == "valid" and inspected)
        if name and is_point and not self.is_recorded(iteration, name, inspected):
            self._recorded_at[name, inspected] = iteration
            self._last = results if name == "valid" else self._last
            self._report.evaluation(name, iteration, epoch, results, checkpoint=inspected)
        else:
            # Which data: self.test_loader that was never set is None, and means the validation's.
            has_data = loader is not None or experiment.valid_loader is not None
            data = self._data_of(loader) if has_data else ""
            what = ["evaluated", inspected, data and f"on self.{data}_loader"]
            if loader is None and experiment.test_loader is None and not self._start.read_only:
                what.append("(no loader was given, and self.test_loader is not set)")
            self._report.means(iteration, f"{' '.join(filter(None, what))}: ", results)
        return results

    def _name_of(self, loader: Any, name: str) -> str:
        """Returns the word under which results are recorded; empty: nobody gave them one."""
        if name:
            check_group(name)
            return name
        return self._data_of(loader)

    def _data_of(self, loader: Any) -> str:
        """Returns which of the experiment's data a loader has, a word; empty: none of it."""
        if loader is None:
            return "valid"
        if loader is self._experiment.test_loader:
            return "test"
        return "valid" if loader is self._experiment.valid_loader else ""

    @contextlib.contextmanager
    def predicting(self, iteration: int) -> Iterator[None]:
        """Makes the block a phase "predict"; what is logged in it goes into the text log."""
        with self._evaluation.begin("predict", iteration):
            yield
            self._report.means(iteration, "", means_over([self._evaluation.logged.take()]))
