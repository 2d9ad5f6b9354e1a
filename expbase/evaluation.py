"""Validating, and other phases that have no effect on training.

In a phase other than "train" the models are in eval mode, no gradients are kept, and the random
numbers are the phase's own, derived from (seed, iteration); everything is as before afterwards.
What a validation is, the user's `valid` says.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from expbase import checks, distributed
from expbase.data.loaders import Batches, LoaderAdapter, Shard, adapt_loader
from expbase.isolation import isolated_eval
from expbase.life import Step
from expbase.meter import Meter, line
from expbase.reporting import Reporting
from expbase.state import objects, rng
from expbase.state.values import Snapshot, layers_with_buffers
from expbase.stopping import ValidationExit, ValidationLeft

_COPIED_BYTES = 1 << 24  # of a value that is put back when a validation was left
_PURPOSES = {"valid": rng.VALID, "predict": rng.PREDICT}


@dataclass
class EvaluationState:
    """What the phases that are not training need."""

    meter: Meter = field(default_factory=Meter)  # of what is logged meanwhile
    loader: Any = None  # that valid_batches reads by default; None: self.valid_loader
    batches_read: int = 0  # in all; who watches for a hang asks
    # By the id of their loader: persistent workers serve every run over it.
    adapters: dict[int, LoaderAdapter] = field(default_factory=dict)
    running: list[Batches] = field(default_factory=list)  # that may have been left early
    runs_begun: int = 0  # over a loader, in this call of valid()
    validations: int = 0  # that the loop has begun
    exit: ValidationExit | None = None  # how the one under way is left when the run stops
    told_difference: bool = False  # between the results of the ranks

    def let_go(self, kept: Iterable[Any] = ()) -> None:
        """Ends runs that were left early, and the workers of loaders that are not kept."""
        with contextlib.ExitStack() as stack:
            ids = {id(loader) for loader in kept}
            for key in [key for key in self.adapters if key not in ids]:
                stack.callback(self.adapters.pop(key).close)
            while self.running:
                stack.callback(self.running.pop().close)


class Evaluation(Reporting):
    """The phases of an experiment that are not training."""

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        super().__init__(config, args)
        self._evaluation = EvaluationState()

    def _progress(self) -> dict[str, Any]:
        return {**super()._progress(), "evaluated_batches": self._evaluation.batches_read}

    def _meter(self) -> Meter:
        return super()._meter() if self.phase == "train" else self._evaluation.meter

    def valid(self) -> Mapping[str, Any] | None:
        """One validation; yours."""
        raise NotImplementedError

    # --- what a user calls ---------------------------------------------------------------

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Runs valid() in eval mode, without gradients, with random numbers of its own.

        Args:
            loader: What valid_batches() reads; None: self.valid_loader.

        Returns:
            What valid() returned on rank 0, as numbers; on every rank. After an update in training
            those of self.valid_loader are the validation of that iteration and logged as
            `valid/…`; others only go into the text log.
        """
        self._need_setup("evaluate")
        loop = self._loop
        with self._in_phase("valid", loader):
            self.fire("on_evaluate_begin")
            results = self._results_of_valid()
            self.fire("on_evaluate_end", results)
            is_other = loader is not None and loader is not self.valid_loader
            if is_other and not self._evaluation.runs_begun:
                self.logger.warning(
                    "valid: did not call self.valid_batches(); these are numbers of the loader "
                    "that evaluate() was given only if valid() read self.evaluated_loader."
                )
            # Within an iteration its update is not done, so its weights are not there yet.
            is_due = loader is None and loop.step is Step.ENDING
            is_due = is_due and loop.validated_at < self.iteration
            if is_due:
                loop.validated_at = self.iteration
                loop.results = results
            if results and is_due:
                metrics = {f"valid/{name}": number for name, number in results.items()}
                self._metric_log.write(self.iteration, self.epoch, metrics)
                self._compare([*metrics])
            elif results:
                what = f" {self._checkpointer.inspected}" if self._checkpointer.inspected else ""
                self.logger.info("evaluated%s: %s", what, line(self.iteration, results))
        return results

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """This rank's share of the validation data: each sample exactly once over all ranks.

        Args:
            loader: By default self.evaluated_loader. Of an IterableDataset or another iterable
                each rank gets what it yields: sharding is yours.

        Returns:
            The batches; on some rank possibly none.
        """
        purpose = _PURPOSES.get(self.phase, rng.VALID)
        run = self._kept_adapter(loader).once(purpose, self.iteration)  # opened now, not later
        self._evaluation.runs_begun += 1
        self._evaluation.running.append(run)
        return self._watched(run, purpose)

    @property
    def evaluated_loader(self) -> Any:
        """What valid_batches() reads by default: what evaluate was given, or self.valid_loader."""
        given = self._evaluation.loader
        return self.valid_loader if given is None else given

    @property
    def evaluated_indices(self) -> list[Any] | None:
        """Where the samples of the batch that valid_batches() gave last are in the data set.

        None: unknown.
        """
        running = self._evaluation.running
        return running[-1].indices if running else None

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """The mean of each metric over the ranks, by weight. Call it once, after the loop.

        Args:
            metrics: Numbers or tensors of one, each a mean over this rank's share.
            weight: The size of the share, in samples. With 0 the metrics are not looked at.

        Returns:
            The same on every rank; empty if all weights are 0.
        """
        self._wait_in_phase("self.average()")
        return distributed.weighted_average(metrics, weight)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Call it once, after the loop."""
        self._wait_in_phase("self.gather()")
        return distributed.gather_objects(value)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode, no gradients and random numbers of its own for what you do in the block.

        It has no effect on training: for samples that a listener draws, say. What is logged in it
        goes into the text log, as means.
        """
        with self._in_phase("predict"):
            yield
            if means := self._evaluation.meter.means():
                self.logger.info("%s", line(self.iteration, means))

    # --- phases --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_phase(
        self, name: str, loader: Any = None, layers: Iterable[Any] = ()
    ) -> Iterator[None]:
        """The phase of that name; within a phase that is not training it changes nothing.

        `loader` is what valid_batches reads by default, `layers` are no attributes.
        """
        state = self._evaluation
        before = self.phase, state.loader, state.meter
        state.loader = state.loader if loader is None else loader
        isolation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.phase == "train":
            self.phase, isolation = name, self._isolated(_PURPOSES[name], layers)
        if before[0] == "train" or name == "predict":
            state.meter = Meter()
        try:
            with isolation:
                yield
        finally:
            self.phase, state.loader, state.meter = before

    @contextlib.contextmanager
    def _isolated(self, purpose: int, layers: Iterable[Any]) -> Iterator[None]:
        rng.seed_for(self.config.training.seed, purpose, self.iteration, self.rank)
        found = self.stateful_objects()
        all_layers, bare = [*found.layers.values(), *layers], found.parameters.values()
        drawn_from = objects.generator_states(found)
        before = Snapshot(lambda: layers_with_buffers(found))
        try:
            with self._stopwatch.exclude("validation"), isolated_eval(all_layers, bare):
                yield
        finally:
            objects.set_generator_states(found, drawn_from)
            before.restore()
            self._evaluation.let_go(kept=vars(self).values())

    def _validate(self) -> None:
        """The validation of this iteration, unless there was one.

        Raises:
            ValidationLeft: The run stops, on all ranks; the experiment is as it was before, but for
                what valid() itself changed in parameters and optimizers.
        """
        loop, state = self._loop, self._evaluation
        if loop.validated_at == self.iteration:
            return
        roll_back = self._checkpointer.remember("listeners")
        before = Snapshot(self._owners, _COPIED_BYTES)
        state.validations += 1
        state.exit = ValidationExit(self._stop_requests, state.validations)
        try:
            with self._in_phase("valid"):  # here, too: evaluate may be overridden
                loop.results = dict(self.evaluate() or {})
        except ValidationLeft:
            roll_back()
            for path in before.restore():
                self.logger.warning(
                    f"self.{path}: was changed by the validation that was left, and is too large "
                    "to be put back: the run that goes on is not exact."
                )
            distributed.renumber_waits()
            raise
        finally:
            state.exit = None
        loop.validated_at = self.iteration

    def _results_of_valid(self) -> dict[str, float]:
        """What valid() returns on rank 0, and what is logged in it, as numbers; on every rank.

        Raises:
            TypeError: It returned something else.
            RuntimeError: Some ranks left out their share of the data.
        """
        state = self._evaluation
        state.runs_begun = 0
        results = self.valid()
        if results is not None and not isinstance(results, Mapping):
            raise TypeError(f"valid: returned {results!r}; expected numbers by name, or None.")
        returned = {**state.meter.means(), **(results or {})}
        numbers = {name: _number(name, value) for name, value in returned.items()}
        self._wait_in_phase("the end of valid()")
        of_ranks = distributed.gather_objects((numbers, state.runs_begun))
        checks.check_shares([begun for _, begun in of_ranks])
        first = of_ranks[0][0]  # what only rank 0 returns was left to it
        difference = checks.first_difference([{**first, **results} for results, _ in of_ranks])
        if difference and not state.told_difference:
            state.told_difference = True
            self.logger.warning(
                f"[{self.iteration}] valid: {difference}; rank 0's is used for all. For the mean "
                "over all samples `return self.average(metrics, weight)`, the weight being this "
                "rank's samples."
            )
        return first

    def _wait_in_phase(self, place: str) -> None:
        distributed.need_all_ranks(place)
        # The shares of other ranks may take longer than a collective waits.
        if self.phase != "train":
            way_out = self._evaluation.exit
            distributed.wait_for_all(place, *([way_out.while_waiting] if way_out else []))

    # --- running over a loader -----------------------------------------------------------

    def _attach_data(self) -> None:
        """Takes the loaders that setup_dataloader has set; the ranks compare their samplers."""
        if self.train_loader is not None:
            adapter = self._adapter(self.train_loader, "self.train_loader")
            self._iterator.attach(adapter, leaves_epochs=getattr(self.args, "force", False))
        self._on_close.callback(self._iterator.close)
        self._on_close.callback(self._evaluation.let_go)
        if self.parallel and isinstance(self.valid_loader, Iterable):
            self._kept_adapter(self.valid_loader)

    def _adapter(self, loader: Any, name: str) -> LoaderAdapter:
        shard = Shard(self.config.training.seed, self.rank, self.world_size)
        if loader is None:
            raise LoaderAdapter(None, name, shard).not_set()
        return adapt_loader(loader, name, shard)

    def _kept_adapter(self, loader: Any) -> LoaderAdapter:
        adapters = self._evaluation.adapters
        loader = self.evaluated_loader if loader is None else loader
        if id(loader) not in adapters:
            name = "self.valid_loader" if loader is self.valid_loader else "valid_batches"
            adapters[id(loader)] = self._adapter(loader, name)
        return adapters[id(loader)]

    def _watched(self, run: Batches, purpose: int) -> Iterator[Any]:
        for batch in run:
            self._evaluation.batches_read += 1
            rng.seed_for(self.config.training.seed, purpose, self.iteration, run.taken[0], 1)
            if self._evaluation.exit is not None:
                self._evaluation.exit.before_batch()
            yield batch
            if purpose == rng.VALID:
                self.fire("on_valid_batch_end", batch, run.indices)


def _number(name: str, value: Any) -> float:
    try:
        return distributed.number(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"valid: the metric {name!r} is {value!r}; expected a number or a tensor of one."
        ) from None
