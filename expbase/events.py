"""The events of an experiment: methods to override, each with the whole experiment at hand.

They do nothing here. Each fires on every rank, at the place that DESIGN's order gives it; an
override that wants the behaviour of its bases calls `super()`. An event that nobody overrides
costs nothing in the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Events:
    """Every point at which an experiment can act, in the order in which they come."""

    # Setup

    def on_setup_begin(self) -> None:
        """Before setup_dataloader; device, output directory, logger and seed stand."""

    def on_setup_end(self) -> None:
        """After everything was built and checked."""

    # Training

    def on_train_begin(self) -> None:
        """Once per start, after the state was restored, before the first batch."""

    def on_train_end(self) -> None:
        """Once per start, after the last batch, also after a failure, if on_train_begin came."""

    def on_train_epoch_begin(self) -> None:
        """At the start of a pass; not again when a run is resumed within one."""

    def on_train_epoch_end(self) -> None:
        """When the pass is used up, after the validation and before the save of its iteration."""

    def on_fetch_data_begin(self) -> None:
        """Before a training batch is fetched."""

    def on_fetch_data_end(self) -> None:
        """After it was fetched."""

    def on_train_batch_begin(self, batch: Any, indices: Sequence[int] | None) -> None:
        """With every training batch; changes made in place reach train_batch.

        Args:
            batch: What read_batch is about to return.
            indices: Where its samples stand in the data set, if the loader has indices.
        """

    def on_train_batch_end(self) -> None:
        """After each train_batch."""

    def on_log(self, metrics: Mapping[str, float]) -> None:
        """Every log_interval iterations, with the numbers that go into the line.

        Args:
            metrics: By full name, `train/loss`.
        """

    # Evaluation

    def on_evaluate_begin(self) -> None:
        """Before valid(); the models are in eval mode."""

    def on_evaluate_end(self, results: Mapping[str, float]) -> None:
        """After valid(); the models are still in eval mode.

        Args:
            results: What valid() returned on rank 0.
        """

    # State

    def on_save_checkpoint(self) -> Mapping[str, Any] | None:
        """Before a checkpoint is written.

        Returns:
            Values of your own that come back to on_load_checkpoint: numbers, texts, lists,
            mappings, arrays and tensors.
        """
        return None

    def on_load_checkpoint(self, states: Mapping[str, Any]) -> None:
        """After everything else was restored.

        Args:
            states: What on_save_checkpoint returned; empty if nothing.
        """

    def on_save_model(self) -> None:
        """Before save_model writes its file."""

    def on_load_model(self) -> None:
        """Before load_model reads its file."""

    # Failure

    def on_exception(self, exception: BaseException) -> None:
        """After an exception in training, which goes on its way afterwards.

        Args:
            exception: The original one.
        """


# What fires with every batch that is read; the loop asks once whether anybody hears one of them.
BATCH_EVENTS = frozenset({"on_fetch_data_begin", "on_fetch_data_end", "on_train_batch_begin"})


def heard_events(experiment: type[Events]) -> frozenset[str]:
    """The names of the events that a class overrides."""
    names = [name for name in vars(Events) if name.startswith("on_")]
    return frozenset(n for n in names if getattr(experiment, n) is not getattr(Events, n))
