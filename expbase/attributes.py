"""The attributes of an experiment: the template's, the user's, and which of the latter are state.

Everything that a user sets on the experiment and that has state is saved with no further code;
what changes among plain values is saved, too; `exclude_from_state` leaves something out. Of the
template's own attributes the private ones are listed here and nowhere else.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle

from expbase import checks, distributed, schedule
from expbase.config import Config, check_training, fill, get_default_training_config
from expbase.data.iterator import TrainIterator
from expbase.events import Events, Subscribers
from expbase.life import Life, LoopState
from expbase.logs import early_log
from expbase.meter import MetricsFile
from expbase.metrics import MetricLog
from expbase.record.run_record import RunRecord
from expbase.run_dir import RunDirectory
from expbase.state import checkpoint, objects
from expbase.state.checkpointer import Checkpointer
from expbase.state.values import Owners, Values, find_owner, own_attributes
from expbase.stopping import StopReason, StopRequests
from expbase.stopwatch import Stopwatch
from expbase.visualizer import Visualizer


@dataclass
class StateNames:
    """Names of attributes."""

    template: dict[str, Any] = field(default_factory=dict)  # the template's own, as they were made
    registered: list[str] = field(default_factory=list)  # values that are state in any case
    excluded: list[str] = field(default_factory=list)  # left out of the state
    optimizers: dict[str, Any] = field(default_factory=dict)  # as they were found last
    values: Any = None  # a Values


class Attributes(Events):
    """What an experiment holds.

    Attributes:
        config: The completed config, a copy.
        args: As given.
        model: Yours; free in name and number, like the optimizers.
        optimizer: Yours.
        train_loader: Yours: a paddle.io.DataLoader or any iterable of batches; None: the
            experiment makes its own data, and has no epochs.
        valid_loader: Yours, for `valid_batches`.
        test_loader: Yours, if there is one: `--evaluate` takes it.
        iteration: Updates done; within train_batch the number of the one under way.
        epoch: Epochs begun.
        phase: "train", "valid" or "predict".
        life: What the run has done last, a Life.
        logger: The text log of this rank; rank 0's also goes to stderr.
        visualizer: VisualDL; writes on rank 0 alone.
        output_dir: Of this run.
        checkpoint_dir: In it.
        parallel: Whether there is more than one process.
        rank: Of this process.
        world_size: The number of processes.
    """

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        checks.check_early_attributes(type(self), vars(self))
        # What mixins add is there, however the config was made.
        self.config = fill({**fill(type(self).default_config()), **config})
        check_training(self.config.training)
        checks.check_arguments(args, self.config)
        self.args = args
        self.model: Any = None
        self.optimizer: Any = None
        self.train_loader: Any = None
        self.valid_loader: Any = None
        self.test_loader: Any = None
        self.iteration = 0
        self.epoch = 0
        self.phase = "train"
        self.life = Life.NEW
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        self.parallel = self.world_size > 1
        self.output_dir = Path(args.output).absolute()
        self.checkpoint_dir = self.output_dir / checkpoint.FOLDER
        self.logger: logging.Logger = early_log()  # until setup_logger, which writes its lines
        self.visualizer = Visualizer(None)

        self._names = StateNames()
        self._names.values = Values(self._owners, self._names.registered, self._warn)
        self._subscribers = Subscribers(self)
        self._on_close = contextlib.ExitStack()  # each step of setup adds how it is undone
        self._run_dir = RunDirectory(self.output_dir, checks.as_written(args, "output"))
        self._run_record = RunRecord(None)
        self._stop_requests = StopRequests()
        self._other_ranks: Any = None  # a Watch
        self._stopwatch = Stopwatch()
        self._metric_log = MetricLog(self.logger, MetricsFile(None), self.visualizer)
        self._iterator = TrainIterator()
        self._loop = LoopState()
        self._checkpointer = Checkpointer(self.checkpoint_dir, self.config.training, self.logger)

    @classmethod
    def default_config(cls) -> Config:
        """The config with all its keys and default values; add sections of your own.

        Returns:
            A Config with the `training` section.
        """
        return Config({"training": get_default_training_config()})

    @property
    def batch_in_epoch(self) -> int:
        """Batches that this rank has read in this epoch."""
        return self._iterator.batch_in_epoch

    @property
    def batches_per_epoch(self) -> int | None:
        """Of this rank; None if nobody knows. Known after setup_dataloader."""
        return self._iterator.adapter.batches_per_epoch

    @property
    def epochs_ended(self) -> int:
        """Epochs that are used up: as many as began, but for the one under way."""
        return self.epoch - (self._iterator.epoch > 0 and not self._iterator.ended)

    @property
    def finished(self) -> bool:
        """Whether training came to its end, by the config or by stop(); not interrupted."""
        loop = self._loop
        over = self._is_last or loop.stopped_by is StopReason.CALL
        is_done = loop.is_over and not loop.todo  # a stop may have left it
        return is_done and over and loop.failure is None

    @property
    def read_only(self) -> bool:
        """Whether this start only looks at a run (--evaluate, --export) and writes nothing."""
        return checks.inspected(self.args) is not None

    # --- called in setup_model -----------------------------------------------------------

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """The layer in a paddle.DataParallel if there are several processes, else itself.

        Args:
            layer: With trainable parameters.
            options: Of paddle.DataParallel: find_unused_parameters=True, say.
        """
        if not self.parallel:
            return layer
        # Paddle's own would hang, or end the process, where the ranks' layers differ.
        own = objects.StatefulObjects(layers={f"data_parallel({type(layer).__name__})": layer})
        checks.check_alike(own.shapes())
        return paddle.DataParallel(layer, **options)

    def unwrap(self, layer: Any) -> Any:
        """Your layer in what data_parallel returned: its attributes and methods are there."""
        return objects.unwrap(layer)

    def register_stateful(self, *names: str) -> None:
        """Names attributes whose values are state, whether they change or not.

        Plain values that change are state without it: this is for those of other objects,
        `"sampler.position"`, and for what a resumed run must have.
        """
        self._note(self._names.registered, names)

    def exclude_from_state(self, *names: str) -> None:
        """Names attributes that are not state: a frozen judge, a large cache, `"model.cache"`."""
        self._note(self._names.excluded, names)

    def _note(self, noted: list[str], names: tuple[str, ...]) -> None:
        if self.life is not Life.NEW:
            raise RuntimeError("state is named in setup_model; a resumed run must know it then.")
        for name in names:
            if not hasattr(*find_owner({"": (self, {})}, name)):
                raise AttributeError(f"self.{name} does not exist; set it before you name it.")
            if name not in noted:
                noted.append(name)

    # --- finding state -------------------------------------------------------------------

    def stateful_objects(self) -> objects.StatefulObjects:
        """What has state among your attributes, what is excluded, too."""
        return objects.find(self._user_attributes())

    def _optimizers(self) -> dict[str, Any]:
        """All of them by name; looked for again unless each is where it was found last."""
        attributes, known = vars(self), self._names.optimizers
        if not known or any(attributes.get(name) is not o for name, o in known.items()):
            self._names.optimizers = known = self.stateful_objects().optimizers
        return known

    def _saved_objects(self) -> objects.StatefulObjects:
        """What of it a checkpoint holds."""
        left_out = [*self._names.excluded, *self._names.registered]
        return objects.find(self._user_attributes(), left_out)

    def _owners(self) -> Owners:
        """The experiment and its layers, with those of their attributes that may be state."""
        found, excluded = self._saved_objects(), self._names.excluded
        left_out = {*excluded, *found.names()}
        own = {n: value for n, value in self._user_attributes().items() if n not in left_out}
        owners: dict[str, tuple[Any, Mapping[str, Any]]] = {"": (self, own)}
        for path, layer in found.sublayers():
            attributes = own_attributes(layer).items()
            kept = {n: value for n, value in attributes if f"{path}.{n}" not in excluded}
            owners[path] = layer, kept
        return owners | objects.settings_of_parameters(found)

    def _warn(self, text: str) -> None:
        self.logger.warning("%s", text)

    def fire(self, event: str, *args: Any) -> Any:
        """Calls the subscribers of an event, if there are any.

        Returns:
            What the event's method returned.
        """
        if event in self._subscribers.subscribed:
            return self._subscribers.fire(event, *args)
        return None

    def _user_attributes(self) -> dict[str, Any]:
        own = self._names.template
        return {name: value for name, value in vars(self).items() if name not in own}

    @property
    def _is_last(self) -> bool:
        """Whether the config asks for no iteration after the present one."""
        return schedule.is_last(self.config.training, self.iteration, self.epochs_ended)

    def _need_setup(self, name: str) -> None:
        if self.life is Life.NEW:
            raise RuntimeError(f"{name}: called before setup(); expected exp.setup() first.")
