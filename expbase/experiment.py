"""ExperimentBase: what you write, call and override.

You write three methods, and a fourth to validate. Your model, your loss and your batch are not
known here: forward, backward, step and schedule are in your `train_batch`, and nothing is moved,
wrapped, cast or stepped unless you call the method for it. The events are in events.py, the keys of
the config in config.py, the life of a run in engine/run.py, and its loop in engine/loop.py.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import paddle
from paddle.io import DataLoader

from expbase.checkpoint import layout, model_files
from expbase.checkpoint.model_files import Rename
from expbase.config import Config, get_default_training_config
from expbase.engine import resume
from expbase.engine.class_checks import check_arguments, check_attribute, raise_no_attribute
from expbase.engine.evaluation import named_scalars
from expbase.engine.internals import Internals
from expbase.engine.run import Run
from expbase.engine.start import Start
from expbase.engine.stop import StopReason
from expbase.events import Events
from expbase.mixins_in_front import with_mixins
from expbase.ranks import collectives
from expbase.record.visualizer import Visualizer
from expbase.state.walk import unwrap

try:
    from expbase.doctor.doctor import visit
except ModuleNotFoundError:  # its folder was taken away, and training is the same
    visit = None  # type: ignore[assignment]

E = TypeVar("E", bound="ExperimentBase")
_NONE_AT_FIRST = ("model", "optimizer", "train_loader", "valid_loader", "test_loader")


class ExperimentBase(Events):
    """One start of a run: you write three methods or four, and it does what surrounds them.

    `main(Experiment)` makes one from the command line, sets it up and runs it. A script or a
    notebook may do that by itself:

        args = argparse.Namespace(output="runs/first")   # or default_argument_parser().parse_args()
        exp = Experiment(Experiment.default_config(), args)
        exp.setup()
        exp.run()

    What is called, in this order. Names with () are methods, which you may override:

        setup   prepare(), the device, init_parallel() with several processes, setup_output_dir(),
                dump_config(), setup_visualizer(), setup_logger(), setup_checkpointer(), the seed,
                setup_dataloader(), setup_model(), startup(), check_setup()
        run     resume_or_load(), on_train_begin(), train(), on_train_end(), close(), which calls
                terminal() first
        train   while going_on(): train_batch(), end_iteration(), which logs, saves and validates

    After a failure or a signal in training on_exception() comes, and then on_train_end() and
    close(); after a failure in setup close() alone.

    Write setup_dataloader, which sets train_loader, valid_loader and test_loader; setup_model,
    which sets model and optimizer, or layers and optimizers of any names; train_batch; and valid,
    if there is something to validate. Pictures and curves of yours go to visualizer.

    prepare, startup, terminal and the events do nothing until you override them; on_setup_begin and
    others come with the mixins AllEvents and Prediction. train may be written anew. Every other
    method does something here, so an override calls super().

    With several processes each rank runs all of this. Do not call its methods under
    `if self.rank == 0`: those that write a file do so on rank 0, and the other ranks wait. With
    `training.shares: 8` an update is made of 8 batches, 8 / world_size on each process, and 1, 2, 4
    or 8 processes give the same bits.

    Args:
        config: default_config() of the class, changed as you like. Its section `training` has at
            least max_epoch, or max_iteration, valid_interval and save_interval; the other keys of
            it get their defaults.
        args: The options of the command line, as far as they are there: `output` (by default
            `runs/` and the name of the class), `device`, `checkpoint_path`, `init_model_path`,
            `fresh`, `force`, `evaluate` and `export`; `--help` of a script explains them.

    Raises:
        TypeError: A method is missing, or cannot be called as the base class calls it.
        ConfigError: The config or the args cannot be used.
    """

    model: Any
    """The paddle.nn.Layer to train; of several, the one that save_model and export take by default.
    None until you set it, as the optimizer and the loaders are.
    """
    optimizer: Any
    """Its paddle.optimizer.Optimizer. Other layers and optimizers may have any names."""
    train_loader: DataLoader | Any
    """What read_batch reads: a paddle.io.DataLoader, or any iterable of batches."""
    valid_loader: DataLoader | Any
    """What valid_batches() reads, if there is something to validate on."""
    test_loader: DataLoader | Any
    """What --evaluate reads, if it is there, instead of valid_loader."""
    visualizer: Visualizer
    """Writes curves, images, audio and texts for VisualDL, on rank 0 alone."""

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        for name in _NONE_AT_FIRST:
            # A class or its __init__ may have set it already.
            if not hasattr(type(self), name) and name not in vars(self):
                setattr(self, name, None)
        self.__run = Run(self, Start.of(type(self), ExperimentBase, config, args))
        self.visualizer = Visualizer(None)
        if visit is not None:
            visit(self, self.__run.internals)

    @property
    def config(self) -> Config:
        """The completed config, a copy of what was given; values may be changed until setup()."""
        return self.__run.start.config

    @property
    def args(self) -> argparse.Namespace:
        """The options of the command line, as given."""
        return self.__run.start.args

    @property
    def iteration(self) -> int:
        """Updates that are done; from on_train_batch_begin on the number of the present one.

        The loop counts, and the first update has the number 1. To begin at another number set it
        before training, in startup; a checkpoint that is restored has its own.
        """
        return self.__run.loop.iteration

    @iteration.setter
    def iteration(self, number: int) -> None:
        self.__run.loop.count_from("iteration", number)

    @property
    def epoch(self) -> int:
        """Passes over the training data that have begun; may be set as iteration may."""
        return self.__run.loop.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.__run.loop.count_from("epoch", number)

    @property
    def batches_per_epoch(self) -> int | Any:  # Any: who knows it to be there need not ask for None
        """Batches of an epoch on this rank; None if unknown, or before setup_dataloader."""
        return self.__run.data.adapter.batches_per_epoch

    @property
    def total_iterations(self) -> int | Any:
        """The iteration at which the config ends this run, by max_iteration or max_epoch.

        None if nobody knows: max_epoch ends the run, and the loader has no length or is not set up
        yet. Accumulation, shares and ranks are counted as the loop counts them, and in a run that
        goes on with another batch size or number of ranks what was made before, and what is left;
        what training.skip_updates leaves out is not, so the length of a schedule stays when a
        number is added.

            schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.1, self.total_iterations)
        """
        return self.__run.report.total_iterations

    @property
    def finished(self) -> bool:
        """Whether training came to its end, by the config or by stop().

        False after a signal, a time limit, a failure or a file named STOP: the same command trains
        on then.
        """
        return self.__run.loop.has_finished

    @property
    def end_reason(self) -> str:
        """Why training has ended: a word, and after a colon the reason; "" if it has not ended.

        Known in on_exception and on_train_end, and after run(). The same on all ranks, but for
        one that has failed.

            "finished"                       as far as the config asks
            "stopped: it is good enough"     stop("it is good enough"); also "train() returned", and
                                             "a file named STOP", after which finished is False
            "time limit: training.time_limit_seconds"
            "signal: SIGINT"                 Ctrl-C; also SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU and
                                             SIGHUP
            "failed: ValueError('broken')"   an exception
        """
        return self.__run.loop.end_reason

    @property
    def logger(self) -> logging.Logger:
        """The text log of this rank; rank 0's also goes to stderr."""
        return self.__run.start.logger

    @property
    def output_dir(self) -> Path:
        """The directory of the run."""
        return self.__run.start.output_dir

    @property
    def checkpoint_dir(self) -> Path:
        """The directory of its checkpoints."""
        return self.__run.start.output_dir / layout.FOLDER

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on."""
        return self.__run.start.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.__run.start.world_size

    @property
    def parallel(self) -> bool:
        """Whether there are several processes."""
        return self.__run.start.parallel

    @property
    def internals(self) -> Internals:
        """The door to the parts of the run, for authors of mixins and tools (Internals)."""
        return self.__run.internals

    # --- yours ---------------------------------------------------------------------------

    def setup_dataloader(self) -> None:
        """Sets self.train_loader, and self.valid_loader if there is something to validate.

        A paddle.io.DataLoader, whose order and random numbers follow from training.seed, or any
        iterable of batches. With several processes a DataLoader is split over them. Leave
        train_loader None if train_batch makes its own data; then there are no epochs.
        """
        raise NotImplementedError

    def setup_model(self) -> None:
        """Sets the layers, the optimizers and whatever else training needs on self.

        At least one layer and one optimizer, under any names. Whatever training changes in an
        attribute of self, numbers, lists and objects included, is in the checkpoints.
        `self.input_spec` is needed for --export alone: the shapes and types of the inputs.

            self.model = self.data_parallel(Net())
            self.schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.1, self.total_iterations)
            self.optimizer = paddle.optimizer.Adam(
                self.schedule, parameters=self.model.parameters()
            )
            self.input_spec = [paddle.static.InputSpec([None, 3])]
        """
        raise NotImplementedError

    def train_batch(self) -> None:
        """Makes one update: reads a batch, forward, backward, step; logs what you want to see.

            x, y = self.read_batch()
            loss = paddle.nn.functional.mse_loss(self.model(x), y)
            self.backward(loss)
            self.step_optimizers()
            self.log(loss=loss)

        A schedule is stepped here, too: `self.schedule.step()`.
        """
        raise NotImplementedError

    def valid(self) -> Mapping[str, Any] | None:
        """Validates; called on every rank, in eval mode and without gradients.

            for x, y in self.valid_batches():
                self.log(error=(self.model(x) - y).abs().mean())

        Returns:
            Numbers by name, or None. They are taken from rank 0, and replace numbers that were
            logged under the same name.
        """
        raise NotImplementedError

    # --- the whole run -------------------------------------------------------------------

    @classmethod
    def default_config(cls) -> Config:
        """Returns the config with all its keys and default values; add sections of your own.

            @classmethod
            def default_config(cls):
                config = super().default_config()
                config.optim = Config({"lr": 1e-3})
                config.training.max_epoch = 20
                return config

        Returns:
            The section `training` with the keys of training.py; with yours, the whole config.
        """
        return Config({"training": get_default_training_config()})

    def setup(self) -> None:
        """Does everything before the first batch, in the order that the class docstring has.

        Raises:
            TypeError: An override has not called super().
            ValueError: A part is missing, or does not fit; a ConfigError if a value of the config
                or an option is the reason. What a method of yours raises goes on.
        """
        self.__run.setup()

    def run(self) -> None:
        """Begins or continues, trains to the end, and closes; or does --evaluate or --export alone.

        It also returns after stop(), which ends the run, and after a file named STOP in output_dir,
        from which the same command continues.

        Raises:
            Exception: What training has raised, when everything is closed.
            SystemExit: A signal or the time limit has stopped it, and the run is saved. Its code
                is 124 for the time limit, 129 for SIGHUP, 130 for Ctrl-C, 143 for SIGTERM,
                SIGUSR1, SIGUSR2 and SIGXCPU.
            RuntimeError: Called before setup(), or a second time.
        """
        self.__run.life.need_open(self)
        if not self.__run.start.read_only:
            return self.__run.train()
        resume.inspect(self.__run)

    def close(self) -> None:
        """Calls terminal(), then undoes the steps of setup, the last one first.

        A second call does nothing. Call it yourself only if you do not call run().
        """
        self.__run.close()

    def init_parallel(self) -> None:
        """Waits for all processes and connects them; from then on a failure of one ends all."""
        self.__run.watch_ranks()
        collectives.init_parallel(paddle.device.get_device())

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory.

        Raises:
            ConfigError: It holds a run with another config, or another process has it.
        """
        self.__run.setup_output_dir()

    def dump_config(self) -> None:
        """Writes the completed config to config.yaml, at the first start of a run only."""
        if self.__run.start.writes:
            self.__run.directory.dump(self.config)

    def setup_visualizer(self) -> None:
        """Sets self.visualizer; VisualDL's file is opened at the first record."""
        start = self.__run.start
        directory = start.output_dir if start.writes else None
        self.visualizer = Visualizer(directory, start.warn, lambda: self.iteration)

    def setup_logger(self) -> None:
        """Opens the text log of this rank, worker_RANK.log."""
        self.__run.open_log()

    def setup_checkpointer(self) -> None:
        """Finds the newest whole checkpoint of this run, from which resume_or_load goes on."""
        resume.find_own(self.__run)

    def check_setup(self) -> None:
        """Checks that training has what it needs, and logs the card of the run.

        Raises:
            ValueError: Something is missing, does not fit, or differs between the ranks.
        """
        self.__run.check_setup()

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """Returns the layer to train: in a paddle.DataParallel if there are several processes.

        With one process, and with training.shares, it is the layer itself.

        Args:
            layer: The paddle.nn.Layer whose gradients are averaged over the ranks.
            options: Those of paddle.DataParallel, such as `find_unused_parameters=True`.

        Returns:
            What to call in train_batch; unwrap gives your layer back.

        Raises:
            ValueError: The ranks have parameters of other names or shapes.
        """
        return self.__run.update.data_parallel(layer, **options)

    def unwrap(self, layer: Any) -> Any:
        """Returns your own layer, with its attributes and methods.

        Args:
            layer: What data_parallel returned, or any layer.

        Returns:
            The layer within a wrapper; else the same layer.
        """
        return unwrap(layer)

    def register_stateful(self, *names: str, by_share: bool = False) -> None:
        """Makes attributes part of each checkpoint even if training never changes them.

        What training changes in an attribute is in the checkpoint anyway. Call it in setup_model.

            self.mean = measure(self.train_loader)
            self.register_stateful("mean", "model.scale")

        Args:
            names: Attributes, `"mean"`, or paths from one, `"model.scale"`.
            by_share: With training.shares: whether each micro-batch of an update keeps a value of
                its own, as the hidden state of a recurrent net.

        Raises:
            AttributeError: Nothing of that name exists yet.
            RuntimeError: Called after setup.
        """
        self.__run.state.reach.register(names, apart=by_share and self.__run.update.ranks_repeat)

    def exclude_from_state(self, *names: str) -> None:
        """Leaves attributes out of the checkpoints: a resumed run has them as setup makes them.

            self.exclude_from_state("judge", "model.cache")     # a frozen net, a cache

        Args:
            names: Attributes, or paths from one.

        Raises:
            AttributeError: Nothing of that name exists yet.
            RuntimeError: Called after setup.
        """
        self.__run.state.reach.exclude(names)

    # --- the loop, and an update ---------------------------------------------------------

    def train(self) -> None:
        """Runs the loop; override it to write your own.

        Call going_on() before each update and end_iteration() after it: they log, save, validate
        and hear signals. A train that returns before the end is a stop(): the run is saved and has
        finished.
        """
        while self.going_on():
            self.train_batch()
            self.end_iteration()

    def going_on(self) -> bool:
        """Begins the next iteration, and an epoch if there is none.

        Returns:
            Whether there is one; False at the end of training, and after a stop.
        """
        return self.__run.loop.going_on()

    def end_iteration(self) -> None:
        """Ends the iteration: on_train_batch_end, then what is due.

        In this order: the log line, a checkpoint, a validation, on_train_epoch_end, the validation
        of an epoch. Then training ends if a stop was asked for, also in a validation.
        """
        self.__run.loop.end_iteration()

    def new_epoch(self) -> None:
        """Begins an epoch. The first call after a resume within an epoch continues that one.

        going_on and read_batch call it; a loop of your own may call it before they do.
        """
        self.__run.loop.new_epoch()

    def read_batch(self) -> Any:
        """Reads the next batch of self.train_loader; after the last one an epoch begins.

        For train_batch only; valid reads valid_batches().

        Returns:
            The batch, as the loader yields it.

        Raises:
            RuntimeError: Called in a validation or a prediction.
            ValueError: There is no train_loader, or it has no batch.
        """
        return self.__run.loop.read_batch()

    def micro_batches(self) -> Iterator[Any]:
        """Yields the batches of one update: gradients are added up over them.

        They are training.accumulation_steps batches; with training.shares, shares / world_size. An
        epoch may end between two. Let the loop run to its end: by then gradients are averaged over
        the ranks.

            for x, y in self.micro_batches():
                loss = paddle.nn.functional.mse_loss(self.model(x), y)
                self.backward(loss)
                self.log(loss=loss)
            self.step_optimizers()
            self.schedule.step()

        Yields:
            Batches, as read_batch returns them.

        Raises:
            RuntimeError: A loop before was left early.
        """
        return self.__run.update.micro_batches(self.read_batch, self.iteration)

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss: loss.backward(), divided for a mean over micro-batches.

        It is divided in a loop over micro_batches() alone; after the loop a loss counts whole.
        A paddle.amp.GradScaler that is an attribute of the experiment scales the loss. Where you
        call loss.backward() yourself in a loop over micro_batches, divide the loss by
        `training.shares or training.accumulation_steps`.

        Args:
            loss: A tensor of one element, the mean over the batch.
        """
        self.__run.update.backward(loss)

    def step_optimizers(self, *optimizers: Any) -> None:
        """Steps optimizers and clears their gradients; with a GradScaler it unscales them first.

        Schedules are yours to step. The scaler is updated at each call, so name all optimizers
        that the loss has gradients for.

        Args:
            optimizers: Those to step; by default all that are attributes.
        """
        with self.internals.step_of(optimizers) as parts:
            parts.unscale()
            self.internals.fire("on_before_optimizers_step")
            parts.step()
            parts.clear()

    def log(self, mapping: Any = None, /, *misplaced: Any, **scalars: Any) -> None:
        """Notes numbers by name, for the log line and the curves.

            self.log(loss=loss, accuracy=right / len(labels))

        In train_batch: every training.log_interval iterations there is one line with their means
        since the last line. They are rank 0's; with training.shares of all ranks.

        In valid: the result is the mean over all samples of all ranks.

            in a loop over valid_batches()     counts for the samples of the batch
            after the loop                     counts for the samples that this rank has read
            a batch of unknown size            counts as 1: ready-made (batch_size=None), or
                                               without a tensor

        For a mean over tokens, frames or pixels call average().

        In events of training it belongs to the next line, in on_train_end to a last one; within
        internals.evaluating() it goes to the text log. In setup and in terminal it is an error.

        Args:
            mapping: Numbers or tensors of one element, by name.
            misplaced: None are expected: a value needs a name.
            scalars: As `mapping`, by keyword.

        Raises:
            TypeError: Something has no name, or is not one number.
            RuntimeError: Called where it would be lost.
        """
        scalars |= named_scalars(mapping, misplaced)
        if self.__run.evaluation.phase == "train":
            self.__run.life.need_training("log")
            self.__run.loop.log(scalars)
        else:
            self.__run.evaluation.log(self.iteration, scalars)

    def stop(self, reason: str = "stop() was called", *, on_all_ranks: bool = False) -> None:
        """Ends training after an iteration, with a checkpoint; the run has finished then.

        run() returns, and the process answers 0; the same command does not train on.

            if self.loss_ema < 0.01:
                self.stop("the loss is small enough")

        Args:
            reason: For the log, the ledger and end_reason.
            on_all_ranks: True: all ranks call it in this iteration, which is the last one. False:
                any rank is enough, and the others follow within a second; with one process this
                iteration is the last one.
        """
        self.__run.stop.add(StopReason.CALL, str(reason), on_all_ranks=on_all_ranks)

    def evaluate(self, loader: Any = None, *, name: str = "") -> dict[str, float]:
        """Calls valid() in eval mode, without gradients, with random numbers of its own.

        The loop calls it when a validation is due. Call it for other data, such as a test set:

            def on_train_end(self):
                if self.finished:
                    self.load_checkpoint("best")
                    self.evaluate(self.test_loader)

        Where the results are recorded:

            in events after an update,         metrics.jsonl, curves and `ls`, once for each
            on_train_begin, on_train_end       iteration and name
            within train_batch                 the text log
            after run()                        nowhere

        Args:
            loader: What valid_batches() reads; by default self.valid_loader.
            name: The word before the metrics. By default "valid" for self.valid_loader and "test"
                for self.test_loader; results of another loader are recorded only under a name.

        Returns:
            The results by name, the same on every rank.

        Raises:
            ValueError: No rank has a batch of the loader.
        """
        self.__run.life.need_setup("evaluate", self)
        return self.__run.loop.evaluate(loader, name)

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """Yields this rank's part of the validation data, for valid.

        Over all ranks each sample comes exactly once; a rank may have no batch. With
        training.shares every rank has all of them. An iterable that is no DataLoader is read
        whole by each rank: split it yourself, by rank and world_size.

        Args:
            loader: By default what evaluate was given, else self.valid_loader.

        Yields:
            Batches, as the loader yields them.
        """
        return self.__run.evaluation.batches(loader, self.iteration)

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """Averages metrics over the ranks by weight, for valid, such as a mean over tokens.

        A mean over samples is what log() gives. All ranks call it, after the loop.

            return self.average({"loss": loss_sum / num_tokens}, weight=num_tokens)

        Args:
            metrics: This rank's means, by name.
            weight: How many tokens, or whatever it is, this rank's means are over. A rank with
                weight 0 does not count.

        Returns:
            The means over all ranks, the same on each.
        """
        return self.__run.evaluation.average(metrics, weight)

    def gather(self, value: Any) -> list[Any]:
        """Collects a value of each rank, for valid. All ranks call it, after the loop.

        Args:
            value: Anything that pickle takes; tensors as numpy arrays.

        Returns:
            The values in the order of the ranks, the same list on each. With training.shares a
            validation gives a list of one, since all ranks read the same data.
        """
        return self.__run.evaluation.gather(value, "self.gather()")

    # --- checkpoints and model files -----------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint; does nothing if this iteration has one.

        The loop calls it when a checkpoint is due. Called in train_batch, it waits for the end of
        the iteration.

        Raises:
            RuntimeError: An update has failed, or load_checkpoint has put another state here.
        """
        self.__run.save()

    def resume_or_load(self) -> None:
        """Restores this run's checkpoint, else checkpoint_path's, else init_model_path's weights.

        So a run begins, or goes on. run() calls it if you have not.

        Raises:
            CheckpointError: The checkpoint does not fit the experiment; the text names the entries.
            WeightsError: The weights do not fit.
        """
        resume.resume_or_load(self.__run)

    def load_checkpoint(self, which: str | int, *, run: str | Path | None = None) -> None:
        """Loads the state of a checkpoint when training is over, for a final test (see evaluate).

        Iteration and epoch stay as they are, and save() is refused afterwards. A script that does
        not train may call it right after setup(): then they are the checkpoint's.

        Args:
            which: "best" (by training.monitor), "last", or the number of an iteration.
            run: The directory of another run, or of one checkpoint; by default this run's.

        Raises:
            RuntimeError: Training is under way, or has only been restored.
            CheckpointError: There is no such checkpoint, or it does not fit the experiment.
        """
        resume.load_checkpoint(self.__run, which, run)

    def save_model(self, path: str | Path, layer: Any = None) -> None:
        """Writes the weights of a layer, on rank 0; the file is whole or not there.

        Args:
            path: A file that ends in `.safetensors`, or in `.pdparams`, for paddle.load.
            layer: By default self.model.

        Raises:
            TypeError: It is no layer.
            WeightsError: The path has another suffix, or the file cannot be written.
        """
        self.__run.before_writing(path)
        model_files.save_model(Path(path), self.model if layer is None else layer)

    def load_model(
        self,
        path: str | Path,
        *,
        into: str | None = None,
        partial: bool = False,
        rename: Rename | None = None,
    ) -> None:
        """Loads weights alone, to begin with; the log says what fitted. No code in a file is run.

            self.load_model("runs/pretrain/best", partial=True)     # in startup, for example

        Numbers of another precision are converted, such as float32 for a model in 16 bits.

        Args:
            path: A file of weights, a folder with one, a run's directory (its newest checkpoint),
                `RUN/best` or `RUN/400`.
            into: The name of the layer to fill. It is needed only for a file of one model, if there
                are several layers and none is called `model`.
            partial: Whether weights may be missing, left over, or of another shape.
            rename: From a name in the file to the name here: a mapping, in which names that stay
                may be left out, or a function.

        Raises:
            WeightsError: The file cannot be read, or does not fit; nothing was changed.
        """
        layers = self.__run.state.saved().layers
        code = self.__run.checkpointer.code
        read = model_files.load_model(
            Path(path),
            layers,
            into,
            rename,
            partial=partial,
            optimizers=self.__run.state.found().optimizers.values(),
            logger=self.logger,
            code=code,
        )
        self.__run.ledger.note_weights(read)

    def export(
        self, path: str | Path, input_spec: Sequence[Any] | None = None, layer: Any = None
    ) -> None:
        """Writes a layer for inference by paddle.jit.save, in eval mode, on rank 0.

        Args:
            path: Of the files, without a suffix.
            input_spec: A paddle.static.InputSpec for each input; by default self.input_spec.
            layer: By default self.model.

        Raises:
            ConfigError: There is no input_spec.
            TypeError: It is no layer. For a method write a layer whose forward calls it.
            ValueError: paddle.jit cannot convert the layer.
        """
        layer = model_files.need_layer("export", self.model if layer is None else layer)
        spec = getattr(self, "input_spec", None) if input_spec is None else input_spec
        self.__run.before_writing(path)
        with self.__run.evaluation.begin("predict", self.iteration, layers=[layer]):
            model_files.export(Path(path), layer, spec)
        self.logger.info("exported %s", path)

    # --- what surrounds the attributes -----------------------------------------------------

    def __new__(cls: type[E], *args: Any, **options: Any) -> E:
        check_arguments(cls, args, options)
        return super().__new__(with_mixins(cls))  # those of AllEvents, of --smoke, of verify

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(ExperimentBase, name, value)
        if name in _NONE_AT_FIRST and vars(self).get(name, self) is None:
            del vars(self)[name]  # state has the name under which the user has set it first
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # a type checker that sees it takes any attribute to be there
        __getattr__ = raise_no_attribute
