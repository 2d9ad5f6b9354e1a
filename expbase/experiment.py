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
import logging.handlers
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle

from expbase import checks, distributed
from expbase.config import (
    Config,
    ConfigError,
    check_training,
    complete,
    get_default_training_config,
)
from expbase.data.iterator import TrainIterator
from expbase.data.loaders import FirstBatches, LoaderAdapter, Shard, adapt_loader
from expbase.evaluation import Evaluation
from expbase.events import BATCH_EVENTS, Events, Handlers
from expbase.life import Life
from expbase.logs import METRICS, MetricsFile, close_log, line, open_log, silent_log
from expbase.metrics import Journal
from expbase.record import card, crash, provenance
from expbase.record.hang import HangWatch
from expbase.record.run_record import LEDGER, Ledger
from expbase.run_dir import Output
from expbase.state import checkpoint, objects, rng
from expbase.state.checkpointer import Checkpointer, choose
from expbase.state.weights import export_model, read_weights, write_weights
from expbase.state.weights import load as load_weights
from expbase.stopping import StopReason, StopRequests
from expbase.stopwatch import Stopwatch
from expbase.training import Stepper
from expbase.visualizer import Visualizer


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
        test_loader: Yours, if there is one: `--evaluate` takes it.
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

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        checks.check_class(type(self), ExperimentBase, _YOURS)
        if getattr(args, "output", None) in (None, ""):
            raise ConfigError("args.output: not given; expected the directory of the run.")
        # What mixins add is there, however the config was made.
        self.config = complete({**type(self).default_config(), **config})
        self.args = args
        self.model: Any = None
        self.optimizer: Any = None
        self.train_loader: Any = None
        self.valid_loader: Any = None
        self.test_loader: Any = None
        self.iteration = 0
        self.epoch = 0
        self.phase = "train"
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        self.parallel = self.world_size > 1
        self.output_dir = Path(args.output).absolute()
        self.checkpoint_dir = self.output_dir / checkpoint.FOLDER
        self.logger = silent_log()  # until setup_logger
        self._early_lines = logging.handlers.MemoryHandler(1000, flushLevel=1000)
        self.logger.addHandler(self._early_lines)
        self.visualizer = Visualizer(None)

        self._output = Output(self.output_dir)
        self._log_path = self.output_dir / f"worker_{self.rank}.log"
        self._moved_aside: Path | None = None
        self._watch = Stopwatch()
        self._journal = Journal(self)
        self._checkpointer = Checkpointer(self, self.checkpoint_dir)
        self._resumable: Path | None = None  # this run's own checkpoint, found in setup
        self._resumed = False
        self._saved_at = self._validated_at = -1
        self._results: dict[str, float] = {}  # of the last validation
        self._registered: list[str] = []
        self._excluded: list[str] = []
        self._cursor = TrainIterator(_NOTHING)
        self._pass_is_closed = True
        self._wishes = StopRequests(None, 0)
        self._agreement = distributed.Agreement(0)
        self._stopped_by = StopReason.NONE
        self._stop_text = ""
        self._all_stop = False
        self._hang_watch: HangWatch | None = None
        self._failure_watch: distributed.FailureWatch | None = None
        self._ledger = Ledger(None)
        self._own_states: dict[str, Any] = {}  # what on_save_checkpoint returned last
        self._next_due = 0
        self._running = self._closed = self._is_set_up = False
        self._save_wanted = self._at_end_of_iteration = False
        self._counts = True  # whether the checkpoint to be saved may be the best one
        self._passes_seen = 0  # that were used up when the loop looked last
        self._updated = 0  # the iteration whose update is known to be done
        self._failure: BaseException | None = None  # that was logged
        self._has_looked = False  # at what the first update showed
        self._handlers = Handlers(self)
        self._hears_batches = not self._handlers.heard.isdisjoint(BATCH_EVENTS)
        self._stepper = Stepper(self)
        self._evaluation = Evaluation(self)
        self._looks_only = any(
            getattr(args, name, None) is not None for name in ("evaluate", "export")
        )
        self._looked_at = ""  # the checkpoint that load_checkpoint brought back
        self._trained = False
        self._template_attributes = set(vars(self)) - {"model", "optimizer"}

    @classmethod
    def default_config(cls) -> Config:
        """The config with all its keys and default values; add sections of your own.

        Returns:
            A Config with the `training` section.
        """
        return Config({"training": get_default_training_config()})

    @property
    def batch_in_epoch(self) -> int:
        """Batches that this rank has read in this pass."""
        return self._cursor.batch_in_epoch

    @property
    def batches_per_epoch(self) -> int | None:
        """Of this rank; None if nobody knows. Known after setup_dataloader."""
        return self._cursor.feed.batches_per_epoch

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
        """One validation, on every rank; in eval mode and without gradients already.

        Returns:
            Numbers by name; rank 0's count. `self.average` makes them the same on all.
        """
        raise NotImplementedError

    # --- setup ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Everything before the first batch.

        Raises:
            ConfigError: What the config or the args say cannot be done.
            TypeError, ValueError: The experiment lacks something, or something does not fit.
        """
        if "_template_attributes" not in vars(self):
            raise TypeError(
                f"{type(self).__name__}.__init__: did not call super().__init__(config, args)."
            )
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

        self._fire("on_setup_begin")
        self.setup_dataloader()
        feed = self._feed_of(self.train_loader, "self.train_loader")
        few = self.config.training.overfit_batches
        self._cursor = TrainIterator(FirstBatches(feed, few) if few else feed)
        self.setup_model()
        self.startup()
        self.iteration = 0
        self.epoch = 0
        self.check_setup()
        self._is_set_up = True
        self._fire("on_setup_end")

    def prepare(self) -> None:
        """The first thing in setup: downloads, environment. Does nothing here."""

    def startup(self) -> None:
        """After setup_model: fills parameters, say. A state that comes back overrides it."""

    def setup_device(self) -> None:
        """Has paddle use `args.device`; by default the GPU if there is one, else the CPU.

        Raises:
            ConfigError: There is no such device, or the processes would share one.
        """
        device = getattr(self.args, "device", None) or distributed.default_device()
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
                f"this machine has and this paddle was built for. ({error})"
            ) from error
        if self.config.training.deterministic and device.startswith("gpu"):
            paddle.set_flags({"FLAGS_cudnn_deterministic": 1, "FLAGS_embedding_deterministic": 1})

    def init_parallel(self) -> None:
        """Connects the processes."""
        distributed.init_parallel(paddle.device.get_device())
        self._failure_watch = distributed.FailureWatch(self._end_with_another_rank)

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory.

        Raises:
            ConfigError: It cannot be used, is in use, or holds a run of another config.
        """
        if self._looks_only:  # it writes nothing, so it needs no lock
            return self._output.expect()
        fresh, force = getattr(self.args, "fresh", False), getattr(self.args, "force", False)
        self._moved_aside = distributed.on_rank_zero(
            lambda: self._output.claim(self.config, fresh=fresh, force=force), "output directory"
        )
        if self.rank > 0:  # perhaps on another machine
            self._output.make()
            self._output.lock(self.rank)

    def dump_config(self) -> None:
        """Writes the resolved config, once in the life of a run."""
        if self.rank == 0 and not self._looks_only:
            self._output.dump(self.config)

    def setup_visualizer(self) -> None:
        """Prepares VisualDL; its file is opened at the first record."""
        writes = self.rank == 0 and not self._looks_only
        self.visualizer = Visualizer(self.output_dir if writes else None)

    def setup_logger(self) -> None:
        """Opens this rank's text log and, on rank 0, metrics.jsonl."""
        self.logger = open_log(None if self._looks_only else self._log_path, echo=self.rank == 0)
        for record in self._early_lines.buffer:
            self.logger.handle(record)
        if self._looks_only:
            return
        limit = self.config.training.time_limit_seconds
        self._wishes = StopRequests(self.output_dir / "STOP" if self.rank == 0 else None, limit)
        if self.rank == 0:
            self._journal.file = MetricsFile(self.output_dir / METRICS)
            self._ledger = Ledger(self.output_dir / LEDGER)
        if self._moved_aside is not None:
            self.logger.info("the run that was here is now in %s", self._moved_aside)

    def setup_checkpointer(self) -> None:
        """Looks for a checkpoint of this run; that it is continued is the first thing said."""
        if not self._looks_only:
            self._resumable = self._checkpointer.newest()
        if self._resumable is not None:
            self.logger.info(
                "CONTINUING the run in %s from %s (--fresh starts over and keeps the old run)",
                self.args.output,
                self._resumable.name,
            )
        elif not self._looks_only and (self.output_dir / LEDGER).exists():
            self.logger.info("the run in %s has no checkpoint: it begins anew", self.args.output)

    def check_setup(self) -> None:
        """Checks that what training needs stands on self, and says what there is.

        Raises:
            ValueError: Something is missing, or would fail at the first batch.
        """
        found = self._find_state()
        names = distributed.gather_objects(found.names())
        checks.check_names(vars(self), ExperimentBase)
        checks.check_ranks(names)
        checks.check(found, self._cursor.feed)
        self._checkpointer.expect(found.names())
        for text in card.card(self, found):
            self.logger.info("%s", text)
        if self._looks_only:
            return
        if self.rank == 0 and (text := checks.unsaved_validations(self.config.training)):
            self.logger.warning("%s", text)
        for name in checks.not_updated(objects.find(self._user_attributes())):
            self.logger.warning(
                "self.%s has trainable parameters, and no optimizer on self updates them.", name
            )
        for name in checks.unsynchronized(found) if self.parallel else ():
            self.logger.warning(
                "self.%s has trainable parameters and is not in self.data_parallel(…): each rank "
                "trains its own.",
                name,
            )

    # --- called in setup_model -----------------------------------------------------------

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """The layer in a paddle.DataParallel if there are several processes, else itself.

        Args:
            layer: With trainable parameters.
            options: Of paddle.DataParallel: find_unused_parameters=True, say.

        Raises:
            ValueError: It has a sparse Embedding, which gloo cannot average.
        """
        return distributed.data_parallel(layer, **options) if self.parallel else layer

    def unwrap(self, layer: Any) -> Any:
        """Your layer in what data_parallel gave: its attributes and methods are there."""
        return objects.unwrap(layer)

    def register_stateful(self, *names: str) -> None:
        """Names attributes with plain values that are state: numbers, texts, lists, arrays."""
        self._note_names(self._registered, names)

    def exclude_from_state(self, *names: str) -> None:
        """Names attributes that are not state: a frozen judge that is built anew each time."""
        self._note_names(self._excluded, names)

    def _note_names(self, noted: list[str], names: tuple[str, ...]) -> None:
        if self._is_set_up:
            raise RuntimeError("state is named in setup_model; a resumed run must know it then.")
        for name in names:
            if not hasattr(self, name):
                raise AttributeError(f"self.{name} does not exist; set it before you name it.")
            if name not in noted:
                noted.append(name)

    # --- the run -------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the end, from wherever the state is, and closes.

        Raises:
            SystemExit: It was stopped by a signal or a time limit; with the exit code for that.
            BaseException: Whatever training raised, after everything was closed.
        """
        self._need_setup("run")
        with self._wishes.heard(self._wake), self.closing():
            if not self._resumed:
                self.resume_or_load()
            self._watch_for_hanging()
            if self._is_last():
                self.logger.info(
                    "FINISHED already: iteration %d, epoch %d. To train on, raise "
                    "training.max_iteration or max_epoch; --fresh starts over.",
                    self.iteration,
                    self.epoch,
                )
            else:
                self.logger.info("%s", card.goal(self))
                with card.live(self):
                    self._check_sanity()
                    self._train_with_events()
                self._say_the_end()
        if self._stopped_by.exit_code:
            sys.exit(self._stopped_by.exit_code)

    def _need_setup(self, name: str) -> None:
        if not self._is_set_up:
            raise RuntimeError(f"{name}: called before setup(); expected exp.setup() first.")

    def _watch_for_hanging(self) -> None:
        seconds = self.config.training.hang_seconds
        if seconds and self._hang_watch is None:
            self._hang_watch = HangWatch(seconds, self._progress, self.logger, self._log_path)

    def _progress(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "iteration": self.iteration,
            "batch_in_epoch": self.batch_in_epoch,
            "evaluated_batches": self._evaluation.batches_given,
        }

    @property
    def finished(self) -> bool:
        """Whether training came to its end, by the config or by stop(); not broken off."""
        over = self._is_last() or self._stopped_by is StopReason.CALL
        return self._resumed and over and not self._running and self._failure is None

    def _train_with_events(self) -> None:
        try:
            seed = rng.derive(self.config.training.seed, rng.SETUP, 1, self.rank)
            with rng.isolated(seed):  # it comes once per start: training must not feel it
                self._fire("on_train_begin")
            self.train()
            self._trained = True
        except BaseException as error:
            self._running, self._trained = False, True
            self._log_failure(error)
            self._quietly("crash", crash.leave, self, error)
            for event, *args in (("on_exception", error), ("on_train_end",)):
                for name, handler in self._handlers.each(event, *args):
                    self._quietly(name, handler)
            raise
        self._fire("on_train_end")

    def train(self) -> None:
        """The loop: batches until the end, and between them whatever is due."""
        self._agreement = distributed.Agreement(self.iteration)
        self._plan()
        self._watch.start(self.iteration)
        batch_end = "on_train_batch_end" in self._handlers.heard
        cursor = self._cursor
        self._stopped_by = self._agreed_wish()  # stop() may have been called in on_train_begin
        self._running = not self._stopped_by
        self._passes_seen = self._passes_over()
        while self._running:
            if cursor.batches.ended:
                self._begin_pass()
            self.iteration += 1
            self.train_batch()
            if batch_end:
                self._updated = self.iteration
                self._fire("on_train_batch_end")
            if self.iteration >= self._next_due or cursor.batches.ended:
                self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """Logs, validates, ends the pass, stops, saves: in this order, each if it is due.

        Validation comes before saving and saving last, so that a checkpoint holds everything
        that happened in its iteration.
        """
        if not self._has_looked:
            self._look_once()
        training = self.config.training
        ended, last = self._cursor.batches.ended, self._is_last()
        self._updated = self.iteration
        seen, self._passes_seen = self._passes_seen, self._passes_over()
        if self._falls_on(training.log_interval) or (last and training.log_interval):
            self._journal.log()
        if self._falls_on(training.valid_interval) or (last and self._is_wanted("valid")):
            self._validate()
        if ended:
            self._end_pass()
        if _passes(training.valid_every_epoch, seen, self._passes_seen):
            self._validate()
        self._stopped_by = self._agreed_wish()
        ending = last or bool(self._stopped_by)
        due = (
            self._save_wanted
            or self._falls_on(training.save_interval)
            or _passes(training.save_every_epoch, seen, self._passes_seen)
        )
        if due or (ending and self._is_wanted("save")):
            # A signal's stop at another iteration must not choose another best checkpoint.
            self._save_at_end_of_iteration(
                counts=due or last or self._stopped_by is StopReason.CALL
            )
        self._checkpointer.raise_failure()
        self._running = not ending
        self._plan()

    def _save_at_end_of_iteration(self, *, counts: bool) -> None:
        self._save_wanted, self._at_end_of_iteration, self._counts = False, True, counts
        try:
            self.save()
        finally:
            self._at_end_of_iteration = False

    def _look_once(self) -> None:
        """After the first update of a start: what would otherwise come out too late."""
        self._has_looked = True
        self._checkpointer.refuse_newcomers(self._find_state())
        if not self._watch.batches:
            self.logger.warning(
                "train_batch did not call self.read_batch(): the data it takes is not in the order "
                "of the seed, and is not continued after a stop."
            )
        self._stepper.check_complete()
        checks.check_accumulation(self.config.training.accumulation_steps, self._stepper.used)
        for event, helper in checks.unfired(self._handlers.heard, self._stepper.used):
            self.logger.warning(
                "%s does not come (%s): train_batch did not call self.%s().",
                event,
                ", ".join(self._handlers.subscribers(event)),
                helper,
            )

    def _say_the_end(self) -> None:
        self._checkpointer.close()  # its last line comes before ours
        for text in (*card.summary(self), card.ending(self)):
            self.logger.info("%s", text)
        if self._stopped_by:
            self._wishes.fulfilled()

    def _plan(self) -> None:
        """Decides until which iteration the loop need not look at anything."""
        training = self.config.training
        intervals = (training.log_interval, training.valid_interval, training.save_interval)
        due = [(self.iteration // n + 1) * n for n in intervals if n]
        due += [training.max_iteration] if training.max_iteration else []
        self._next_due = min([*due, self._agreement.next_iteration])  # soon, after the first one
        if self._wishes.wish and not self.parallel:
            self._wake()

    def _passes_over(self) -> int:
        """Passes that are used up."""
        return self.epoch - (not self._cursor.batches.ended)

    def _falls_on(self, interval: int) -> bool:
        return _passes(interval, self.iteration - 1, self.iteration)

    def _is_wanted(self, what: str) -> bool:
        """Whether validating or saving ("valid", "save") is not switched off altogether."""
        training = self.config.training
        return bool(training[f"{what}_interval"] or training[f"{what}_every_epoch"])

    def _is_last(self) -> bool:
        """Whether the iteration that is done is the last one that the config asks for."""
        training = self.config.training
        if training.max_iteration and self.iteration >= training.max_iteration:
            return True
        if not training.max_epoch or self.epoch < training.max_epoch:
            return False
        return self._cursor.batches.ended or self.epoch > training.max_epoch

    def stop(self, reason: str = "stop() was called", *, on_all_ranks: bool = False) -> None:
        """Ends training after the iteration under way, with a checkpoint.

        Args:
            reason: For the log.
            on_all_ranks: That all ranks call it in this iteration, so that it is the last one.
                Else they ask each other, about twice a second, and end at a later one together.
        """
        if self.phase == "sanity":
            return
        self._stop_text = reason
        self._all_stop = self._all_stop or on_all_ranks
        self._wishes.add(StopReason.CALL)
        self._wake()

    def _wake(self) -> None:
        self._next_due = 0

    def _agreed_wish(self) -> StopReason:
        """The wish to stop that all ranks act on here; NONE: go on."""
        if self._all_stop:
            return StopReason.CALL
        if self.iteration >= self._agreement.next_iteration:
            self._wishes.look()
            return StopReason(self._agreement.greatest(self.iteration, self._wishes.wish))
        return StopReason.NONE if self.parallel else self._wishes.wish

    # --- the parts of an update; by hand is legal, too ------------------------------------

    def micro_batches(self) -> Iterator[Any]:
        """The training.accumulation_steps batches of one update, for a loop in train_batch.

        Among several ranks gradients are averaged with the last one. A pass may end in between;
        the next one then begins within the update. A by-hand loss.backward() in it divides the
        loss by training.accumulation_steps itself.
        """
        return self._stepper.micro_batches()

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss, in micro_batches divided by their number.

        Args:
            loss: Of one batch, a mean over its samples. It goes through the GradScaler on self,
                if there is one.
        """
        self._stepper.backward(loss)

    def step_optimizers(self, *optimizers: Any) -> None:
        """Unscales the gradients, steps, clears them. Schedules are yours to step.

        Args:
            *optimizers: All on self by default.
        """
        self._stepper.step(optimizers)

    @property
    def stepping(self) -> tuple[Any, ...]:
        """The optimizers that step_optimizers is about; empty outside of it."""
        return self._stepper.optimizers

    # --- data ----------------------------------------------------------------------------

    def read_batch(self) -> Any:
        """The next training batch of this rank; passes into the next epoch by itself."""
        if self.phase != "train":
            raise RuntimeError(
                f"read_batch: called in the phase {self.phase!r}, where it would take training "
                "data; expected valid_batches()."
            )
        watch, cursor = self._watch, self._cursor
        began = watch.clock()
        if cursor.batches.ended:
            self._begin_pass()
        batch = self._read_with_events() if self._hears_batches else cursor.read()
        watch.batches += 1
        watch.data_seconds += watch.clock() - began
        return batch

    def _read_with_events(self) -> Any:
        self._fire("on_fetch_data_begin")
        batch = self._cursor.read()
        self._fire("on_fetch_data_end")
        self._fire("on_train_batch_begin", batch, self._cursor.batches.indices)
        return batch

    def new_epoch(self) -> None:
        """Begins a pass over the training data."""
        self.epoch += 1
        self._cursor.open(self.epoch)

    def _begin_pass(self) -> None:
        if not self._pass_is_closed:  # train_batch reads on over the end
            self._wake()
            self._end_pass()
        self.new_epoch()
        self._pass_is_closed = False
        self._fire("on_train_epoch_begin")

    def _end_pass(self) -> None:
        if self._pass_is_closed:
            return
        self._pass_is_closed = True
        self._fire("on_train_epoch_end")

    def _feed_of(self, loader: Any, name: str) -> LoaderAdapter:
        if loader is None:
            raise ValueError(
                f"{name}: not set by setup_dataloader; expected a paddle.io.DataLoader or an "
                "iterable of batches."
            )
        return adapt_loader(
            loader, name, Shard(self.config.training.seed, self.rank, self.world_size)
        )

    # --- evaluation ----------------------------------------------------------------------

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Runs valid() in eval mode, without gradients, under random states of its own.

        Args:
            loader: What valid_batches() gives; None: self.valid_loader.

        Returns:
            What valid() gave on rank 0, as numbers; on every rank. After an update in training
            those of self.valid_loader are the validation of that iteration and logged as
            `valid/…`; others only go into the text log.
        """
        self._need_setup("evaluate")
        with self._evaluation.phase("valid", loader):
            self._fire("on_evaluate_begin")
            results = self._evaluation.agreed(self.valid())
            self._fire("on_evaluate_end", results)
            # Before the update of an iteration is done, its weights are not there yet.
            counts = self._running and self._validated_at < self._updated == self.iteration
            if loader is None and counts:
                self._validated_at, self._results = self.iteration, results
                metrics = {f"valid/{name}": number for name, number in results.items()}
                self._journal.write(metrics)
                self._journal.compare([*metrics])
            else:
                what = f" {self._looked_at}" if self._looked_at else ""
                self.logger.info("evaluated%s: %s", what, line(self.iteration, results))
        return results

    def _check_monitor(self, results: Mapping[str, float]) -> None:
        if monitor := self.config.training.monitor:
            checks.check_metric("training.monitor", monitor, results)

    def _validate(self) -> None:
        if self._validated_at != self.iteration:
            with self._evaluation.phase("valid"):  # here, too: evaluate may be overridden
                self._results = dict(self.evaluate() or {})
            self._validated_at = self.iteration
            self._check_monitor(self._results)

    def _check_sanity(self) -> None:
        """Has a broken valid() fail before the first update."""
        if num_batches := self.config.training.sanity_batches:
            with self._evaluation.trial(num_batches):
                self._fire("on_sanity_check_begin")
                results = self._evaluation.agreed(self.valid())
                self._fire("on_sanity_check_end", results)
            self._check_monitor(results)
            self.logger.info("sanity check passed: %s", line(self.iteration, results))

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """This rank's share of the validation data: each sample exactly once over all ranks.

        Args:
            loader: What evaluate was given, or self.valid_loader, by default. Of an
                IterableDataset or another iterable each rank gets what it gives: sharding is
                yours.

        Returns:
            The batches; on some rank possibly none.
        """
        return self._evaluation.batches(loader)

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """The mean of each metric over the ranks, by weight. Call it once, after the loop.

        Args:
            metrics: Numbers or tensors of one, each a mean over this rank's share.
            weight: The size of the share, in samples. With 0 the metrics are not looked at.

        Returns:
            The same on every rank; empty if all weights are 0.
        """
        self._evaluation.wait()
        return distributed.weighted_average(metrics, weight)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Call it once, after the loop."""
        self._evaluation.wait()
        return distributed.gather_objects(value)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode, no gradients and random states of its own for what you do in between.

        Training does not feel the block: for samples that a listener draws, say.
        """
        with self._evaluation.phase("predict"):
            yield

    def predict(self, loader: Any) -> list[Any]:
        """Runs predict_batch over the data, as valid is run: on every rank its share.

        Args:
            loader: A paddle.io.DataLoader or an iterable of batches; drop_last must be off.

        Returns:
            One result for each sample that the loader gives, in the order of the data set, the
            same on every rank; one that it gives twice has one. Of an iterable: in the order in
            which it comes, rank by rank.

        Raises:
            ValueError: drop_last is on, or predict_batch gave more or fewer results than samples.
        """
        self._need_setup("predict")
        with self._evaluation.phase("predict"):
            self._fire("on_predict_begin")
            results = self._evaluation.predict(loader)
            self._fire("on_predict_end", results)
        return results

    def predict_batch(self, batch: Any) -> Any:
        """What predict is to give for a batch; yours, if you use it.

        Args:
            batch: As the loader gives it.

        Returns:
            A tensor or array [B, …], a mapping or tuple of such, or a list of B results.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.predict_batch: not defined; predict needs it. Expected a "
            "method that takes a batch and returns its outputs, one per sample."
        )

    # --- logging -------------------------------------------------------------------------

    def log(self, mapping: Mapping[str, Any] | None = None, /, **scalars: Any) -> None:
        """Notes scalars of this iteration; at log_interval their means become one line.

        Args:
            mapping: Numbers or one-element tensors by name.
            **scalars: The same as keywords.
        """
        meter = self._journal.meter if self.phase == "train" else self._evaluation.meter
        meter.add(self.iteration, {**mapping, **scalars} if mapping else scalars)

    # --- state ---------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one already.

        Within training it is written at the end of the iteration under way, where a resumed run
        can go on; so call it on all ranks.
        """
        if self._running and not self._at_end_of_iteration:
            self._save_wanted = True
            self._wake()
            return
        if self._saved_at == self.iteration or self.phase == "sanity" or self._looks_only:
            return
        if self._failure is not None:
            raise RuntimeError(
                f"save: iteration {self.iteration} failed, and what stands on self is half its "
                "update; the run continues from the checkpoint before."
            )
        if self._looked_at:
            raise RuntimeError(
                f"save: what stands on self is {self._looked_at}, brought back to be looked at; "
                f"as iteration {self.iteration} it would spoil the run."
            )
        with self._watch.apart("saving"):
            self._journal.check_finite()
            self._stepper.check_complete()
            self._stepper.finish()
            validated = self._validated_at == self.iteration
            if validated:
                self._check_monitor(self._results)
            self._checkpointer.save(self._results if validated and self._counts else {})
        self._saved_at = self.iteration

    def resume_or_load(self) -> None:
        """Brings the state back: this run's own, else checkpoint_path's, else init_model_path's.

        Raises:
            CheckpointError, WeightsError: It is damaged or does not fit.
        """
        self._need_setup("resume_or_load")
        path, other = self._resumable, getattr(self.args, "checkpoint_path", None)
        if path is None and other:
            path = distributed.on_rank_zero(lambda: checkpoint.find(Path(other)), "checkpoint_path")
        if path is None and self._looked_at:
            raise RuntimeError(
                f"resume_or_load: {self._looked_at} was brought back to be looked at, and training "
                "would go on from its weights. To start from weights give args.init_model_path."
            )
        self._resumed, self._looked_at = True, ""
        if path is not None:
            self._resume(path)
        elif model_path := getattr(self.args, "init_model_path", None):
            self.load_model(model_path, partial=getattr(self.args, "init_partial", False))
        if path is not None and getattr(self.args, "init_model_path", None):
            self.logger.info("--init_model_path: not used, since the whole state comes back")
        if path is None:
            rng.seed_all(rng.derive(self.config.training.seed, rng.TRAIN, self.rank))
        self._journal.cut(to_own=self._resumable is not None)  # what came after it comes again
        if self._ledger.writes:
            facts = provenance.gather(self.output_dir, type(self), self.config)
            facts |= {"ranks": self.world_size, "resumed": path and path.name}
            self._ledger.write("start", iteration=self.iteration, **facts)

    def load_checkpoint(self, which: str, *, run: str | Path | None = None) -> None:
        """Brings back what has state from a checkpoint, to look at it.

        The models, optimizers and values on self are those of the checkpoint afterwards; the
        place in training stays, and save() is refused: the run's own checkpoints are not spoiled.

        Args:
            which: "best", "last" or the number of an iteration.
            run: Another run's output directory, or a checkpoint itself; this run by default.

        Raises:
            RuntimeError: Training is under way.
            CheckpointError: There is no such checkpoint.
        """
        if self._resumed and not self._trained:
            raise RuntimeError(
                "load_checkpoint: called before the end of training, which would go on with other "
                "weights; expected it after train(): in on_train_end, say."
            )
        self._checkpointer.close()  # the last one may still be under way
        directory = self.output_dir if run is None else Path(run)
        path = distributed.on_rank_zero(lambda: choose(directory, which), "load_checkpoint")
        assert path is not None
        counters = self._checkpointer.look_at(path)
        if not self._resumed:  # there is no other place in training
            self.iteration, self.epoch = counters["iteration"], counters["epoch"]
        self._looked_at = path.name
        self.logger.info("loaded %s (%s)", path.name, which)

    def load_best(self) -> None:
        """load_checkpoint("best"), for a final test."""
        self.load_checkpoint("best")

    def export(
        self, path: str | Path, input_spec: Sequence[Any] | None = None, layer: Any = None
    ) -> None:
        """Writes a model for inference, by paddle.jit.save, on rank 0.

        Args:
            path: Without a suffix: files of this name with paddle's own suffixes are written.
            input_spec: A paddle.static.InputSpec for each input of its forward; self.input_spec
                by default.
            layer: self.model by default.

        Raises:
            ConfigError: There is no input_spec.
        """
        layer = self.unwrap(self.model if layer is None else layer)
        spec = getattr(self, "input_spec", None) if input_spec is None else input_spec
        if spec is None:
            raise ConfigError(
                "export: no input_spec given; expected a list with a paddle.static.InputSpec for "
                "each input of the model, here or as self.input_spec."
            )
        with self._evaluation.phase("predict", layers=[layer]):
            distributed.on_rank_zero(lambda: export_model(Path(path), layer, spec), "export")
        self.logger.info("exported %s", path)

    def save_model(self, path: str | Path, layer: Any = None) -> None:
        """Writes the weights of a model, on rank 0, whole or not at all.

        Args:
            path: Ends in `.safetensors`, or in `.pdparams` for paddle.load.
            layer: self.model by default.
        """
        self._fire("on_save_model")
        layer = self.unwrap(self.model if layer is None else layer)
        distributed.on_rank_zero(lambda: write_weights(Path(path), layer), "save_model")

    def load_model(
        self, path: str | Path, *, into: str | None = None, partial: bool = False
    ) -> None:
        """Loads weights, and nothing else; what fitted goes into the log.

        Args:
            path: A checkpoint, a run, a `.safetensors` or a `.pdparams`. Nothing in it is run.
            into: The name of the layer on self; needed if the file holds one model and self has
                several, none of them called `model`.
            partial: Whether missing, additional and differently shaped weights are allowed.

        Raises:
            WeightsError: It cannot be read or does not fit; nothing was changed.
        """
        self._fire("on_load_model")
        found = distributed.on_rank_zero(lambda: read_weights(Path(path)), "load_model") or {}
        reports = load_weights(found, self._find_state().layers, into, partial=partial)
        for name, text in reports.items():
            self.logger.info("loaded %s from %s: %s", name, path, text)

    def _resume(self, path: Path) -> None:
        notes = self._checkpointer.restore(path)
        self._validated_at = self._saved_at = self.iteration
        rates = self._journal.learning_rates()
        self.logger.info(
            "resumed %s: iteration %d, epoch %d, batch %d of the pass, %s",
            path.name if path == self._resumable else path,
            self.iteration,
            self.epoch,
            self.batch_in_epoch,
            " ".join(f"{name}={rate:g}" for name, rate in rates.items()),
        )
        for key, (old, new) in self._output.changed_keys(self.config).items():
            self.logger.info(
                "config: %s: %r at the first start, %r now (state, like a learning rate under "
                "way, is the checkpoint's)",
                key,
                old,
                new,
            )
        for note in notes:
            self.logger.warning("not exact: %s", note)

    def _find_state(self) -> objects.StatefulObjects:
        return objects.find(self._user_attributes(), [*self._excluded, *self._registered])

    def _fire(self, event: str, *args: Any) -> Any:
        return self._handlers.fire(event, *args)

    def _user_attributes(self) -> dict[str, Any]:
        own = self._template_attributes
        return {name: value for name, value in vars(self).items() if name not in own}

    # --- the end -------------------------------------------------------------------------

    def terminal(self) -> None:
        """The last thing of a start, once, also after a failure. Does nothing here."""

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes after the block; an error in it is logged first, and nothing hides it."""
        try:
            yield
        except BaseException as error:
            self._close_after(error)
            raise
        self.close()

    def close(self) -> None:
        """Ends what setup began. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.ExitStack() as steps:  # each one runs, whatever the one before did
                steps.callback(self._output.release)
                steps.callback(self._note_end)
                steps.callback(self._stop_watching)
                steps.callback(self._journal.close)
                steps.callback(self._cursor.close)
                steps.callback(self._evaluation.close)
                steps.callback(self._checkpointer.close)
                steps.callback(self.terminal)
        except Exception as error:
            error.__suppress_context__ = True
            self.logger.error("while closing: %r", error, exc_info=error)
            raise
        finally:
            close_log(self.logger)

    def _close_after(self, error: BaseException) -> None:
        """Closes on the way out with an error, which nothing here may hide."""
        self._log_failure(error)
        if self._failure_watch is not None:
            self._quietly("telling the other ranks", self._failure_watch.tell, repr(error))
        self._quietly("close", self.close)
        self._quietly("close", ExperimentBase.close, self)  # if an override failed before super's

    def _end_with_another_rank(self, text: str) -> None:
        """The last thing that this rank does when another one failed; comes in a thread."""
        self.logger.error("[%d] ended, because another rank failed: %s", self.iteration, text)
        self._ledger.write("end", iteration=self.iteration, reason=text, exit_code=1)

    def _stop_watching(self) -> None:
        if self._hang_watch is not None:
            self._hang_watch.stop()
        if self._failure_watch is not None:
            self._failure_watch.stop()

    def _note_end(self) -> None:
        if not self._resumed:
            return  # it never began
        reason = repr(self._failure) if self._failure else str(self._stopped_by or "finished")
        code = 1 if self._failure else self._stopped_by.exit_code
        if isinstance(self._failure, KeyboardInterrupt):
            code = 130
        self._ledger.write("end", iteration=self.iteration, reason=reason, exit_code=code)

    def _log_failure(self, error: BaseException) -> None:
        if error is not self._failure:
            self._failure = error
            self.logger.error("[%d] ended by %r", self.iteration, error, exc_info=error)

    def _quietly(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except (Exception, SystemExit) as error:
            error.__suppress_context__ = True  # the original one was logged before
            self.logger.error("in %s, after the failure: %r", name, error, exc_info=error)

    # --- public names that the extras use ------------------------------------------------

    @property
    def life(self) -> Life:
        """Where the experiment stands."""
        return Life.TRAINING if self._running else Life.READY

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler that is an attribute of the experiment, or None."""
        return self._stepper.scaler()

    def note_helper(self, name: str) -> None:
        """Notes that train_batch does by hand what a helper does: nobody misses its events."""
        self._stepper.used.add(name)

    def stateful_objects(self) -> objects.StatefulObjects:
        """All stateful objects that are attributes of the experiment, excluded ones, too."""
        return objects.find(self._user_attributes())


_YOURS = ("setup_dataloader", "setup_model", "train_batch", "valid")
_NOTHING = LoaderAdapter(None, "self.train_loader", Shard(seed=0))  # until setup_dataloader


def _passes(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of the interval lies after the one and up to the other number.

    Never one of an interval of 0.
    """
    return interval > 0 and before // interval != after // interval
