"""Training several heads of one model: a task per head, one of them drawn for each update.

    name = self.draw_task()
    outputs = self.model(self.read_task(name), self.tasks[name].head)

Those two lines begin a train_batch of MultiHead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase.base import rng
from expbase.base.arrays import to_numpy
from expbase.base.errors import ValueMistake
from expbase.config import Config
from expbase.data.loaders import Shard, adapt_loader
from expbase.data.position import DataPosition
from expbase.events import on
from expbase.extras.components.layers import Head
from expbase.extras.prediction import Prediction


@dataclass(frozen=True)
class Task:
    """How a head is trained."""

    head: str  # its name in the model
    loader: Any = None  # where its batches come from; None: self.train_loader
    mix_ratio: float = 1.0  # how often it is drawn, in relation to the others
    auxiliary: bool = False  # training may end before this task has had its epochs


class EndlessBatches(DataPosition):
    """The batches of a loader, epoch after epoch; the checkpoint holds the position."""

    def __init__(self, loader: Any, name: str, shard: Shard, say: Callable[[str], object]) -> None:
        super().__init__()
        self.attach(adapt_loader(loader, name, shard, say))

    @property
    def epochs_done(self) -> int:
        """Epochs that were read to their end."""
        return self.epoch - (not self.batches.ended)

    def read(self, iteration: int = 0) -> Any:
        """Reads a batch, maybe the first one of a new epoch.

        Args:
            iteration: The update that it is for.

        Returns:
            This rank's next batch.
        """
        if self.needs_epoch:
            self.open(self.epoch + 1)
        return super().read(iteration)


class MultiHead(Prediction):
    """A mixin: with each update train_batch trains the head that `draw_task` names.

    setup_model makes self.model, a Composed (in data_parallel with find_unused_parameters=True),
    and calls `setup_tasks`. With `heads.epochs` training ends when every task that is not
    auxiliary has had so many epochs of its data; else as the training section says.

    Attributes:
        tasks: By name.
        task_steps: How often each task was drawn.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.heads = Config({"epochs": 0})  # for each task; 0: as `training` says
        return config

    def setup_tasks(self, tasks: Mapping[str, Task]) -> None:
        """Sets the tasks. Call it in setup_model.

        Args:
            tasks: By names of your own.
        """
        seed = self.config.training.seed
        self.tasks = dict(tasks)
        self.task_steps = dict.fromkeys(tasks, 0)
        # The same on every rank, and no other draw moves it: all ranks train the same head.
        self.mix_random = np.random.default_rng(rng.derive(seed, rng.SETUP, 2))
        self.task_batches = {
            name: EndlessBatches(
                task.loader,
                f"the loader of task {name}",
                Shard(rng.derive(seed, rng.STREAM, number), self.rank, self.world_size),
                self.logger.info,
            )
            for number, (name, task) in enumerate(tasks.items())
            if task.loader is not None
        }

    def draw_task(self) -> str:
        """Draws the task of this update, by mix_ratio.

        Returns:
            Its name, the same on every rank.
        """
        ratios = np.array([task.mix_ratio for task in self.tasks.values()])
        name = list(self.tasks)[self.mix_random.choice(len(ratios), p=ratios / ratios.sum())]
        self.task_steps[name] += 1
        return name

    def read_task(self, name: str) -> Any:
        """Reads a training batch of a task, of its own loader or of self.train_loader.

        Args:
            name: Of the task.

        Returns:
            This rank's next batch.
        """
        return self.task_batches[name].read() if name in self.task_batches else self.read_batch()

    def epochs_of(self, name: str) -> int:
        """Counts the epochs that a task has had.

        Args:
            name: Of the task.

        Returns:
            How often its data were read to their end. Tasks without a loader share the count of
            self.train_loader.
        """
        batches = self.task_batches.get(name)
        return self.internals.epochs_ended if batches is None else batches.epochs_done

    @on("on_train_begin")  # it may have been so before this start
    @on("on_train_batch_end")
    def stop_when_tasks_are_done(self) -> None:
        """Stops when every task that is not auxiliary has had its epochs."""
        epochs = self.config.heads.epochs
        needed = [name for name, task in self.tasks.items() if not task.auxiliary]
        if epochs and all(self.epochs_of(name) >= epochs for name in needed):
            self.stop(f"every head that is not auxiliary has had {epochs} epochs of its data")

    def predict_batch(self, batch: Any) -> Any:
        outputs = self.model(batch, self.predicted_head, "predict")
        arrays = {name: to_numpy(value) for name, value in outputs.items()}
        return self.unwrap(self.model).heads[self.predicted_head].batch_postprocess(arrays)

    def predict_head(
        self, head: str, loader: Any, output_dir: str | Path | None = None
    ) -> list[Any]:
        """Predicts with one head, and has it postprocess all results, on rank 0.

        Args:
            head: Its name.
            loader: Over a reader of the phase "predict", or a Subset of one.
            output_dir: Where `<head>.predict.jsonl` is written; None prints.

        Returns:
            One result per sample, in the order of the data, on every rank.

        Raises:
            ValueError: There is no such head, it returns no result per sample, or nobody returns
                what its epoch_inputs_attrs ask for.
        """
        model = self.unwrap(self.model)
        layer = model.find_head(head)
        reader = loader.dataset
        while isinstance(reader, paddle.io.Subset):
            reader = reader.dataset
        layer.reset()
        self.predicted_head = head
        with self.internals.evaluating():
            results = self.predict(loader)
            # Within the block: at its end the counts of the parts are restored.
            inputs = _epoch_inputs(layer, {"reader": reader, "backbone": model.backbone})
        layer.results = results  # those of all ranks
        if self.rank == 0:
            with model.in_phase("predict"):
                layer.epoch_postprocess(inputs, output_dir)
        return results

    def close(self) -> None:
        try:
            super().close()
        finally:
            for batches in getattr(self, "task_batches", {}).values():
                batches.close()


def _epoch_inputs(head: Head, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that a head asks for by epoch_inputs_attrs, by component and name."""
    inputs: dict[str, Any] = {"reader": {}}
    place = f"head {head.head_name}: epoch_inputs_attrs"
    for component, specs in head.epoch_inputs_attrs.items():
        if component not in parts:
            raise ValueMistake(
                f"{place} name {component!r}; expected reader or backbone. What another head has "
                "collected is its get_results()."
            )
        outputs = parts[component].get_epoch_outputs()
        names = [getattr(spec, "name", spec) for spec in specs]
        if missing := [name for name in names if name not in outputs]:
            raise ValueMistake(
                f"{place} ask the {component} for {missing[0]!r}; its get_epoch_outputs returns "
                f"{', '.join(outputs) or 'nothing'}."
            )
        inputs[component] = {name: outputs[name] for name in names}
    return inputs
