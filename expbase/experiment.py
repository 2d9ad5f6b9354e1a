"""ExperimentBase: the life of a training run. The one file of expbase that you must read.

A subclass writes four methods, `setup_dataloader`, `setup_model`, `train_batch` and `valid`; the
rest is here and may be overridden. The class does not know your model, your loss or your batch:
forward, backward, step and schedule stand in your `train_batch`, and nothing is moved, wrapped,
cast or stepped behind your back.

    setup:  device, processes, output directory, config dump, VisualDL, log, seed, your two
            setup methods, checks
    run:    the state comes back if there is one; train; close

The words: an iteration is one call of train_batch, one update. An epoch is a pass over the
training data. A batch is what the loader gives. A checkpoint stands at an iteration's end.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import paddle

from expbase import distributed, rng, state
from expbase.checkpointer import Checkpointer, find_checkpoint
from expbase.config import (
    Config,
    ConfigError,
    check_training,
    complete,
    get_default_training_config,
)
from expbase.data import Batches, Feed, IndexedFeed, Share, make_feed
from expbase.events import Events
from expbase.logs import Meter, MetricsFile, Stopwatch, close_log, line, open_log
from expbase.output import CHECKPOINTS, MAY_CHANGE, Output
from expbase.visualizer import Visualizer

_STOP_CHECK_SECONDS = 0.5  # between two agreements of the ranks on stopping


class NonFiniteError(FloatingPointError):
    """A logged training scalar was not a finite number."""


class ExperimentBase(Events):
    """One training run, from its config to its last checkpoint.

    Args:
        config: A Config with a `training` section, in which max_iteration, valid_interval and
            save_interval must stand; what else is missing there gets its default.
        args: `output` and `device` are needed; `checkpoint_path`, `init_model_path`, `fresh` and
            `force` are used if there.

    Attributes:
        config: The completed config, a copy.
        args: As given.
        model: Yours; free in name and number, like the optimizers.
        optimizer: Yours.
        train_loader: Yours: a paddle.io.DataLoader or any iterable of batches.
        valid_loader: Yours, for `valid_batches`.
        iteration: Updates done; within train_batch the number of the one under way.
        epoch: Passes begun.
        batch_in_epoch: Batches that this rank has read in this pass.
        batches_per_epoch: On this rank; None if nobody knows. Known after setup_dataloader.
        phase: "train", "valid", "sanity" or "predict".
        logger: The text log of this rank; rank 0's also goes to stderr.
        visualizer: VisualDL; writes on rank 0 alone.
        output_dir: Of this run.
        checkpoint_dir: In it.
        parallel: Whether there is more than one process.
        rank: Of this process.
        world_size: The number of processes.

    Raises:
        TypeError: One of the four methods is missing.
        ConfigError: The config or the args cannot be used.
    """

    _REQUIRED_METHODS: ClassVar = ("setup_dataloader", "setup_model", "train_batch", "valid")

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        missing = [
            name
            for name in self._REQUIRED_METHODS
            if getattr(type(self), name) is getattr(ExperimentBase, name)
        ]
        if missing:
            raise TypeError(
                f"{type(self).__name__}: {', '.join(missing)} not defined; "
                f"expected the methods {', '.join(self._REQUIRED_METHODS)}."
            )
        if getattr(args, "output", None) in (None, ""):
            raise ConfigError("args.output: not given; expected the directory of the run.")
        self.config = complete(config)
        self.args = args
        self.model: Any = None
        self.optimizer: Any = None
        self.train_loader: Any = None
        self.valid_loader: Any = None
        self.iteration = 0
        self.epoch = 0
        self.batch_in_epoch = 0
        self.phase = "train"
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        self.parallel = self.world_size > 1
        self.output_dir = Path(args.output).absolute()
        self.checkpoint_dir = self.output_dir / CHECKPOINTS
        self.logger = logging.Logger("expbase")
        self.logger.addHandler(logging.NullHandler())  # setup_logger puts the real ones in place
        self.visualizer = Visualizer(None)
        self._output = Output(self.output_dir)
        self._meter = Meter()
        self._watch = Stopwatch()
        self._metrics_file = MetricsFile(None)
        self._checkpointer = Checkpointer(self, self.checkpoint_dir)
        self._registered: list[str] = []
        self._excluded: list[str] = []
        self._state_names: list[str] = []
        self._scores: list[tuple[int, float]] = []  # best first: iteration, score
        self._feed: Feed | None = None
        self._batches = _NO_BATCHES
        self._next_batch: Iterator[Any] = iter(())
        self._pass_closed = True
        self._next_due = 0
        self._next_agreement = 0
        self._validated_at = -1
        self._saved_at = -1
        self._last_agreement = (time.monotonic(), 0)
        self._last_results: tuple[int, dict[str, float]] = (-1, {})
        self._newest_saved: Path | None = None
        self._own_checkpoint: Path | None = None
        self._moved_aside: Path | None = None
        self._phase_meter = Meter()
        self._pass_start = (0, 0)
        self._running = False
        self._stop_reason = ""
        self._resumed = False
        self._closed = False
        self._listened = {
            n for n in vars(Events) if getattr(type(self), n) is not getattr(Events, n)
        }
        self._template_attributes = set(vars(self)) - {"model", "optimizer"}

    @classmethod
    def default_config(cls) -> Config:
        """The config with all its keys and default values; add sections of your own.

        Returns:
            A Config with the `training` section.
        """
        return Config({"training": get_default_training_config()})

    @property
    def batches_per_epoch(self) -> int | None:
        """Of this rank; None if nobody knows."""
        return self._feed.batches_per_epoch if self._feed else None

    # --- yours ---------------------------------------------------------------------------

    def setup_dataloader(self) -> None:
        """Sets self.train_loader, and self.valid_loader if valid() uses valid_batches()."""
        raise NotImplementedError

    def setup_model(self) -> None:
        """Sets the models, the optimizers and whatever else training needs on self."""
        raise NotImplementedError

    def train_batch(self) -> None:
        """One update: reads a batch, forward, backward, step; logs what is worth it."""
        raise NotImplementedError

    def valid(self) -> Mapping[str, Any] | None:
        """One validation, on every rank; without gradients and in eval mode already.

        Returns:
            Numbers by name; rank 0's count. `self.average` makes them the same on all.
        """
        raise NotImplementedError

    # --- setup ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Everything before the first batch, in this order.

        Raises:
            ConfigError: What the config or the args say cannot be done.
            TypeError, ValueError: The experiment lacks something, or something does not fit.
        """
        try:
            self._setup()
        except BaseException as error:
            self._close_after(error)
            raise

    def _setup(self) -> None:
        check_training(self.config.training)
        self.prepare()
        self.setup_device()
        if self.parallel:
            self.init_parallel()
        self.setup_output_dir()
        self.dump_config()
        self.setup_visualizer()
        self.setup_logger()
        self.setup_checkpointer()
        rng.seed_all(rng.derive(self.config.training.seed, rng.SETUP))  # the same on all ranks

        self.on_setup_begin()
        self.setup_dataloader()
        self._setup_feed()
        self.setup_model()
        self.startup()
        self.iteration = 0
        self.epoch = 0
        self.check_setup()
        self.on_setup_end()

    def prepare(self) -> None:
        """The first thing in setup: downloads, environment. Does nothing here."""

    def startup(self) -> None:
        """After setup_model: fills parameters, say; a state that comes back overrides it."""

    def setup_device(self) -> None:
        """Has paddle use `args.device`, or the GPU if there is one, or the CPU."""
        device = getattr(self.args, "device", None) or _default_device()
        if self.parallel and ":" in device:
            raise ConfigError(
                f"args.device: {device!r} given with {self.world_size} processes; expected "
                f"{device.partition(':')[0]!r}: each process takes its own."
            )
        try:
            paddle.set_device(device)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"args.device: {device!r} given; expected cpu, gpu, gpu:0 or another device that "
                f"this paddle was built for and this machine has. ({error})"
            ) from error
        if self.config.training.deterministic and device.startswith("gpu"):
            paddle.set_flags(
                {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
            )

    def init_parallel(self) -> None:
        """Connects the processes."""
        distributed.init_parallel(paddle.device.get_device())

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory; a run of another config is refused.

        Raises:
            ConfigError: It cannot be used, is in use, or holds a run of another config.
        """
        aside = distributed.on_rank_zero(self._claim_output, "the output directory")
        self._moved_aside = aside
        if self.rank > 0:  # perhaps on another machine
            self._output.make()
            self._output.lock(self.rank)

    def _claim_output(self) -> Path | None:
        self._output.make()
        self._output.lock(self.rank)
        aside = None
        if getattr(self.args, "fresh", False):
            self._output.release()
            aside = self._output.move_aside()
            self._output.make()
            self._output.lock(self.rank)
        changed = self._output.changed_keys(self.config)
        refused = {key: pair for key, pair in changed.items() if key not in MAY_CHANGE}
        if refused and not getattr(self.args, "force", False):
            lines = "".join(
                f"\n  {key}: {old!r} there, {new!r} now" for key, (old, new) in refused.items()
            )
            raise ConfigError(
                f"args.output: {str(self.output_dir)!r} holds a run of another config:{lines}\n"
                "Give another --output, --fresh to start over here (the old run is moved aside), "
                "or --force to go on under the new config."
            )
        return aside

    def dump_config(self) -> None:
        """Writes the resolved config, once in the life of a run."""
        if self.rank == 0:
            self._output.dump(self.config)

    def setup_visualizer(self) -> None:
        """Prepares VisualDL; its file is opened at the first record."""
        self.visualizer = Visualizer(self.output_dir if self.rank == 0 else None)

    def setup_logger(self) -> None:
        """Opens this rank's text log and, on rank 0, metrics.jsonl."""
        self.logger = open_log(self.output_dir / f"worker_{self.rank}.log", echo=self.rank == 0)
        self._metrics_file = MetricsFile(
            self.output_dir / "metrics.jsonl" if self.rank == 0 else None
        )

    def setup_checkpointer(self) -> None:
        """Looks for a checkpoint of this run, and says so if there is one."""
        if self._moved_aside is not None:
            self.logger.info("the run that was here is now in %s", self._moved_aside)
        self._own_checkpoint = self._checkpointer.newest()
        if self._own_checkpoint is not None:
            self.logger.info(
                "CONTINUING the run in %s from %s (to start over instead: --fresh)",
                self.output_dir,
                self._own_checkpoint.name,
            )

    def _setup_feed(self) -> None:
        if self.train_loader is None:
            raise ValueError(
                "self.train_loader: not set by setup_dataloader; expected a paddle.io.DataLoader "
                "or an iterable of batches."
            )
        seed = self.config.training.seed
        share = Share(seed, self.rank, self.world_size)
        self._feed = make_feed(self.train_loader, "self.train_loader", share)
        if self._feed.batches_per_epoch == 0:
            raise self._feed._no_batch()

    def check_setup(self) -> None:
        """Checks that everything training needs stands on self, and says what there is.

        Raises:
            ValueError: Something is missing, or would fail at the first batch.
        """
        found = self._find_state()
        self._state_names = found.names()
        if not found.layers:
            raise ValueError(
                "setup_model: no paddle.nn.Layer on self; expected at least one, self.model say."
            )
        if not found.optimizers:
            raise ValueError(
                "setup_model: no optimizer on self; expected at least one, self.optimizer say."
            )
        names = state.parameter_names(found)
        for name, optimizer in found.optimizers.items():
            unknown = [p.name for p in state.parameters_of(optimizer) if p.name not in names]
            if unknown:
                raise ValueError(
                    f"self.{name}: updates {len(unknown)} parameters that belong to no layer on "
                    f"self ({unknown[0]} …), so they would not be saved. Put their layer on self."
                )
        self._check_parallel()
        self._say_what_there_is(found)

    def _check_parallel(self) -> None:
        if not self.parallel:
            return
        attributes = self._user_attributes().values()
        wrapped = {id(state.unwrap(v)) for v in attributes if isinstance(v, paddle.DataParallel)}
        for name, layer in self._find_state().layers.items():
            if id(layer) not in wrapped and any(not p.stop_gradient for p in layer.parameters()):
                self.logger.warning(
                    "self.%s has trainable parameters and is not in self.data_parallel(…): "
                    "its gradients stay different on each rank.",
                    name,
                )

    def _say_what_there_is(self, found: state.Found) -> None:
        assert self._feed is not None
        for name, layer in found.layers.items():
            count = sum(math.prod(p.shape) for p in layer.parameters())
            trainable = sum(math.prod(p.shape) for p in layer.parameters() if not p.stop_gradient)
            self.logger.info(
                "%s: %s parameters, %s trainable", name, f"{count:,}", f"{trainable:,}"
            )
        size, per_epoch = self._feed.batch_size, self._feed.batches_per_epoch
        self.logger.info(
            "device=%s ranks=%d batch_over_all_ranks=%s batches_per_epoch=%s output=%s",
            paddle.device.get_device(),
            self.world_size,
            size * self.world_size * self.config.training.accumulation_steps if size else "unknown",
            per_epoch or "unknown",
            self.output_dir,
        )
        if isinstance(self._feed, IndexedFeed) and self._feed.filled:
            self.logger.info(
                "the last round of a pass takes its first %d batches again: one for every rank",
                self._feed.filled,
            )

    # --- what is called in setup_model ---------------------------------------------------

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """The layer in a paddle.DataParallel if there are several processes, else itself.

        Args:
            layer: With trainable parameters.
            options: Of paddle.DataParallel, find_unused_parameters=True say.

        Raises:
            ValueError: It has a sparse Embedding, which gloo cannot average.
        """
        if not self.parallel:
            return layer
        if paddle.device.get_device() == "cpu":
            for name, sublayer in layer.named_sublayers(include_self=True):
                if isinstance(sublayer, paddle.nn.Embedding) and sublayer._sparse:
                    raise ValueError(
                        f"data_parallel: {name!r} is an Embedding with sparse=True; expected "
                        "sparse=False on the CPU: gloo cannot average sparse gradients."
                    )
        return paddle.DataParallel(layer, **options)

    def unwrap(self, layer: Any) -> Any:
        """Your layer in what data_parallel gave: its attributes and methods are there."""
        return state.unwrap(layer)

    def register_stateful(self, *names: str) -> None:
        """Names attributes with plain values that are state: numbers, texts, lists, arrays."""
        for name in names:
            if not hasattr(self, name):
                raise AttributeError(f"register_stateful: self.{name} does not exist (yet).")
            if name not in self._registered:
                self._registered.append(name)

    def exclude_from_state(self, *names: str) -> None:
        """Names attributes that are not state: a frozen judge, which is built anew each time."""
        for name in names:
            if not hasattr(self, name):
                raise AttributeError(f"exclude_from_state: self.{name} does not exist (yet).")
            if name not in self._excluded:
                self._excluded.append(name)

    # --- run -----------------------------------------------------------------------------

    def run(self) -> int:
        """Trains to the end, from wherever the state is, and closes.

        Returns:
            The exit code of the process: 0.

        Raises:
            BaseException: Whatever training raised, after everything was closed.
        """
        try:
            if not self._resumed:
                self.resume_or_load()
            if self._is_last():
                self.logger.info(
                    "FINISHED already, at iteration %d in epoch %d. To train on, raise "
                    "training.max_iteration or max_epoch; to start over, --fresh.",
                    self.iteration,
                    self.epoch,
                )
            else:
                self._train_with_events()
        except BaseException as error:
            self._close_after(error)
            raise
        self.close()
        return 0

    def _train_with_events(self) -> None:
        try:
            self.on_train_begin()
            self.train()
        except BaseException as error:
            failure = error  # the name of an except clause is gone when the lambda runs
            self._quietly(lambda: self.on_exception(failure), "on_exception")
            self._quietly(self.on_train_end, "on_train_end")
            raise
        self.on_train_end()

    def train(self) -> None:
        """The loop: batches until the end, and between them whatever is due."""
        self._plan()
        self._watch.start(self.iteration)
        batch_end = "on_train_batch_end" in self._listened
        self._running = True
        while self._running:
            if self._batches.ended:
                self._begin_pass()
            self.iteration += 1
            self.train_batch()
            if batch_end:
                self.on_train_batch_end()
            if self.iteration >= self._next_due or self._batches.ended:
                self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """Logs, validates, ends the pass, stops, saves: in this order, each if it is due.

        Validation comes before saving and saving last, so that a checkpoint holds everything
        that happened in its iteration.
        """
        training = self.config.training
        ended, last = self._batches.ended, self._is_last()
        if training.log_interval and (self._falls_on(training.log_interval) or last):
            self._log()
        if self._falls_on(training.valid_interval) or last and self._is_wanted("valid"):
            self._validate()
        if ended:
            self._end_pass()
        stopping = self._agree_on_stopping()
        if (
            self._falls_on(training.save_interval)
            or ended
            and _divides(training.save_every_epoch, self.epoch)
            or (last or stopping)
            and self._is_wanted("save")
        ):
            self.save()
        self._running = not (last or stopping)
        self._plan()

    def _plan(self) -> None:
        """Decides until which iteration the loop need not look at anything."""
        training = self.config.training
        intervals = (training.log_interval, training.valid_interval, training.save_interval)
        due = [(self.iteration // n + 1) * n for n in intervals if n]
        due += [training.max_iteration] if training.max_iteration else []
        due += [self._next_agreement] if self.parallel else []
        self._next_due = 0 if self._stop_reason else min(due, default=_NEVER)

    def _falls_on(self, interval: int) -> bool:
        return _divides(interval, self.iteration)

    def _is_wanted(self, what: str) -> bool:
        """Whether validating or saving ("valid", "save") is not switched off altogether."""
        training = self.config.training
        return bool(training[f"{what}_interval"] or training[f"{what}_every_epoch"])

    def _is_last(self) -> bool:
        """Whether the iteration that is done is the last one that the config asks for."""
        training = self.config.training
        if training.max_iteration and self.iteration >= training.max_iteration:
            return True
        return bool(training.max_epoch and self._batches.ended and self.epoch >= training.max_epoch)

    def stop(self, reason: str = "stop() was called") -> None:
        """Ends training after the iteration under way, on all ranks, with a checkpoint.

        Args:
            reason: For the log.
        """
        self._stop_reason = reason
        self._next_due = 0

    def _agree_on_stopping(self) -> bool:
        """Whether to stop here: the same answer on every rank."""
        reasons = [self._stop_reason]
        if self.parallel:
            if self.iteration < self._next_agreement:
                return False
            reasons = self._ask_all_ranks()
        self._stop_reason = next(filter(None, reasons), "")
        if self._stop_reason:
            self.logger.info("[%d] stopping: %s", self.iteration, self._stop_reason)
        return bool(self._stop_reason)

    def _ask_all_ranks(self) -> list[str]:
        # All ranks take the same next iteration, so none has to look at a clock between.
        now = time.monotonic()
        began, at = self._last_agreement
        seconds = (now - began) / max(self.iteration - at, 1)
        answers = distributed.gather_objects((self._stop_reason, seconds))
        slowest = max(seconds for _, seconds in answers)
        self._last_agreement = (now, self.iteration)
        self._next_agreement = self.iteration + max(
            1, int(_STOP_CHECK_SECONDS / max(slowest, 1e-9))
        )
        return [reason for reason, _ in answers]

    # --- data ----------------------------------------------------------------------------

    def read_batch(self) -> Any:
        """The next training batch of this rank; passes into the next epoch by itself."""
        began = self._watch.clock()
        if self._batches.ended:
            self._begin_pass()
        batch = next(self._next_batch)
        self.batch_in_epoch += 1
        self._watch.batches += 1
        self._watch.data_seconds += self._watch.clock() - began
        return batch

    def _begin_pass(self) -> None:
        self._end_pass()  # if train_batch reads on over the end of one
        self.new_epoch()
        self.on_train_epoch_begin()

    def new_epoch(self) -> None:
        """Begins a pass over the training data."""
        self.epoch += 1
        self._open_pass(0)

    def _end_pass(self) -> None:
        if self._pass_closed:
            return
        self._pass_closed = True
        self.on_train_epoch_end()
        if _divides(self.config.training.valid_every_epoch, self.epoch):
            self._validate()

    def _open_pass(self, position: int) -> None:
        assert self._feed is not None
        self._batches.close()
        self._batches = self._feed.open(self.epoch, position)
        self._next_batch = iter(self._batches)
        self._pass_closed = False
        self._pass_start = (position, self._batches.first)
        self.batch_in_epoch = self._batches.first

    def _data_position(self) -> dict[str, Any]:
        """Where in the data training stands, counted in batches of all ranks."""
        position, first = self._pass_start
        return {
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "position": position + (self.batch_in_epoch - first) * self.world_size,
            "ended": self._batches.ended,
        }

    def _set_data_position(self, values: Mapping[str, Any]) -> list[str]:
        """Goes to where training stood; what of it costs exactness, in words."""
        self.epoch = values["epoch"]
        if values["ended"]:
            self._batches = _NO_BATCHES
            self._pass_start = (values["position"], values["batch_in_epoch"])
            self.batch_in_epoch = values["batch_in_epoch"]
        else:
            self._open_pass(values["position"])
        return []

    # --- evaluation ----------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Runs valid() in eval mode, without gradients, under random states of its own.

        Returns:
            What valid() gave on rank 0, as numbers; on every rank.
        """
        with self._evaluating("valid"):
            self.on_evaluate_begin()
            results = self._agreed(self.valid())
            self._log_results(results)
            self.on_evaluate_end(results)
        return results

    def _validate(self) -> None:
        if self._validated_at != self.iteration:
            self._validated_at = self.iteration
            with self._evaluating("valid"):  # here, too: evaluate may be overridden
                self.evaluate()

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """This rank's share of the validation data: each sample exactly once over all ranks.

        Args:
            loader: self.valid_loader by default. With an IterableDataset or another iterable
                each rank gets all of it: sharding is yours.

        Returns:
            The batches, possibly none.
        """
        loader = self.valid_loader if loader is None else loader
        if loader is None:
            raise ValueError("self.valid_loader: not set by setup_dataloader; expected a loader.")
        share = Share(self.config.training.seed, self.rank, self.world_size)
        return iter(make_feed(loader, "self.valid_loader", share).once(rng.VALID, self.iteration))

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """The mean of each metric over the ranks, by weight. Call it once, after the loop.

        Args:
            metrics: Numbers or tensors of one, each a mean over this rank's share.
            weight: The size of the share, in samples. With 0 the metrics are not looked at.

        Returns:
            The same on every rank; empty if all weights are 0.
        """
        self._be_patient("average")
        return distributed.weighted_average(metrics, weight)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Call it once, after the loop."""
        self._be_patient("gather")
        return distributed.gather_objects(value)

    def _be_patient(self, what: str) -> None:
        # The ranks' shares may differ by more than the 30 s that a collective waits.
        if self.parallel and self.phase != "train":
            distributed.wait_for_all(what)

    @contextlib.contextmanager
    def _evaluating(self, phase: str) -> Iterator[None]:
        """Everything that evaluation must not leave behind: mode, gradients, random states."""
        if self.phase != "train":
            yield
            return
        layers = [s for layer in self._find_state().layers.values() for s in _all_layers(layer)]
        modes = [layer.training for layer in layers]
        seed = rng.derive(self.config.training.seed, rng.VALID, self.iteration, self.rank)
        self.phase = phase
        try:
            with self._watch.pause(), rng.isolated(seed), paddle.no_grad():
                for layer in layers:
                    layer.training = False
                yield
        finally:
            self.phase = "train"
            self._phase_meter = Meter()
            for layer, mode in zip(layers, modes, strict=True):
                layer.training = mode

    def _agreed(self, results: Mapping[str, Any] | None) -> dict[str, float]:
        if results is not None and not isinstance(results, Mapping):
            raise TypeError(f"valid: returned {results!r}; expected numbers by name, or None.")
        logged = self._phase_meter.means()
        numbers = {k: distributed.number(v) for k, v in {**logged, **(results or {})}.items()}
        self._be_patient("valid")
        return distributed.broadcast_object(numbers)

    # --- logging -------------------------------------------------------------------------

    def log(self, mapping: Mapping[str, Any] | None = None, /, **scalars: Any) -> None:
        """Notes scalars of this iteration; at log_interval their means become one line.

        Args:
            mapping: Numbers or one-element tensors by name.
            **scalars: The same as keywords.
        """
        meter = self._meter if self.phase == "train" else self._phase_meter
        meter.add(self.iteration, {**mapping, **scalars} if mapping else scalars)

    def _log(self) -> None:
        self._check_finite()
        metrics = {f"train/{name}": mean for name, mean in self._meter.means().items()}
        metrics |= self._learning_rates() | self._speed()
        if "on_log" in self._listened:
            self.on_log(metrics)
        self._write_line(metrics)

    def _log_results(self, results: Mapping[str, float]) -> None:
        self._last_results = (self.iteration, dict(results))
        self._write_line({f"valid/{name}": value for name, value in results.items()})

    def _write_line(self, metrics: Mapping[str, float]) -> None:
        shown: dict[str, Any] = {**metrics, "epoch": self.epoch}
        if "speed/seconds_left" in shown:
            shown["time_left"] = _as_clock(shown.pop("speed/seconds_left"))
        self.logger.info("%s", line(self.iteration, shown))
        self._metrics_file.write(self.iteration, self.epoch, metrics)
        for tag, value in metrics.items():
            self.visualizer.add_scalar(tag, value, self.iteration)

    def _learning_rates(self) -> dict[str, float]:
        optimizers = self._find_state().optimizers
        rates = {f"train/lr/{name}": float(o.get_lr()) for name, o in optimizers.items()}
        return rates if len(rates) > 1 else {"train/lr": rate for rate in rates.values()}

    def _speed(self) -> dict[str, float]:
        assert self._feed is not None
        steps, batches, waited = self._watch.speed(self.iteration)
        speed = {"speed/steps_per_second": steps, "speed/data_wait": waited}
        if self._feed.batch_size:
            samples = batches * self._feed.batch_size * self.world_size
            speed["speed/samples_per_second"] = samples
        left = self._iterations_left()
        if left is not None and steps > 0:
            speed["speed/seconds_left"] = left / steps
        return speed

    def _iterations_left(self) -> int | None:
        training = self.config.training
        limits = [training.max_iteration] if training.max_iteration else []
        if training.max_epoch and self.batches_per_epoch:
            per_iteration = training.accumulation_steps
            limits.append(training.max_epoch * self.batches_per_epoch // per_iteration)
        return max(min(limits) - self.iteration, 0) if limits else None

    def _check_finite(self) -> None:
        """Acts on a logged training scalar that is not finite, before a line or a checkpoint."""
        policy = self.config.training.nonfinite
        if policy == "ignore":
            return
        bad = [
            f"{name}={value} at iteration {iteration}"
            for name, pairs in self._meter.numbers().items()
            for iteration, value in pairs
            if not math.isfinite(value)
        ]
        if not bad:
            return
        text = f"not finite: {', '.join(bad[:5])}{' …' if len(bad) > 5 else ''}"
        if policy == "warn":
            self.logger.warning("[%d] %s", self.iteration, text)
            return
        newest = self._newest_saved or "none was written yet"
        raise NonFiniteError(
            f"{text}. No checkpoint holds it; the last good one: {newest}. Lower the learning "
            "rate or clip gradients; training.nonfinite: warn goes on."
        )

    # --- state ---------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of now, unless this iteration has one already."""
        if self._saved_at == self.iteration and self._newest_saved:
            return
        with self._watch.pause():
            self._check_finite()
            self._note_score()
            self._newest_saved = self._checkpointer.save()
            self._saved_at = self.iteration
            self.visualizer.flush()
            self.logger.info("[%d] saved %s", self.iteration, self._newest_saved.name)

    def resume_or_load(self) -> None:
        """Brings the state back: this run's own, else checkpoint_path's, else init_model_path's.

        Raises:
            CheckpointError: It is damaged or does not fit.
        """
        self._resumed = True
        path = self._own_checkpoint
        other = getattr(self.args, "checkpoint_path", None)
        if path is None and other:
            path = distributed.on_rank_zero(lambda: find_checkpoint(Path(other)), "checkpoint_path")
        if path is None:
            rng.seed_all(rng.derive(self.config.training.seed, rng.TRAIN, self.rank))
            return
        notes = self._checkpointer.restore(path)
        self._validated_at = self._saved_at = self.iteration
        self._newest_saved = path
        self.logger.info(
            "resumed %s: iteration %d, epoch %d, batch %d of the pass",
            path,
            self.iteration,
            self.epoch,
            self.batch_in_epoch,
        )
        for note in notes:
            self.logger.warning("not exact: %s", note)

    def _find_state(self) -> state.Found:
        return state.find(self._user_attributes(), [*self._excluded, *self._registered])

    def _user_attributes(self) -> dict[str, Any]:
        own = self._template_attributes
        return {name: value for name, value in vars(self).items() if name not in own}

    def _note_score(self) -> None:
        """Remembers how good this checkpoint is, for keep_best."""
        training = self.config.training
        name = training.monitor.removeprefix("valid/")
        iteration, results = self._last_results
        if not name or iteration != self.iteration or not results:
            return
        if name not in results:
            raise ConfigError(
                f"training.monitor: {training.monitor!r} given; expected one of the metrics that "
                f"valid() returned: {', '.join(results)}."
            )
        if not math.isnan(results[name]):
            sign = -1 if training.monitor_mode == "max" else 1
            scores = [*self._scores, (iteration, results[name])]
            self._scores = sorted(scores, key=lambda score: sign * score[1])[: training.keep_best]

    # --- closing -------------------------------------------------------------------------

    def terminal(self) -> None:
        """The last thing of a start, once, also after a failure. Does nothing here."""

    def close(self) -> None:
        """Ends what setup began. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.ExitStack() as steps:  # each one runs, whatever the one before did
                steps.callback(self._output.release)
                steps.callback(self.visualizer.close)
                steps.callback(self._batches.close)
                steps.callback(self.terminal)
        except Exception as error:
            self.logger.error("while closing: %r", error, exc_info=error)
            raise
        finally:
            close_log(self.logger)

    def _close_after(self, error: BaseException) -> None:
        """Closes on the way out with an error, which nothing here may hide."""
        self.logger.error("[%d] ended by %r", self.iteration, error, exc_info=error)
        self._quietly(self.close, "close")
        self._quietly(lambda: ExperimentBase.close(self), "close")  # if an override failed

    def _quietly(self, function: Callable[[], Any], name: str) -> None:
        try:
            function()
        except Exception as error:
            self.logger.error("in %s, after the failure: %r", name, error, exc_info=error)


_NEVER = 1 << 62  # an iteration that is not reached
_NO_BATCHES = Batches(lambda batches: iter(()), 0)
_NO_BATCHES.ended = True


def _divides(interval: int, number: int) -> bool:
    """Whether the number falls on the interval; never on an interval of 0."""
    return interval > 0 and number % interval == 0


def _all_layers(layer: Any) -> list[Any]:
    return list(layer.sublayers(include_self=True))


def _as_clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _default_device() -> str:
    return "gpu" if paddle.device.cuda.device_count() else "cpu"
