"""The events before and after methods that an experiment may override.

    class Experiment(AllEvents, ExperimentBase):
        def on_batch_read(self, batch, indices): ...

        @on("on_after_backward", every=100)
        def show_gradients(self): ...

Each comes from the method that it belongs to, wherever that is overridden: a class in front of the
experiment's surrounds it, and between the parts of a step one acts that stands behind it. So a
method must be called for its events to come; `loss.backward()` by hand calls none.
"""

# Source of the events: fastNLP's Callback.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from expbase.base import rng
from expbase.engine.internals import Internals
from expbase.experiment import ExperimentBase


class Surrounding(ExperimentBase):
    """Stands in front of a class that has AllEvents, and calls the events round its methods."""

    def setup_dataloader(self, *args: Any, **options: Any) -> None:
        self.internals.fire("on_setup_begin")
        super().setup_dataloader(*args, **options)

    def check_setup(self, *args: Any, **options: Any) -> None:
        super().check_setup(*args, **options)
        self.internals.fire("on_setup_end")

    def read_batch(self, *args: Any, **options: Any) -> Any:
        internals = self.internals
        internals.turn_epoch()
        internals.fire("on_fetch_data_begin")
        batch = super().read_batch(*args, **options)
        if internals.hears("on_fetch_data_end"):
            with rng.unmoved():  # the random numbers of this batch are set already
                internals.fire("on_fetch_data_end")
        internals.fire("on_batch_read", batch, internals.batch_indices)
        return batch

    def backward(self, loss: Any, *args: Any, **options: Any) -> None:
        self.internals.fire("on_before_backward", loss)
        super().backward(loss, *args, **options)
        self.internals.fire("on_after_backward")

    def valid(self, *args: Any, **options: Any) -> Any:
        if self.internals.phase == "valid":
            self.internals.fire("on_evaluate_begin")
        return super().valid(*args, **options)

    def valid_batches(self, *args: Any, **options: Any) -> Iterator[Any]:
        return _told(super().valid_batches(*args, **options), self.internals)

    def save_model(self, *args: Any, **options: Any) -> None:
        self.internals.fire("on_save_model")
        super().save_model(*args, **options)

    def load_model(self, *args: Any, **options: Any) -> None:
        self.internals.fire("on_load_model")
        super().load_model(*args, **options)


def _told(batches: Iterator[Any], internals: Internals) -> Iterator[Any]:
    for batch in batches:
        indices = internals.evaluated_indices  # a loop within this one has others
        yield batch
        if internals.phase != "predict":
            internals.fire("on_valid_batch_end", batch, indices)


class Between(ExperimentBase):
    """Stands behind a class that has AllEvents: a step_optimizers of its own calls super()."""

    def step_optimizers(self, *optimizers: Any) -> None:
        fire = self.internals.fire
        with self.internals.step_of(optimizers) as parts:
            parts.unscale()
            fire("on_before_optimizers_step")
            parts.step()
            fire("on_after_optimizers_step")
            fire("on_before_zero_grad")
            parts.clear()
            fire("on_after_zero_grad")


class AllEvents(ExperimentBase):
    """A mixin: fourteen further events, to override or to listen to as to the others."""

    stands_in_front = Surrounding
    """What is put in front of a class that has this mixin, by mixins_in_front.py."""
    stands_behind = Between
    """What is put behind it."""

    def on_setup_begin(self) -> None:
        """Before setup_dataloader; device, output directory, logger and seed are set up."""

    def on_setup_end(self) -> None:
        """After check_setup: everything was built and checked; the state is not restored yet."""

    def on_fetch_data_begin(self) -> None:
        """In read_batch, before a training batch is fetched; its epoch has begun."""

    def on_fetch_data_end(self) -> None:
        """In read_batch, after the batch was fetched and before on_batch_read."""

    def on_batch_read(self, batch: Any, indices: Sequence[int] | None) -> None:
        """Before read_batch returns: once for each batch, several times in an update of several.

            batch["x"] *= self.config.scale  # what is changed in place, train_batch sees

        Each rank counts its own batches: with training.shares a listener that is to act at the same
        ones on any number of processes asks `internals.share`, and not `every`.

        Args:
            batch: What read_batch returns; one of your own, too.
            indices: Of its samples in the data set; None if the loader has none.
        """

    def on_before_backward(self, loss: Any) -> None:
        """In backward, for each micro-batch.

        Args:
            loss: What backward was given, neither divided nor scaled yet.
        """

    def on_after_backward(self) -> None:
        """In backward; the last micro-batch has averaged the gradients over the ranks."""

    def on_after_optimizers_step(self) -> None:
        """In step_optimizers, after the step; the gradients are still there."""

    def on_before_zero_grad(self) -> None:
        """In step_optimizers, before the gradients are cleared."""

    def on_after_zero_grad(self) -> None:
        """In step_optimizers, after they were cleared; `internals.stepping` has stepped."""

    def on_evaluate_begin(self) -> None:
        """Before valid, in eval mode; what it logs is among the validation's numbers.

        `internals.evaluated_loader` is what valid_batches will read.
        """

    def on_valid_batch_end(self, batch: Any, indices: Sequence[int] | None) -> None:
        """When a loop over valid_batches is done with a batch; ranks may have unequal numbers.

        What the loop has set on self for the batch can be read. Not after a batch at which the
        loop was left, and not in a prediction.

        Args:
            batch: What valid_batches gave.
            indices: Of its samples in the data set; None if the loader has none.
        """

    def on_save_model(self) -> None:
        """Before save_model writes its file."""

    def on_load_model(self) -> None:
        """Before load_model reads its file."""
