"""The checkpoints of an experiment: what they hold, saving, resuming, looking at one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expbase import checks, distributed, schedule, sources
from expbase.life import Life, Step
from expbase.meter import json_value
from expbase.model_files import ModelFiles
from expbase.record.run_record import LEDGER
from expbase.state import checkpoint
from expbase.state.checkpointer import VALIDATIONS_BYTES, choose, find_named
from expbase.state.entries import Attributes, Environment, Gradients, OwnStates
from expbase.state.objects import named_parameters
from expbase.stopping import StopReason
from expbase.training import TrainingSteps


class Checkpoints(TrainingSteps, ModelFiles):
    """Saving the state of an experiment, and restoring it."""

    def setup_checkpointer(self) -> None:
        """Lists what a checkpoint holds, and looks for one of this run: it is continued."""
        checkpointer = self._checkpointer
        checkpointer.contents = self._contents
        # Of the files now, which are loaded: one may be edited while they run.
        checkpointer.sources = sources.checksums(type(self))
        self._on_close.callback(checkpointer.close)
        if self.read_only:  # told before the data is there
            which = checks.inspected(self.args) or ""
            distributed.on_rank_zero(lambda: choose(self.output_dir, which), "the checkpoint")
            return
        checkpointer.resumable = checkpointer.newest()
        if self.parallel:
            from expbase import machines  # here: one process has no other machine

            for text in machines.compare(self._run_dir, checkpointer.resumable, type(self)):
                self.logger.warning("%s", text)
        if checkpointer.resumable is not None:
            self.logger.info(
                f"CONTINUING the run in {self.args.output} from {checkpointer.resumable.name} "
                "(--fresh starts over and keeps the old run)"
            )
        elif (self.output_dir / LEDGER).exists():
            self.logger.info("the run in %s has no checkpoint: it begins anew", self.args.output)

    def _contents(self) -> dict[str, Any]:
        """What a checkpoint holds, in the order of restoring."""
        found = self._saved_objects()
        return {
            "objects": found,
            "counters": Attributes(self, ("iteration", "epoch")),
            "loop": self._loop,
            "data": self._iterator,
            "values": self._names.values,
            "gradients": Gradients(named_parameters(found)),
            "log": self._metric_log,
            "listeners": self._subscribers,
            "environment": Environment(),
            "own": OwnStates(self.fire),
        }

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one already.

        Within an iteration it is written at its end, where a resumed run can go on; so call it on
        all ranks.

        Raises:
            RuntimeError: The state is not one to go on from: an update failed, or a checkpoint
                was loaded to be looked at. Or it is called in on_save_checkpoint.
        """
        loop = self._loop
        if loop.step in (Step.WITHIN, Step.ENDING):
            loop.save_requested = True
            return loop.wake()
        if loop.saved_at == self.iteration or self.read_only:
            return
        self._check_savable()
        with self._stopwatch.exclude("saving"):
            self._check_finite()
            self._update.check_complete()
            self._update_scaler()
            needed = self._is_last or bool(loop.stopped_by)  # there will be no later one
            self._checkpointer.save(self.iteration, self._metric_log.sizes(), needed=needed)
        loop.saved_at = self.iteration
        self._stop_requests.note_saved()

    def _check_savable(self) -> None:
        inspected = self._checkpointer.inspected
        if self._loop.failure is not None:
            raise RuntimeError(
                f"save: iteration {self.iteration} failed, and the state is half its update; the "
                "run continues from the checkpoint before."
            )
        if inspected:
            raise RuntimeError(
                f"save: the state is that of {inspected}, loaded to be looked at; as iteration "
                f"{self.iteration} it would spoil the run."
            )

    def _save_now(self) -> None:
        """Between two iterations, where save() does not put it off."""
        loop = self._loop
        loop.save_requested = False
        before = loop.step
        loop.step = Step.BETWEEN
        self.save()
        loop.step = before
        if loop.saved_at < 0 and type(self).save is not Checkpoints.save:
            loop.saved_at = 0  # told once
            self.logger.warning(
                f"[{self.iteration}] {type(self).__name__}.save wrote no checkpoint, so the run "
                "cannot be continued; expected super().save() in it."
            )

    def _save_if_stopping(self) -> None:
        """At the end of an iteration: a checkpoint if the run stops, save() was called, or by time.

        The results of this iteration's validation are noted before it: a run that continues it
        does not validate again.
        """
        loop = self._loop
        # The clock, or a signal's stop at another iteration, must not choose another best one.
        if loop.save_requested or loop.stopped_by is StopReason.CALL:
            loop.planned_at = self.iteration
        at_stop = bool(loop.stopped_by) and schedule.is_wanted(self.config.training, "save")
        saves = loop.save_requested or at_stop or self._stop_requests.is_save_due
        is_validated = loop.validated_at == self.iteration and not loop.todo
        if is_validated:
            is_planned = loop.planned_at == self.iteration
            has_checkpoint = is_planned and (saves or loop.saved_at == self.iteration)
            self._checkpointer.validations.add(
                self.iteration, self.epoch, loop.results, has_checkpoint=has_checkpoint
            )
        if saves:
            self._save_now()
        if is_validated:
            checks.check_metric("training.monitor", self.config.training.monitor, loop.results)

    def resume_or_load(self) -> None:
        """Restores the state: this run's own, else checkpoint_path's, else init_model_path's.

        It does nothing with --evaluate or --export: `run` loads what they name.

        Raises:
            CheckpointError, WeightsError: It is damaged or does not fit.
        """
        self._need_setup("resume_or_load")
        if self.read_only:
            return
        checkpointer, own = self._checkpointer, self._checkpointer.resumable
        path, other = own, getattr(self.args, "checkpoint_path", None)
        if path is None and other:
            path = distributed.on_rank_zero(lambda: find_named(Path(other)), "checkpoint_path")
        elif own and other:
            self.logger.warning(
                f"--checkpoint_path: {other} is not used: the run in {self.args.output} goes on "
                f"from its own {own.name}. To begin with the other one, give --fresh or another "
                "--output."
            )
        if path is None and checkpointer.inspected:
            raise RuntimeError(
                f"resume_or_load: {checkpointer.inspected} was loaded to be looked at, and "
                "training would go on from its weights. To start from weights give "
                "args.init_model_path."
            )
        weights = getattr(self.args, "init_model_path", None)
        if path is not None:
            self._resume(path)
        elif weights:
            self.load_model(weights, partial=getattr(self.args, "init_partial", False))
        if path is not None and weights:
            self.logger.info("--init_model_path: not used, since the whole state is restored")
        self._continue_files(own)
        self.life = Life.RESTORED
        self._run_record.resumed = path.name if path else None

    def _continue_files(self, own: Path | None) -> None:
        """Cuts the logs back to the checkpoint: what came after it is done and logged again.

        Not if the run has come to its end, on_train_end included: then nothing is done again.
        """
        validations, sizes = self._checkpointer.validations, self._checkpointer.sizes
        is_over = self._is_last
        if own and is_over:
            is_over = bool(distributed.on_rank_zero(validations.is_finished, "the end"))
        if own and is_over:
            validations.cut(validations.size())
        else:  # a new run begins with no logs, perhaps with the state of another one
            self._metric_log.cut(sizes if own else None)
            validations.cut(sizes.get(VALIDATIONS_BYTES, 0) if own else 0)
        if is_over:
            self._loop.is_over = True
            self._loop.todo = []

    def _resume(self, path: Path) -> None:
        loop, own = self._loop, path == self._checkpointer.resumable
        notes = self._checkpointer.restore(path)
        loop.saved_at = self.iteration if own else -1
        place = f"iteration {self.iteration}, "
        place += f"epoch {self.epoch}, batch {self.batch_in_epoch} of the epoch, " * (
            self.epoch > 0
        )
        rates = " ".join(f"{name}={rate:g}" for name, rate in self.learning_rates().items())
        self.logger.info("resumed %s: %s%s", path.name if own else path, place, rates)
        for key, (old, new) in self._run_dir.changed_keys(self.config).items():
            self.logger.info(
                f"config: {key}: {old!r} at the first start, {new!r} now (state, like a learning "
                "rate under way, is the checkpoint's)"
            )
        for note in notes:
            self.logger.warning("not exact: %s", note)

    def load_checkpoint(self, which: str, *, run: str | Path | None = None) -> None:
        """Loads models, optimizers and values of a checkpoint, to look at them.

        The place in training stays, and save() is refused afterwards: the run's own checkpoints
        are not spoiled.

        Args:
            which: "best", "last" or the number of an iteration.
            run: Another run's output directory, or a checkpoint itself; this run by default.

        Raises:
            RuntimeError: Training is under way.
            CheckpointError: There is no such checkpoint.
        """
        by_hand = self.life is Life.RESTORED and not self._loop.is_over
        if by_hand or self.life is Life.TRAINING:
            raise RuntimeError(
                "load_checkpoint: called before the end of training, which would go on with other "
                "weights; expected it after train(): in on_train_end, say."
            )
        self._checkpointer.close()  # the last one may still be under way
        directory = self.output_dir if run is None else Path(run)
        path = distributed.on_rank_zero(lambda: choose(directory, which), "load_checkpoint")
        assert path is not None
        counters = self._checkpointer.load_for_inspection(path)
        if self.life is Life.READY:  # there is no other place in training
            self.iteration, self.epoch = counters["iteration"], counters["epoch"]
        self.logger.info("loaded %s (%s)", path.name, which)

    def _inspect(self) -> None:
        """--evaluate and --export: prints what was found as one line of JSON."""
        self.load_checkpoint(checks.inspected(self.args) or "")
        found: dict[str, Any] = {"iteration": self.iteration, "epoch": self.epoch}
        if getattr(self.args, "export", None) in (None, False):
            found["loader"] = "valid_loader" if self.test_loader is None else "test_loader"
            results = self.evaluate(self.test_loader)
            found = {name: json_value(value) for name, value in results.items()} | found
        else:
            path = Path(self.args.output) / "export" / checkpoint.name_of(self.iteration) / "model"
            self.export(path)
            found["exported"] = str(path)
        if self.rank == 0:
            print(json.dumps(found))

    def load_best(self) -> None:
        """load_checkpoint("best"), for a final test."""
        self.load_checkpoint("best")
