"""ExperimentBase: what you write, call and override. Read this file and run.py, and you know it.

You write four methods, and may override the others. Your model, your loss and your batch are not
known here: forward, backward, step and schedule are in your `train_batch`, and nothing is moved,
wrapped, cast or stepped behind your back. The order of things is in run.py, events in events.py.

The words: an iteration is one call of train_batch, one update. An epoch is one pass over the
training data. A batch is what the loader yields. A checkpoint holds the state after an update, and
what was still to be done of its iteration. A run may need several starts of the program; an object
of this class is one of them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle

from expbase import checkpoints, checks, model_files, setup_steps, validation
from expbase.config import Config, check_training, fill, get_default_training_config
from expbase.events import Events
from expbase.front import with_mixins
from expbase.ranks import world
from expbase.ranks.stopping import StopReason
from expbase.record.visualizer import Visualizer
from expbase.run import Run
from expbase.state import checkpoint, objects
from expbase.state.weights import Rename


class ExperimentBase(Events):
    """One training run, from its config to its last checkpoint.

    Args:
        config: A Config with a `training` section; what is missing in it gets its default.
        args: `output` is needed; `device`, `checkpoint_path`, `init_model_path`, `fresh` and
            `force` are used if there.

    Raises:
        TypeError: One of the four methods is missing.
        ConfigError: The config, the args or this version of paddle cannot be used.

    Attributes:
        config: The completed config, a copy.
        args: As given.
        model, optimizer: Yours; free in name and number.
        train_loader: Yours: a paddle.io.DataLoader or any iterable of batches; None: the
            experiment makes its own data, and has no epochs.
        valid_loader, test_loader: Yours, for `valid_batches`; for `--evaluate`, if there is one.
        iteration: Updates done; within train_batch the number of the one under way.
        epoch: Epochs begun.
        epochs_ended: Those that are used up: all that began, but for the one under way.
        batch_in_epoch: Batches that this rank has read in this epoch.
        batches_per_epoch: Of this rank; None if nobody knows. Known after setup_dataloader.
        phase: "train", "valid" or "predict".
        life: What this start has done last, a Life.
        finished: Whether training came to its end, by the config or by stop(); not interrupted.
        read_only: Whether it only looks at a run (--evaluate, --export), and writes nothing.
        evaluated_loader: What valid_batches() reads: evaluate's loader, else self.valid_loader.
        evaluated_indices: Of the samples in the last batch of valid_batches(), or None.
        stepping: The optimizers that step_optimizers is about; empty outside of it.
        grad_scaler: The GradScaler that is an attribute of the experiment, if there is one.
        logger: The text log of this rank; rank 0's also goes to stderr.
        visualizer: VisualDL; writes on rank 0 alone.
        output_dir, checkpoint_dir: Of this run; in it.
        rank, world_size, parallel: Of this process; the number of processes; whether it is above 1.
        share, num_shares: Which batch of its update was read last, over all ranks; of how many.
    """

    model: Any = None
    optimizer: Any = None
    train_loader: Any = None
    valid_loader: Any = None
    test_loader: Any = None

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(with_mixins(cls))  # within --smoke or verify: those of the tool

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        checks.check_platform()
        # What mixins add is there, however the config was made.
        config = fill({**fill(type(self).default_config()), **config})
        check_training(config.training)
        checks.check_arguments(args, config)
        checks.check_class(type(self), ExperimentBase, config.training, args)
        self.__run = Run(self, config, args)
        self.visualizer = Visualizer(None)

    config = property(lambda self: self.__run.config)
    args = property(lambda self: self.__run.args)
    iteration = property(
        lambda self: self.__run.iteration,
        lambda self, number: self.__run.loop.count_from("iteration", number),
    )
    epoch = property(
        lambda self: self.__run.epoch,
        lambda self, number: self.__run.loop.count_from("epoch", number),
    )
    epochs_ended = property(lambda self: self.__run.epochs_ended)
    batch_in_epoch = property(lambda self: self.__run.data.batch_in_epoch)
    batches_per_epoch = property(lambda self: self.__run.data.adapter.batches_per_epoch)
    phase = property(lambda self: self.__run.evaluation.phase)
    life = property(lambda self: self.__run.life)
    finished = property(lambda self: self.__run.finished)
    read_only = property(lambda self: self.__run.read_only)
    evaluated_loader = property(lambda self: self.__run.evaluation.evaluated_loader)
    evaluated_indices = property(lambda self: self.__run.evaluation.indices)
    stepping = property(lambda self: self.__run.update.stepping)
    grad_scaler = property(lambda self: self.__run.update.grad_scaler)
    logger = property(lambda self: self.__run.logger)
    output_dir = property(lambda self: self.__run.output_dir)
    checkpoint_dir = property(lambda self: self.__run.output_dir / checkpoint.FOLDER)
    rank = property(lambda self: self.__run.rank)
    world_size = property(lambda self: self.__run.world_size)
    parallel = property(lambda self: self.__run.parallel)
    share = property(lambda self: self.__run.data.share(self.__run.update.batches)[0])
    num_shares = property(lambda self: self.__run.update.batches * self.__run.world_size)

    # --- yours ---------------------------------------------------------------------------

    def setup_dataloader(self) -> None:
        """Sets self.train_loader, and self.valid_loader if valid() uses valid_batches()."""
        raise NotImplementedError

    def setup_model(self) -> None:
        """Sets the models, the optimizers and whatever else training needs on self."""
        raise NotImplementedError

    def train_batch(self) -> None:
        """One update: reads a batch, forward, backward, step; logs what you want to see."""
        raise NotImplementedError

    def valid(self) -> Mapping[str, Any] | None:
        """One validation, on every rank; in eval mode and without gradients already.

        Returns:
            Numbers by name; those of rank 0 are used. `self.average` makes them the same on all.
        """
        raise NotImplementedError

    # --- the whole run -------------------------------------------------------------------

    @classmethod
    def default_config(cls) -> Config:
        """The config with all its keys and default values; add sections of your own."""
        return Config({"training": get_default_training_config()})

    def setup(self) -> None:
        """Everything before the first batch; errors say what lacks or does not fit."""
        setup_steps.set_up(self.__run)

    def run(self) -> None:
        """Trains to the end, from wherever the state is, or does --evaluate or --export; closes.

        Raises:
            SystemExit: It was stopped by a signal or a time limit; with the exit code for that.
            BaseException: Whatever training raised, after everything was closed.
        """
        self.life.need_open()
        if not self.read_only:
            return self.__run.train_to_the_end()
        with self.closing():
            checkpoints.inspect(self.__run)

    def closing(self) -> contextlib.AbstractContextManager[None]:
        """Closes after the block; an error in it is logged first, and nothing hides it."""
        return self.__run.closing()

    def close(self) -> None:
        """Ends what setup began: terminal, then each step of setup backwards. Once."""
        self.__run.close()

    def terminal(self) -> None:
        """The final step of a start, once, also after a failure. Signals wait for it."""

    def prepare(self) -> None:
        """The first thing in setup: downloads, environment. Does nothing here."""

    def startup(self) -> None:
        """After setup_model: fills parameters, sets the iteration to count from. Does nothing."""

    def setup_device(self) -> None:
        """Makes paddle use `args.device`; by default the GPU if there is one, else the CPU."""
        device = getattr(self.args, "device", None)
        world.set_device(device, deterministic=self.config.training.deterministic)

    def init_parallel(self) -> None:
        """Waits for all processes, watches over them from then on, and connects them."""
        setup_steps.watch_ranks(self.__run)
        world.init_parallel(paddle.device.get_device())

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory; a ConfigError if it is another run's."""
        setup_steps.take_directory(self.__run)

    def dump_config(self) -> None:
        """Writes the resolved config, once in the life of a run."""
        if self.__run.writes:
            self.__run.directory.dump(self.config)

    def setup_visualizer(self) -> None:
        """Prepares VisualDL; its file is opened at the first record."""
        run = self.__run
        self.visualizer = Visualizer(run.output_dir if run.writes else None, run.warn)

    def setup_logger(self) -> None:
        """Opens this rank's text log and, on rank 0, metrics.jsonl and ledger.jsonl."""
        setup_steps.open_records(self.__run)

    def setup_checkpointer(self) -> None:
        """Looks for a checkpoint of this run: it is continued."""
        checkpoints.find(self.__run)

    def check_setup(self) -> None:
        """Checks that training has what it needs, and says what there is."""
        setup_steps.check_setup(self.__run)

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """The layer in a DataParallel if there are several processes, and no shares; else itself.

        `options` are those of paddle.DataParallel: find_unused_parameters=True, say.
        """
        if not self.parallel or self.config.training.shares:  # these are added up by micro_batches
            return layer
        checks.check_layer_alike(layer)  # paddle's own would hang, or end the process
        return paddle.DataParallel(layer, **options)

    def unwrap(self, layer: Any) -> Any:
        """Your layer in what data_parallel returned: its attributes and methods are there."""
        return objects.unwrap(layer)

    def register_stateful(self, *names: str, by_share: bool = False) -> None:
        """Names values that are state. Plain attributes that change are saved without it; those of
        other objects are not: `"sampler.position"`. With `by_share` each share of an update has
        its own: the hidden state that a recurrent net carries on, say.
        """
        self.__run.state.register(names, by_share=by_share and self.__run.update.has_shares)

    def exclude_from_state(self, *names: str) -> None:
        """Names attributes that are not state: a frozen judge, a large cache, `"model.cache"`."""
        self.__run.state.exclude(names)

    # --- the loop, and an update ---------------------------------------------------------

    def train(self) -> None:
        """The loop. Override it to write your own: going_on() before and end_iteration() after each
        update, or nothing is logged, validated or saved, and no signal is heard.

        If it returns early, that counts as a stop(): the run is saved and has finished.
        """
        while self.going_on():
            self.train_batch()
            self.end_iteration()

    def going_on(self) -> bool:
        """Begins the next iteration, and an epoch if there is none; false if it is over."""
        return self.__run.going_on()

    def end_iteration(self) -> None:
        """Ends the iteration under way: on_train_batch_end, then whatever is due."""
        self.__run.end_iteration()

    def new_epoch(self) -> None:
        """Begins an epoch; right after a resume in the middle of one, it goes on with that one."""
        self.__run.new_epoch()

    def read_batch(self) -> Any:
        """The next training batch of this rank; goes on into the next epoch by itself.

        Call it in train_batch only; elsewhere it takes data from training.
        """
        return self.__run.read_batch()

    def micro_batches(self) -> Iterator[Any]:
        """This rank's batches of one update, for a loop in train_batch; num_shares on all ranks.

        Ranks average gradients with the last one, so do not leave it early. An epoch may end in
        between. A by-hand loss.backward() in it divides the loss itself.
        """
        return self.__run.update.micro_batches(self.read_batch, self.iteration)

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss, in micro_batches divided by their number.

        Args:
            loss: A mean over the samples of one batch; it goes through the grad_scaler.
        """
        self.__run.update.backward(loss)

    def step_optimizers(self, *optimizers: Any) -> None:
        """Unscales the gradients, steps, clears them. Schedules are yours to step.

        By default all that are attributes of the experiment. Each call updates the grad_scaler, so
        give it all optimizers whose losses have gone backward.
        """
        self.__run.update.step(optimizers)

    def log(self, mapping: Any = None, /, *misplaced: Any, **scalars: Any) -> None:
        """Notes numbers or one-element tensors of this iteration, by name; at log_interval their
        means become one line. A TypeError if something has no name.
        """
        if mapping is not None or misplaced:
            scalars = {**checks.named_scalars(mapping, misplaced), **scalars}
        repeats = self.__run.update.repeats_rank_zero
        self.__run.evaluation.log(self.iteration, scalars, repeats_rank_zero=repeats)

    def stop(self, reason: str = "stop() was called", *, on_all_ranks: bool = False) -> None:
        """Ends training after the iteration under way, with a checkpoint of it.

        Several ranks agree on a stop about twice a second, so a few more iterations may run; with
        `on_all_ranks`, if every rank calls it in the same one, that one is the last.
        """
        self.__run.stop.add(StopReason.CALL, reason, on_all_ranks=on_all_ranks)

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Runs valid() in eval mode, without gradients, with random numbers of its own.

        Args:
            loader: What valid_batches() reads; None: self.valid_loader.

        Returns:
            What valid() returned on rank 0, as numbers; on every rank. After an update those of
            self.valid_loader are logged as `valid/…`, others only go into the text log.
        """
        return validation.evaluate(self.__run, loader)

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """This rank's part of the validation data: each sample exactly once over all ranks.

        Args:
            loader: By default self.evaluated_loader. Of an IterableDataset or another iterable
                each rank gets what it yields: dealing it out is yours.

        Returns:
            The batches; on some rank possibly none.
        """
        loader = self.evaluated_loader if loader is None else loader
        return self.__run.evaluation.batches(loader, self.iteration)

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """The mean of each metric over the ranks, by weight. Call it once, after the loop.

        Args:
            metrics: Numbers or tensors of one, each a mean over this rank's part.
            weight: The size of the part, in samples. With 0 the metrics are not looked at.

        Returns:
            The same on every rank; empty if all weights are 0.
        """
        return self.__run.evaluation.average(metrics, weight)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Call it once, after the loop."""
        return self.__run.evaluation.gather(value, "self.gather()")

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Eval mode, no gradients and random numbers of its own for what you do in the block.

        For samples that a listener draws, say. What is logged goes into the text log, as means.
        """
        return validation.evaluating(self.__run)

    # --- checkpoints and model files -----------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one already.

        Within an iteration it is written at its end, where a resumed run can go on. All ranks call
        it. A RuntimeError if an update failed, or a checkpoint was loaded to be looked at.
        """
        self.__run.save()

    def resume_or_load(self) -> None:
        """Restores the state: this run's own, else checkpoint_path's, else init_model_path's. A
        CheckpointError or WeightsError if it does not fit.
        """
        checkpoints.resume_or_load(self.__run)

    def load_checkpoint(self, which: str, *, run: str | Path | None = None) -> None:
        """Loads models, optimizers and values of a checkpoint, to look at them.

        Iteration and epoch stay. save() is refused afterwards, which would spoil the run. A
        RuntimeError while training is under way, a CheckpointError if there is none.

        Args:
            which: "best", "last" or the number of an iteration.
            run: Another run's output directory, or a checkpoint itself; this run by default.
        """
        directory = self.output_dir if run is None else Path(run)
        checkpoints.load_checkpoint(self.__run, which, directory)

    def load_best(self) -> None:
        """load_checkpoint("best"), for a final test."""
        self.load_checkpoint("best")

    def save_model(self, path: str | Path, layer: Any = None) -> None:
        """Writes the weights of a model, on rank 0, whole or not at all.

        Args:
            path: Ends in `.safetensors`, or in `.pdparams` for paddle.load.
            layer: self.model by default.
        """
        model_files.save(self.__run, path, layer)

    def load_model(
        self,
        path: str | Path,
        *,
        into: str | None = None,
        partial: bool = False,
        rename: Rename | None = None,
    ) -> None:
        """Loads weights, and nothing else; what fitted goes into the log. Nothing in them is run.

        Args:
            path: RUN (its newest checkpoint), `RUN/best`, `RUN/400`, or a model's file or folder.
            into: The name of the layer among the attributes: for a file with one model, if there
                are several layers and none is called `model`.
            partial: Whether missing, additional and differently shaped weights are allowed.
            rename: From a name in the file to the one here; a mapping may lack what stays.
        """
        model_files.load(self.__run, path, into, rename, partial=partial)

    def export(
        self, path: str | Path, input_spec: Sequence[Any] | None = None, layer: Any = None
    ) -> None:
        """Writes a model for inference, by paddle.jit.save, on rank 0.

        Args:
            path: Without a suffix; paddle adds its own.
            input_spec: A paddle.static.InputSpec for each input; self.input_spec by default.
            layer: self.model by default.
        """
        model_files.export(self.__run, path, input_spec, layer)

    def learning_rates(self) -> dict[str, float]:
        """Of each optimizer among the attributes, by the name of its curve."""
        return self.__run.state.learning_rates()

    def stateful_objects(self) -> objects.StatefulObjects:
        """What has state among your attributes, what is excluded, too."""
        return self.__run.state.found()

    def fire(self, event: str, *args: Any) -> Any:
        """Calls an event's method and its listeners; returns what the method returned."""
        return self.__run.events.fire(event, *args)
