"""One validation: what valid() returns, the same on all ranks, and where it is noted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from expbase.engine import checks
from expbase.engine.loop import Step
from expbase.engine.run import Run
from expbase.ranks import alike, collectives


def evaluate(run: Run, loader: Any) -> dict[str, float]:
    """What valid() returns on rank 0; noted if it is the validation of an iteration."""
    run.life.need_setup("evaluate")
    loop = run.loop
    evaluation = run.evaluation
    with evaluation.begin("valid", run.iteration, loader):
        run.events.fire("on_evaluate_begin")
        results = _results_of_valid(run)
        run.events.fire("on_evaluate_end", results)
        is_other = loader is not None and loader is not run.experiment.valid_loader
        if is_other and not evaluation.loops_begun:
            run.warn(
                "valid: did not call self.valid_batches(); these are numbers of the loader "
                "that evaluate() was given only if valid() read self.evaluated_loader."
            )
        # Within an iteration its update is not done, so its weights are not there yet.
        if loader is None and loop.step is Step.ENDING and loop.validated_at < run.iteration:
            loop.validated_at = run.iteration
            loop.results = results
            if results:
                run.report.validation(run.iteration, run.epoch, results)
        else:
            name = run.checkpointer.inspected
            run.report.means(run.iteration, f"evaluated{' ' * bool(name)}{name}: ", results)
    return results


def _results_of_valid(run: Run) -> dict[str, float]:
    """What valid() returns on rank 0, and what is logged in it, as numbers; on every rank.

    Raises:
        TypeError: It returned something else.
        RuntimeError: Some ranks left out their part of the data.
    """
    evaluation = run.evaluation
    evaluation.loops_begun = 0
    drawn_before = run.experiment.visualizer.num_added
    results = run.experiment.valid()
    numbers = checks.numbers_of_valid(evaluation.meter.means(), results)
    evaluation.wait("the end of valid()")
    of_ranks = collectives.all_gather_object((numbers, evaluation.loops_begun))
    alike.check_loops([begun for _, begun in of_ranks])
    first = of_ranks[0][0]  # what only rank 0 returns was left to it
    is_silent = results is None and drawn_before == run.experiment.visualizer.num_added
    if is_silent and not first and not evaluation.has_warned:
        evaluation.has_warned = True
        run.logger.info(  # no warning: its numbers may go elsewhere
            f"[{run.iteration}] valid: returned None and logged nothing, so it has no result; "
            "expected numbers by name, or `return {}` if that is meant."
        )
    difference = alike.first_difference([{**first, **results} for results, _ in of_ranks])
    if difference and not evaluation.has_warned:
        evaluation.has_warned = True
        run.warn(
            f"[{run.iteration}] valid: {difference}; rank 0's is used for all. For the mean "
            "over all samples `return self.average(metrics, weight)`, the weight being this "
            "rank's samples."
        )
    return first


@contextlib.contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """The phase "predict" for a block."""
    with run.evaluation.begin("predict", run.iteration):
        yield
        run.report.means(run.iteration, "", run.evaluation.meter.means())
