"""Run: one start of a run. It makes the parts, sets up, trains, and ends; the loop is in loop.py.

    setup:  prepare; device, processes, output directory, config dump, VisualDL, log, this run's
            checkpoint; seed; setup_dataloader, setup_model, startup; checks
    train:  the state is restored if there is one; on_train_begin, train, on_train_end; terminal,
            then each step of setup is undone
    fail:   the one road of every failure

The parts that last are made once, whole, in `Run.__init__`, and none knows the run. What needs a
directory, ranks or data is made in setup. Finding a checkpoint and going on from it: resume.py; to
only look at one: inspect_run.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddle.base import unique_name

from expbase.base import rng
from expbase.base.checkpoint_part import Part
from expbase.base.errors import RuntimeMistake
from expbase.base.exit_codes import STOPPED, ExitCode, exit_code_of, refuse_early_success
from expbase.base.files import DAMAGES
from expbase.base.json_lines import JsonLines
from expbase.base.processes import end_fork, hears_signals
from expbase.base.terminal import lasting
from expbase.checkpoint import layout
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.checkpoint.contents import in_order
from expbase.config import flatten
from expbase.data.loaders import (
    LoaderAdapter,
    Shard,
    adapt_loader,
    check_begins_anew,
    num_samples,
)
from expbase.data.position import DataPosition
from expbase.data.shared_memory import remove_left_files
from expbase.data.workers import ReaderThreads, workers_end_with_this
from expbase.engine import run_digest
from expbase.engine.class_checks import check_valid_loader, need_super
from expbase.engine.evaluation import Evaluation
from expbase.engine.internals import Internals
from expbase.engine.leave_validation import ValidationExit, ValidationLeft
from expbase.engine.loop import Loop
from expbase.engine.report import Report
from expbase.engine.results import Results
from expbase.engine.run_dir import RunDirectory
from expbase.engine.run_states import Life, Step
from expbase.engine.shares.share_checks import check_shares, refuse_different
from expbase.engine.shares.shares_on_ranks import SharesOnRanks
from expbase.engine.shares.states import ShareStates
from expbase.engine.start import Start
from expbase.engine.stop import StopReason, StopRequests
from expbase.engine.subscribers import Subscribers
from expbase.engine.update import Accumulation, Division, Update
from expbase.ranks import collectives, compare_gathered, hang
from expbase.ranks.set_device import set_device
from expbase.record import git, logs, origin_digests, provenance, sources
from expbase.record.metrics import METRICS, MetricLog
from expbase.record.speed import Stopwatch
from expbase.record.starts_and_ends import DIGEST, LEDGER, Ledger, flat
from expbase.record.visualizer import check_visualizer
from expbase.state.parts import named_parameters
from expbase.state.sampled_elements import Samples
from expbase.state.setup_checks import check_state, not_synchronized
from expbase.state.user_state import UserState
from expbase.training import check_training, resolved

_SAVE_SECONDS = 60.0  # for the last checkpoint of a process that is ended


class Run:
    """The parts of one start, and its life."""

    life = Life.NEW  # RESTORED is set by resume.py
    digest = ""  # on rank 0, when the run has finished
    rank_watch: Any = None  # a Watch, if there are other ranks

    def __init__(self, experiment: Any, start: Start) -> None:
        training = start.training
        folder = start.output_dir
        self.experiment = experiment
        self.start = start
        self.ledger = Ledger()
        self._on_close = contextlib.ExitStack()  # each step of setup adds how it is undone
        self._guards: list[contextlib.AbstractContextManager[Any]] = []  # round training
        # What is the user's, and what looks at it.
        self.events = Subscribers(experiment, start.warn)
        self.state = UserState(experiment, start.warn, start.logger.info)
        stopwatch = Stopwatch()
        self.data = DataPosition()
        # What an update is made of.
        self.share_states = ShareStates(training, self.state)
        self.division = self._make_division()
        # What is on the disk. Nothing is opened before its first piece is written.
        self.directory = RunDirectory(folder)
        self.checkpointer = self._make_checkpointer()
        file = JsonLines(folder / METRICS if start.writes else None)
        metrics = MetricLog(start.logger, file, lambda: experiment.visualizer)
        known = stopwatch, self.data, self.checkpointer
        repeats = self.division.ranks_repeat
        self.report = Report(start, metrics, *known, log_is_of_all=repeats)
        # What trains.
        self.stop = self._make_stop_requests(stopwatch)
        self.update = Update(self.division, self.state, stopwatch, self.events.fire)
        self.evaluation = Evaluation(start, self.state, stopwatch, has_all=repeats)
        results = Results(
            experiment,
            start,
            events=self.events,
            evaluation=self.evaluation,
            report=self.report,
            checkpointer=self.checkpointer,
            stop=self.stop,
        )
        self.loop = Loop(
            experiment,
            start,
            life=lambda: self.life,
            ensure_restored=self._ensure_restored,
            events=self.events,
            state=self.state,
            stopwatch=stopwatch,
            data=self.data,
            update=self.update,
            results=results,
            report=self.report,
            checkpointer=self.checkpointer,
            stop=self.stop,
        )
        self.internals = Internals(
            start,
            life=lambda: self.life,
            closing=self.closing,
            events=self.events,
            state=self.state,
            data=self.data,
            update=self.update,
            evaluation=self.evaluation,
            loop=self.loop,
            checkpointer=self.checkpointer,
        )

    def _make_division(self) -> Division:
        training = self.start.training
        if not training.shares:
            return Accumulation(training, self.state)
        found = self.state.found
        return SharesOnRanks(training, self.share_states, lambda: named_parameters(found()))

    def _make_checkpointer(self) -> Checkpointer:
        start = self.start

        @collectives.rank_zero_only
        def on_checkpoint_written(path: Path) -> None:
            self.events.fire("on_checkpoint_written", path)

        return Checkpointer(
            start.output_dir / layout.FOLDER,
            start.training,
            start.logger,
            contents=self._contents,
            told=self.state.told.state_dict,
            on_written=on_checkpoint_written,
            code=provenance.code_of(type(self.experiment)),
            facts=lambda: {"config": flat(start.config), "versions": provenance.versions()},
            refuse=refuse_different if self.division.ranks_repeat else None,
            on_difference=functools.partial(self.events.fire, "ranks_differ"),
        )

    def _contents(self, *, saving: bool = False) -> dict[str, Part]:
        """Returns the entries of a checkpoint, in the order of restoring."""
        # Before anything is looked at: it may change what is to be saved.
        own = self.events.fire("on_save_checkpoint") if saving else None
        return in_order(
            objects=self.state.saved(anew=True),
            divided=self.share_states,
            loop=self.loop,
            values=self.state.values,
            data=self.data,
            is_stream=self.data.adapter.num_samples is None,
            log=self.report.metrics.meter,
            listeners=self.events,
            own=own or {},
            fire=self.events.fire,
        )

    def _make_stop_requests(self, stopwatch: Stopwatch) -> StopRequests:
        start = self.start
        return StopRequests(
            start.output_dir / "STOP" if start.writes else None,
            start.training.time_limit_seconds,
            save_seconds=start.training.save_seconds if start.writes else 0,
            parallel=start.parallel,
            began=start.options.supervised_since,
            stopwatch=stopwatch,
            check=self.directory.check,
        )

    # --- setup ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Does everything before the first batch, in this order; a failure closes the run."""
        experiment = self.experiment
        start = self.start
        with self._in_setup():
            self._check_config()  # exp.config may be changed until here
            experiment.prepare()
            set_device(start.options.device, deterministic=start.training.deterministic)
            if start.parallel:
                experiment.init_parallel()
                need_super("init_parallel", is_done=collectives.is_connected())
                collectives.meet()
            experiment.setup_output_dir()
            experiment.dump_config()
            # As given: setup may change it, and a restore puts in what training had changed.
            self.ledger.note(config=flat(start.config))
            experiment.setup_visualizer()
            experiment.setup_logger()
            need_super("setup_logger", is_done=not logs.is_early(start.logger))
            self._open_records()
            experiment.setup_checkpointer()
            rng.seed_for(start.training.seed, rng.SETUP)  # the same on all ranks
            # No name of a parameter is taken: an experiment before this one may have its own.
            unique_name.switch(unique_name.generator)
            experiment.setup_dataloader()
            self._attach_data()
            experiment.setup_model()
            experiment.startup()
            experiment.check_setup()
            need_super("check_setup", is_done=self.life is Life.READY)
            self.state.reach.end_naming()
            self.state.note_setup()
            self.events.fire("ready")
            if start.writes:
                self.ledger.note(model=origin_digests.or_reason(self._model))

    def _model(self) -> str:
        """Returns the digest of the parameters, the first thing that differs between machines."""
        return origin_digests.of_tensors(named_parameters(self.state.found()))

    @contextlib.contextmanager
    def _in_setup(self) -> Iterator[None]:
        """Surrounds setup with what lasts until the run is closed; closes it after a failure."""
        if self.life is not Life.NEW:
            raise RuntimeMistake("setup: called a second time; make a new experiment.")
        self.life = Life.IN_SETUP
        try:
            with lasting():
                threads = ReaderThreads()
                self.events.explain(threads.explain)
                self._on_close.enter_context(threads.heard())
                self._on_close.enter_context(workers_end_with_this())
                self._on_close.enter_context(logs.paddle_repeats_nothing())
                yield
        except BaseException as error:
            self.fail(error)
            raise

    def _check_config(self) -> None:
        """Raises a ConfigError if `training` cannot be used; completes it."""
        training = self.start.training
        check_training(training)
        self.report.note_config()
        training.update(resolved(self.start.config).training)
        check_shares(training.shares, self.start.world_size)

    def watch_ranks(self) -> None:
        """Waits for all processes, and watches over them from then on."""
        from expbase.ranks.watch import Watch  # here: one process has nobody to watch

        def end(text: str, code: int) -> None:
            """Ends this rank, since another one ended; called in a thread."""
            self._save_before_exit()
            self._note_end(text, code)
            how = "was stopped" if code in STOPPED else "failed"
            level = logging.WARNING if code in STOPPED else logging.ERROR
            text = f"[{self.loop.iteration}] ended, because another rank {how}: {text}"
            place = collectives.waits_at()
            is_late = place and ("SIGABRT" in text or "TIMEOUT" in text)  # as gloo ends its wait
            if code != ExitCode.MISTAKE:
                text += "; the same command continues"
            if is_late:
                text += f", unless this rank alone makes the call at which it waited, {place}: "
                text += "look for `if self.rank == 0`"
            self.report.now(text, level)

        self.rank_watch = Watch(end, self.report.now, lambda: self.loop.iteration)
        self._on_close.callback(self.rank_watch.stop)
        self._guards.append(self.rank_watch.heard_before_abort())

    def _save_before_exit(self) -> None:
        """Writes what was trained, in a thread that ends the process; a disk may not answer."""
        words = "saving", self.checkpointer.write_now
        writer = threading.Thread(target=self.report.quietly, args=words, daemon=True)
        writer.start()
        writer.join(_SAVE_SECONDS)

    def setup_output_dir(self) -> None:
        """Makes and locks the output directory."""
        if self.life is Life.NEW:  # by an override of setup, of which nothing would be undone
            self.life.need_setup("setup_output_dir", self.experiment)
        start = self.start
        directory = self.directory
        if start.read_only:  # it writes nothing, so it needs no lock
            return directory.expect()
        self._on_close.callback(directory.release)
        options = start.options
        aside = directory.claim(start.config, fresh=options.fresh, force=options.force)
        if aside is not None:
            start.logger.info("the run that was here is now in %s", aside)
        if directory.lacks_locks:
            start.warn(
                f"{start.output}: cannot be locked: {directory.lacks_locks}; nothing keeps a "
                "second process from this run while it trains. Start one at a time, or give an "
                "--output where files can be locked."
            )
        if directory.is_open_to_others():
            start.warn(
                f"{start.output}: any user of this machine may write to it, and so change what "
                "the run loads when it continues; expected a directory of yours alone: chmod o-w"
            )
        remove_left_files()

    def open_log(self) -> None:
        """Opens this rank's text log, and shows rank 0's."""
        start = self.start
        path = None if start.read_only else start.log_path
        logs.open_log(start.logger, path, echo=start.rank == 0)

    def _open_records(self) -> None:
        """Opens the ledger and what else is closed at the end; prepares to watch for hanging."""
        start = self.start
        self._on_close.callback(self.report.metrics.close)
        self._on_close.callback(self.stop.remove_stop_file)
        if start.writes:
            code = self.checkpointer.code
            experiment = type(self.experiment)
            work_tree = provenance.look(experiment, code).keep(start.output_dir)
            facts = provenance.gather(work_tree.facts, experiment, start.folder)
            self.ledger.begin(start.output_dir / LEDGER, facts)
            self._on_close.callback(self.ledger.close)
            self._on_close.callback(self._note_how_it_ended)
            lacking = [
                git.lacking(work_tree.facts),
                sources.keep(code, start.output_dir, work_tree.has),
            ]
            for text in filter(None, lacking):
                start.warn(text)
        self._watch_for_hanging()
        if reason := start.options.restart_reason:
            start.warn(reason)
        self._on_close.callback(self.checkpointer.close)

    def _watch_for_hanging(self) -> None:
        """Prepares what writes all stacks when nothing moves, and may end the process."""

        def progress() -> dict[str, Any]:
            if self.life is Life.FINISHED:  # a slow disk may take long to read all checkpoints
                return {"time": time.monotonic()}
            return {
                "phase": self.evaluation.phase,
                "iteration": self.loop.iteration,
                "batch_in_epoch": self.data.batch_in_epoch,
                "evaluated_batches": self.evaluation.batches_read,
            }

        def end(text: str) -> None:
            """Ends the process, from a thread: the main one may be where no Python code runs."""
            try:
                self._save_before_exit()
                self._note_end(text, 1)
                if self.rank_watch is not None:
                    self.rank_watch.tell(TimeoutError(text))
            finally:
                os._exit(1)

        start = self.start
        if seconds := start.training.hang_seconds:
            ends = end if start.training.hang_action == "end" else None
            guard = hang.watching(
                seconds, progress, start.logger, start.log_path, ends, parallel=start.parallel
            )
            self._guards.append(guard)

    @rng.unmoved()  # several ranks ask for more, and setup_model is to draw the same on any number
    def _attach_data(self) -> None:
        """Takes the loaders that setup_dataloader has set; the ranks compare their samplers."""
        experiment = self.experiment
        start = self.start
        if experiment.train_loader is not None:
            shard = Shard(start.training.seed, start.rank, start.world_size)
            if self.division.ranks_repeat:
                batches = self.division.batches
                shard = replace(shard, batches=batches, one_order=True, dealt_to="share")
            check_begins_anew(experiment.train_loader, "self.train_loader")
            adapter = adapt_loader(
                experiment.train_loader, "self.train_loader", shard, start.logger.info
            )
            skips = start.training.skip_updates
            self.data.attach(
                adapter,
                leaves_epochs=start.options.force,
                skip_updates=skips,
                accumulation_steps=start.training.accumulation_steps,
                note_first=functools.partial(self.ledger.write, "data"),
            )
        self._on_close.callback(self.data.close)
        self._on_close.callback(self.evaluation.let_go)
        self._adapt_evaluated()

    def _adapt_evaluated(self) -> dict[str, LoaderAdapter]:
        """Takes the loaders that do not train, by name; a TypeError if one cannot be used.

        It is collective: the ranks compare their samplers.
        """
        start = self.start
        valid_loader = self.experiment.valid_loader
        check_valid_loader(valid_loader, start.experiment, start.base, start.training)
        adapters = {}
        for name in ("self.valid_loader", "self.test_loader"):
            loader = getattr(self.experiment, name.removeprefix("self."))
            if isinstance(loader, Iterable):
                check_begins_anew(loader, name)
                adapters[name] = self.evaluation.adapter(loader, name)
        return adapters

    def _check_evaluated(self) -> None:
        """Raises a ValueError if no rank has a batch of a loader; one of several may have none."""
        adapters = self._adapt_evaluated()  # some may have been set since
        empty = [name for name, adapter in adapters.items() if adapter.is_empty()]
        collectives.barrier("check_setup")
        on_all = set(empty).intersection(*collectives.all_gather_object(empty))
        for name in sorted(on_all):
            raise adapters[name].no_batch()

    @rng.unmoved()
    def check_setup(self) -> None:
        """Checks that training has what it needs, and says what there is."""
        experiment = self.experiment
        start = self.start
        found = self.state.saved()
        check_visualizer(experiment.visualizer)
        self.data.check(experiment.train_loader, start.training)
        self._check_evaluated()
        check_state(found, self.state.reach.everything.values())
        self.division.check(found)
        facts = {f"config.{key}": repr(value) for key, value in flatten(start.config).items()}
        facts["self.train_loader"] = f"{self.data.adapter.batches_per_epoch} batches"
        samples = {
            "self.train_loader": self.data.adapter.num_samples,
            "self.valid_loader": num_samples(experiment.valid_loader),
        }
        facts["self.valid_loader"] = f"{samples['self.valid_loader']} samples"
        self.ledger.note(loaders={name: facts[name] for name in samples}, samples=samples)
        compare_gathered.check_alike({**facts, **found.shapes()})
        self.update.note_ranks()
        self.update.wrappers.note_all()
        self.checkpointer.expect(found)
        self.report.card(experiment, found.layers, self.update.batches)
        if not start.read_only:
            is_divided = start.parallel and self.division.sums_in_backward
            alone = not_synchronized(self.state.found(), found) if is_divided else ()
            for text in alone:
                start.warn(text)
        self.life = Life.READY

    # --- training ------------------------------------------------------------------------

    def train(self) -> None:
        """Restores, trains, closes; a SystemExit if something stopped it."""
        loop = self.loop
        with lasting(), self.stop.installed(), self.closing():
            self._say_if_no_signal_is_heard()
            self._restore_and_note_start()
            for guard in self._guards:
                self._on_close.enter_context(guard)
            if loop.is_over:
                self._train_no_more()
            else:
                with self.report.progress(loop.iteration):
                    self._train()
                self.report.end(self.digest)
                self._say_how_it_ended()
            self.stop.ignore_second_ctrl_c()  # what is left to do is short, and must be done
        if code := loop.stopped_by.exit_code:  # 0 if nothing stopped it
            sys.exit(code)

    def _say_if_no_signal_is_heard(self) -> None:
        if not hears_signals():
            self.start.warn(
                "run() in a thread: python gives signals to its main thread alone, so Ctrl-C and "
                "SIGTERM do not stop and save this run; self.stop(), a file named STOP in its "
                "directory and training.time_limit_seconds do"
            )

    def _train(self) -> None:
        loop = self.loop
        self._begin_training()
        own_loop = self.start.has_own("train")
        before = Samples(self.state.optimizers() if own_loop else {})
        if loop.todo:  # else it would be lost if the user's train() calls no going_on()
            loop.begin()
        self.experiment.train()
        loop.end_training(before)
        self._end_training()
        if loop.has_finished:
            self._finish()

    def _finish(self) -> None:
        """Writes what binds the run, and notes that it has come to its end.

        In this order: a start after a kill in between finishes once more.
        """
        start = self.start
        self.checkpointer.finish()
        self.life = Life.FINISHED
        if not start.options.smoke:
            collectives.on_rank_zero(self._write_digest, "the digest of the run")
        self.checkpointer.note_end(self.loop.iteration, self.loop.shown_epoch)

    def _write_digest(self) -> None:
        """Writes digest.txt, and notes the digest in the ledger; a failure is told, and no more."""
        try:
            self.digest = run_digest.write(self.start.output_dir)
        except (OSError, layout.CheckpointError, *DAMAGES) as error:
            self.start.warn(f"{DIGEST}: not written, and the run has no digest: {error}")
            return
        self.ledger.write("digest", iteration=self.loop.iteration, digest=self.digest)

    def _train_no_more(self) -> None:
        """Does for a run that has finished what surrounds training: on_train_end may load the best.

        So the experiment has after run() what it had the first time. Its lines are there already.
        """
        loop = self.loop
        self.report.already_finished(loop.iteration, loop.shown_epoch)
        if self.checkpointer.resumable is not None:
            self.report.metrics.write_no_more()
        self._begin_training()
        self._end_training()

    def _begin_training(self) -> None:
        self.life = Life.TRAINING
        self.loop.note_begin()
        rng.seed_for(self.start.training.seed, rng.SETUP, 1, self.update.seed_rank)
        if self.loop.iteration and "on_train_begin" in self.events.subscribed:
            self.state.note_tensors()
        self.events.fire("on_train_begin")

    def _end_training(self) -> None:
        """Calls on_train_end, after a signal on_exception first; what was logged before it, and in
        it, are lines of their own. A signal that comes in a loop over data there leaves it.
        """
        loop = self.loop
        self.life = Life.ENDED
        if loop.has_finished:
            self.report.last_line(loop.iteration, loop.shown_epoch)  # before those of a test, say
        else:
            self.report.metrics.meter.clear()  # a checkpoint has it, for the line of the next start
        if (raised := loop.stopped_by.as_exception()) is not None:
            self._call_quietly("on_exception", raised)
        may_be_left: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if loop.stopped_by <= StopReason.CALL:  # else it has begun in spite of the reason
            may_be_left = self.evaluation.may_be_left_by(ValidationExit(self.stop))
        try:
            with may_be_left:
                self.events.fire("on_train_end")
                collectives.barrier("the end of on_train_end")  # none has gone on if one leaves
        except ValidationLeft:
            self.report.metrics.meter.clear()
            return loop.leave_on_train_end()
        self.report.last_line(loop.iteration, loop.shown_epoch)

    def _ensure_restored(self) -> None:
        """Prepares a loop that begins: perhaps the user's own, without run()."""
        self.life.need_setup("going_on", self.experiment)
        if self.start.read_only:
            raise RuntimeMistake("going_on: --evaluate or --export only look; expected exp.run().")
        self._restore_and_note_start()

    def _restore_and_note_start(self) -> None:
        """Restores, and notes in the ledger that this start trains; once."""
        if self.life is Life.READY:
            self.experiment.resume_or_load()
        if self.ledger.has_start:
            return
        self.directory.check()
        start = self.start
        facts: Any = {"ranks": start.world_size, "restart": start.options.restart_reason or None}
        facts |= {"iteration": self.loop.iteration, **self.checkpointer.code.facts()}
        facts |= {"versions": provenance.versions()}
        self.ledger.write_start(**facts)

    def _note_how_it_ended(self) -> None:
        """Notes the end of a start; a failure counts for more than another reason."""
        loop = self.loop
        if isinstance(loop.failure, layout.FormatError):
            return  # the run is what it was
        if loop.failure:
            code = exit_code_of(loop.failure, in_setup=not self.ledger.has_start)
            self._note_end(repr(loop.failure), code)
        elif self.ledger.has_start:
            reason = loop.stop_text if loop.stopped_by else "finished"
            self._note_end(reason, loop.stopped_by.exit_code)

    def _note_end(self, reason: str, code: int) -> None:
        self.ledger.write("end", iteration=self.loop.iteration, reason=reason, exit_code=code)

    def _say_how_it_ended(self) -> None:
        loop = self.loop
        if reason := loop.stopped_by:
            is_saved = loop.saved_at == loop.iteration
            self.report.stopped(loop.iteration, reason, loop.stop_text, is_saved=is_saved)
        else:
            self.report.finished(loop.iteration, loop.shown_epoch)

    # --- files ---------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint; within an iteration, at its end."""
        if not self.start.read_only:
            self.directory.check()
        self.loop.save()

    def before_writing(self, path: object) -> None:
        """Raises if the run has lost its directory; warns if the weights that are about to be
        written may not be what was trained: valid() may have put it aside.
        """
        self.directory.check()
        left = self.loop.results.under_way
        if left >= 0 and self.loop.is_over:
            self.start.warn(
                f"{path}: written after the validation of iteration {left} was left, with the "
                "weights that it had then: averages, if it had swapped them in. What was trained "
                "is in the checkpoint."
            )

    # --- the end -------------------------------------------------------------------------

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes after the block; an error in it is logged first, and nothing hides it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.experiment.close()
        self.close()  # if an override has not called super's

    def close(self) -> None:
        """Ends what setup began: terminal, then each step of setup backwards. Once."""
        if self.life is Life.CLOSED or self.start.is_in_fork:
            return
        self.life = Life.CLOSED
        try:
            with self._on_close:
                self._call_terminal()
        except Exception as error:
            error.__suppress_context__ = True
            self.start.logger.error("while closing: %r", error, exc_info=error)
            raise
        finally:
            logs.close_log(self.start.logger)

    def _call_terminal(self) -> None:
        try:
            self.experiment.terminal()
        except BaseException as error:  # the record of this start must not say that all is well
            refuse_early_success(error)
            self.loop.note_failure(self.loop.failure or error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the run by a failure, the one way; in train() with on_exception and on_train_end."""
        if self.start.is_in_fork:
            end_fork(error)
        refuse_early_success(error)
        loop = self.loop
        quietly = self.report.quietly
        if error is not loop.failure:
            loop.note_failure(error)
            self.events.add_notes(error)
            self._say_failure(error)
        loop.end()
        if self.life is Life.TRAINING:
            self.life = Life.ENDED
            self.report.metrics.meter.clear()
            self._call_quietly("on_exception", error)
            self._call_quietly("on_train_end")
            alone = functools.partial(self.report.last_line, is_alone=True)
            quietly("log", alone, loop.iteration, loop.shown_epoch)
        if self.rank_watch is not None:
            quietly("telling the other ranks", self.rank_watch.tell, error)
        quietly("close", self.experiment.close)
        quietly("close", self.close)  # if an override failed before super's

    def _call_quietly(self, event: str, *args: Any) -> None:
        """Calls all that an event has; what fails in it is logged."""
        for name, handler in self.events.each(event, *args):
            self.report.quietly(name, handler)

    def _say_failure(self, error: BaseException) -> None:
        report = self.report
        loop = self.loop
        report.failure(loop.iteration, error)
        if loop.step is Step.WITHIN and isinstance(error, Exception):
            report.quietly("the batch", report.failed_batch, loop.iteration, loop.epoch)
