"""ExperimentBase: what you write, call and override.

You write four methods, and may override the others. Your model, your loss and your batch are not
known here: forward, backward, step and schedule are in your `train_batch`, and nothing is moved,
wrapped, cast or stepped behind your back. Read next: engine/run.py and engine/loop.py.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import paddle

from expbase.checkpoint import layout
from expbase.checkpoint.model_files import Rename
from expbase.config import Config
from expbase.defaults import get_default_training_config
from expbase.engine import resume
from expbase.engine.evaluation import named_scalars
from expbase.engine.internals import Internals
from expbase.engine.run import Run
from expbase.engine.start import Start, check_arguments, check_attribute, raise_no_attribute
from expbase.engine.stop import StopReason
from expbase.events import Events
from expbase.front import with_mixins
from expbase.ranks import collectives
from expbase.record.visualizer import Visualizer
from expbase.state.walk import unwrap

E = TypeVar("E", bound="ExperimentBase")


class ExperimentBase(Events):
    """One start of a run. You write setup_dataloader, setup_model, train_batch and valid.

    Args:
        config: A Config with a `training` section; what is missing in it gets its default.
        args: `output` is needed; `device`, `checkpoint_path`, `init_model_path`, `fresh` and
            `force` are used if there.
    """

    model: Any = None
    optimizer: Any = None
    """Yours, as model is; layers and optimizers may have any names, and any number."""
    train_loader: Any = None
    """A paddle.io.DataLoader or any iterable of batches; without one there are no epochs."""
    valid_loader: Any = None
    """What valid_batches() reads."""
    test_loader: Any = None
    """What --evaluate reads, if there is one."""
    visualizer: Visualizer
    """VisualDL; writes on rank 0 alone."""

    def __new__(cls: type[E], *args: Any, **options: Any) -> E:
        check_arguments(cls, args, options)
        return super().__new__(with_mixins(cls))  # within --smoke or verify: those of the tool

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        self.__run = Run(self, Start.of(type(self), ExperimentBase, config, args))
        self.visualizer = Visualizer(None)

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(ExperimentBase, name, value)
        super().__setattr__(name, value)

    __getattr__ = raise_no_attribute  # not a method: to a type checker all would be there

    @property
    def config(self) -> Config:
        """The completed config, a copy of what was given; change values of it before setup()."""
        return self.__run.start.config

    @property
    def args(self) -> argparse.Namespace:
        """The options, as given."""
        return self.__run.start.args

    @property
    def iteration(self) -> int:
        """Updates done; within train_batch the number of the one under way."""
        return self.__run.loop.iteration

    @iteration.setter
    def iteration(self, number: int) -> None:
        self.__run.loop.count_from("iteration", number)

    @property
    def epoch(self) -> int:
        """Passes over the training data that have begun."""
        return self.__run.loop.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.__run.loop.count_from("epoch", number)

    @property
    def batches_per_epoch(self) -> int | None:
        """This rank's batches per epoch; None: unknown, or not set up yet."""
        return self.__run.data.adapter.batches_per_epoch

    @property
    def finished(self) -> bool:
        """Whether training came to its end, by the config or by stop(); not interrupted."""
        return self.__run.loop.has_finished

    @property
    def end_reason(self) -> str:
        """Why training has ended: a kind, and after a colon what it was; "" if it has not.

        It is known from on_exception and on_train_end on, and after run(); the same on all ranks,
        but for one that has failed.

            "finished"                       as far as the config asks
            "stopped: it is good enough"     stop("it is good enough"); also "a file named STOP" and
                                             "train() returned"
            "time limit: training.time_limit_seconds"
            "signal: SIGINT"                 Ctrl-C; also SIGTERM, SIGUSR1 and SIGHUP
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
        """Sets self.train_loader, and self.valid_loader if valid() uses valid_batches()."""
        raise NotImplementedError

    def setup_model(self) -> None:
        """Sets the models, the optimizers and whatever else training needs on self."""
        raise NotImplementedError

    def train_batch(self) -> None:
        """Makes one update: reads a batch, forward, backward, step; logs what you want to see."""
        raise NotImplementedError

    def valid(self) -> Mapping[str, Any] | None:
        """Validates, on every rank; in eval mode and without gradients already.

            for x, y in self.valid_batches():
                self.log(error=(self.model(x) - y).abs().mean())

        Returns:
            Numbers by name, beside what was logged, or None; those of rank 0 count, and win over
            what was logged under the same name.
        """
        raise NotImplementedError

    # --- the whole run -------------------------------------------------------------------

    @classmethod
    def default_config(cls) -> Config:
        """Returns the config with all its keys and default values; add sections of your own."""
        return Config({"training": get_default_training_config()})

    def setup(self) -> None:
        """Does everything before the first batch; raises if a part is missing or does not fit."""
        self.__run.setup()

    def run(self) -> None:
        """Trains to the end, from wherever the state is, or does --evaluate or --export; closes. A
        SystemExit, with the exit code for that, if a signal or a time limit has stopped it.
        """
        self.__run.life.need_open(self)
        if not self.__run.start.read_only:
            return self.__run.train()
        resume.inspect(self.__run)

    def close(self) -> None:
        """Calls terminal(), then undoes each step of setup, the last one first. Once."""
        self.__run.close()

    def init_parallel(self) -> None:
        """Connects all processes, once all are there; if one fails, all end."""
        self.__run.watch_ranks()
        collectives.init_parallel(paddle.device.get_device())

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory; a ConfigError if it is another run's."""
        self.__run.setup_output_dir()

    def dump_config(self) -> None:
        """Writes the resolved config, once in the life of a run."""
        if self.__run.start.writes:
            self.__run.directory.dump(self.config)

    def setup_visualizer(self) -> None:
        """Prepares VisualDL; its file is opened at the first record."""
        start = self.__run.start
        self.visualizer = Visualizer(start.output_dir if start.writes else None, start.warn)

    def setup_logger(self) -> None:
        """Opens this rank's text log."""
        self.__run.open_log()

    def setup_checkpointer(self) -> None:
        """Finds the checkpoint that is to be continued."""
        resume.find_own(self.__run)

    def check_setup(self) -> None:
        """Raises if something that training needs is missing; logs a summary."""
        self.__run.check_setup()

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """Returns the layer, in a DataParallel if parallel and training.shares is 0."""
        return self.__run.update.data_parallel(layer, **options)

    def unwrap(self, layer: Any) -> Any:
        """Returns your layer in what data_parallel returned: it has your attributes and methods."""
        return unwrap(layer)

    def register_stateful(self, *names: str, by_share: bool = False) -> None:
        """Names attributes that are state even if training never changes them: what setup measures,
        say, or `"sampler.position"`. What training changes in an attribute is state anyway. With
        `by_share` each micro-batch of an update keeps its own: the hidden state of a net.
        """
        self.__run.state.register(names, by_share=by_share and self.__run.update.has_shares)

    def exclude_from_state(self, *names: str) -> None:
        """Names what is neither saved nor told, and in a resumed run is what setup makes: a frozen
        judge, a cache, `"model.cache"`.
        """
        self.__run.state.exclude(names)

    # --- the loop, and an update ---------------------------------------------------------

    def train(self) -> None:
        """Runs the loop. Override it to write yours: going_on() before, end_iteration() after each
        update, or nothing is logged, validated or saved, and no signal is heard. If it returns
        early, that counts as a stop(): the run is saved and has finished.
        """
        while self.going_on():
            self.train_batch()
            self.end_iteration()

    def going_on(self) -> bool:
        """Begins the next iteration, and an epoch if there is none; false if it is over."""
        return self.__run.loop.going_on()

    def end_iteration(self) -> None:
        """Ends the iteration under way: on_train_batch_end, then whatever is due."""
        self.__run.loop.end_iteration()

    def new_epoch(self) -> None:
        """Begins an epoch; right after a resume in the middle of one, it goes on with that one."""
        self.__run.loop.new_epoch()

    def read_batch(self) -> Any:
        """Returns this rank's next training batch, maybe of a new epoch. For train_batch only."""
        return self.__run.loop.read_batch()

    def micro_batches(self) -> Iterator[Any]:
        """Yields this rank's batches of one update, for train_batch. Do not leave the loop early:
        gradients are averaged at its end. An epoch may end in it. A loss.backward() of yours must
        divide by accumulation_steps; with shares by num_shares.
        """
        return self.__run.update.micro_batches(self.read_batch, self.iteration)

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss, a mean over a batch; in micro_batches it divides that by
        their number. A grad_scaler scales it.
        """
        self.__run.update.backward(loss)

    def step_optimizers(self, *optimizers: Any) -> None:
        """Unscales gradients, steps and clears them; by default of all optimizers. It updates the
        grad_scaler, so name all that the loss has gradients for. Schedules you step yourself.
        """
        with self.internals.step_of(optimizers) as parts:
            parts.unscale()
            self.internals.fire("on_before_optimizers_step")
            parts.step()
            parts.clear()

    def log(self, mapping: Any = None, /, *misplaced: Any, **scalars: Any) -> None:
        """Notes numbers or one-element tensors by name.

        In training their means over the times they were logged become one line at log_interval;
        they are rank 0's. In a validation the result is the mean over all samples of all ranks:
        each call weighs as many samples as the batch in hand of valid_batches() has (by the
        loader's indices, else by the first axis of its first tensor), and outside of loops as many
        as this rank has read since the name was last logged there. Ready-made batches
        (batch_size=None) and those without a tensor or indices weigh 1, and so does what is logged
        without any data. Means over tokens, frames or pixels are average()'s. Within
        internals.evaluating() it is this rank's own mean, weighed likewise, in the text log.

        Raises:
            TypeError: Something has no name, or is not one number.
        """
        scalars |= named_scalars(mapping, misplaced)
        if self.__run.evaluation.phase == "train":
            self.__run.life.need_training("log")
        repeats = self.__run.update.repeats_rank_zero
        self.__run.evaluation.log(self.iteration, scalars, repeats_rank_zero=repeats)

    def stop(self, reason: str = "stop() was called", *, on_all_ranks: bool = False) -> None:
        """Ends training after this iteration, with a checkpoint. Several ranks agree on it twice a
        second; with `on_all_ranks`, which all must call in the same iteration, at once. The log,
        the ledger and end_reason name the reason; of several ranks that of the first one.
        """
        self.__run.stop.add(StopReason.CALL, str(reason), on_all_ranks=on_all_ranks)

    def evaluate(self, loader: Any = None, *, name: str = "") -> dict[str, float]:
        """Calls valid() in eval mode, without gradients, with random numbers of its own.

        The results are recorded after an update, at the beginning of a new run and in
        on_train_end, once for each iteration and name: in metrics.jsonl, as curves, in `ls`.
        Elsewhere, within train_batch say, they go into the text log alone; after run() nowhere.

        Args:
            loader: What valid_batches() reads; by default self.valid_loader.
            name: The word before the metrics. By default `valid/…` of self.valid_loader, `test/…`
                of self.test_loader, and none of another one, which is not recorded.

        Returns:
            Rank 0's results, on every rank.
        """
        self.__run.life.need_setup("evaluate", self)
        return self.__run.loop.evaluate(loader, name)

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        """Yields this rank's part of self.evaluated_loader, or of another; maybe empty. A sample is
        on one rank, with shares on all. Iterables without indices you split yourself.
        """
        return self.__run.evaluation.batches(loader, self.iteration)

    def average(self, metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
        """Returns each metric's weighted mean over the ranks, on all; one collective.

        It is for what is no mean over samples, which log() gives: a mean over tokens, say. Call it
        once, after the batches.

        Args:
            metrics: This rank's means, by name.
            weight: What they are means over: this rank's number of tokens. With 0 it has no part.
        """
        return self.__run.evaluation.average(metrics, weight)

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank, on all ranks. Call it once, after the batches."""
        return self.__run.evaluation.gather(value, "self.gather()")

    # --- checkpoints and model files -----------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one; during an iteration, at its end. Call
        it on all ranks. A RuntimeError after a failed update or load_checkpoint.
        """
        self.__run.loop.save()

    def resume_or_load(self) -> None:
        """Restores the state: this run's own, else checkpoint_path's, else init_model_path's."""
        resume.resume_or_load(self.__run)

    def load_checkpoint(self, which: str, *, run: str | Path | None = None) -> None:
        """Loads models, optimizers and values of a checkpoint, to look at them: "best", "last" or
        an iteration's number; of another run if `run` is its directory, or a checkpoint itself.
        Iteration and epoch stay; save() is refused afterwards. Not while training is under way.
        """
        resume.load_checkpoint(self.__run, which, run)

    def save_model(self, path: str | Path, layer: Any = None) -> None:
        """Writes the weights of self.model, or of another layer, on rank 0, whole or not at all;
        into a `.safetensors`, or a `.pdparams` for paddle.load.
        """
        resume.save_model(self.__run, Path(path), layer)

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
        resume.load_model(self.__run, Path(path), into, rename, partial=partial)

    def export(
        self, path: str | Path, input_spec: Sequence[Any] | None = None, layer: Any = None
    ) -> None:
        """Writes self.model, or another layer, for inference, by paddle.jit.save, on rank 0. The
        path has no suffix; `input_spec` is by default self.input_spec, of paddle.static.InputSpec.
        """
        resume.export(self.__run, Path(path), input_spec, layer)
