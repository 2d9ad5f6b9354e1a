"""The order of setup, and its steps. Each adds to `run.on_close` how it is undone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from expbase.base import rng
from expbase.config import check_training, flatten
from expbase.data.loaders import Shard, adapt_loader, num_samples
from expbase.data.shared_memory import remove_left_files
from expbase.engine import checks
from expbase.engine.loop import Life
from expbase.engine.run import Run
from expbase.engine.stop import StopRequests
from expbase.ranks import alike, collectives, hang
from expbase.record import card, provenance
from expbase.record.ledger import LEDGER, Ledger
from expbase.record.logs import open_log
from expbase.record.meter import METRICS, MetricsFile
from expbase.record.metrics import MetricLog


def set_up(run: Run) -> None:
    """Everything before the first batch; a failure closes the run."""
    if run.life is not Life.NEW:
        raise RuntimeError("setup: called a second time; make a new experiment.")
    try:
        _set_up(run)
    except BaseException as error:
        run.fail(error)
        raise


def _set_up(run: Run) -> None:
    experiment = run.experiment
    check_training(run.training)  # it may have been changed since it was made
    checks.check_shares(run.training.shares, run.world_size)
    experiment.prepare()
    experiment.setup_device()
    if run.parallel:
        experiment.init_parallel()
    experiment.setup_output_dir()
    experiment.dump_config()
    experiment.setup_visualizer()
    experiment.setup_logger()
    experiment.setup_checkpointer()
    rng.seed_for(run.training.seed, rng.SETUP)  # the same on all ranks

    run.events.fire("on_setup_begin")
    experiment.setup_dataloader()
    _attach_data(run)
    experiment.setup_model()
    experiment.startup()
    experiment.check_setup()
    run.state.is_named = True
    run.life = Life.READY
    run.events.fire("on_setup_end")
    run.state.values.begin()


def _attach_data(run: Run) -> None:
    """Takes the loaders that setup_dataloader has set; the ranks compare their samplers."""
    experiment = run.experiment
    if experiment.train_loader is not None:
        update = run.update
        in_round = update.batches if update.has_shares else 1
        shard = Shard(run.training.seed, run.rank, run.world_size, in_round, update.has_shares)
        adapter = adapt_loader(experiment.train_loader, "self.train_loader", shard)
        if update.has_shares:  # several ranks have drawn from their data, to compare it
            rng.seed_for(run.training.seed, rng.SETUP)
        run.data.attach(adapter, leaves_epochs=getattr(run.args, "force", False))
    run.on_close.callback(run.data.close)
    run.on_close.callback(run.evaluation.let_go)
    if run.parallel and isinstance(experiment.valid_loader, Iterable):
        run.evaluation.adapter(experiment.valid_loader)


def watch_ranks(run: Run) -> None:
    """Waits for all processes, and watches over them from then on."""
    from expbase.ranks.watch import Watch  # here: one process has nobody to watch

    def end(text: str, code: int) -> None:
        """The last thing that this rank does when another one ended; called in a thread."""
        run.ledger.write("end", iteration=run.iteration, reason=text, exit_code=code)
        how = "failed" if code == 1 else "was stopped"
        level = logging.ERROR if code == 1 else logging.WARNING
        run.report.now(f"[{run.iteration}] ended, because another rank {how}: {text}", level)

    run.rank_watch = Watch(end, run.report.now)
    run.on_close.callback(run.rank_watch.stop)
    run.guards.append(run.rank_watch.heard_before_abort())


def _log_path(run: Run) -> Path:
    return Path(run.output_dir / f"worker_{run.rank}.log")


def _watch_for_hanging(run: Run) -> None:
    """Prepares what writes all stacks when nothing moves, and may end the process."""

    def progress() -> dict[str, Any]:
        return {
            "phase": run.evaluation.phase,
            "iteration": run.iteration,
            "batch_in_epoch": run.data.batch_in_epoch,
            "evaluated_batches": run.evaluation.batches_read,
        }

    def end(text: str) -> None:
        """Called in a thread: the main one may be where no Python code runs."""
        try:
            run.ledger.write("end", iteration=run.iteration, reason=text, exit_code=1)
            if run.rank_watch is not None:
                run.rank_watch.tell(TimeoutError(text))
        finally:
            os._exit(1)

    seconds = run.training.hang_seconds
    ends = end if run.training.hang_action == "end" else None
    log = _log_path(run)
    if seconds:
        guard = hang.watching(seconds, progress, run.logger, log, ends, parallel=run.parallel)
        run.guards.append(guard)


def take_directory(run: Run) -> None:
    """Makes and locks the output directory."""
    directory = run.directory
    if run.read_only:  # it writes nothing, so it needs no lock
        return directory.expect()
    run.on_close.callback(directory.release)
    fresh = getattr(run.args, "fresh", False)
    force = getattr(run.args, "force", False)
    moved_aside = collectives.on_rank_zero(
        lambda: directory.claim(run.config, fresh=fresh, force=force), "output directory"
    )
    if fresh:
        # Where rank 0 has been there is no run any more; another machine has its own directory.
        moved_aside = directory.move_aside() or moved_aside
        collectives.barrier("--fresh")  # several ranks may share what one moves aside
    if run.rank > 0:  # perhaps on another machine
        directory.make()
        directory.lock(run.rank)
    if moved_aside is not None:
        run.logger.info("the run that was here is now in %s", moved_aside)
    if directory.is_open_to_others():
        run.warn(
            f"{run.args.output}: any user of this machine may write to it, and so change what the "
            "run loads when it continues; expected a directory of yours alone: chmod o-w"
        )
    remove_left_files()
    run.on_close.callback(remove_left_files)


def open_records(run: Run) -> None:
    """Opens this rank's text log and, on rank 0, metrics.jsonl and ledger.jsonl."""
    directory = run.output_dir
    path = None if run.read_only else _log_path(run)
    open_log(run.logger, path, echo=run.rank == 0)
    file = MetricsFile(directory / METRICS if run.writes else None)
    run.report.metrics = MetricLog(run.logger, file, run.experiment.visualizer)
    run.evaluation.meter = run.report.metrics.meter
    run.on_close.callback(run.report.metrics.close)
    run.ledger = Ledger(directory / LEDGER if run.writes else None)
    if run.writes:
        run.ledger.facts = provenance.gather(directory, type(run.experiment))
    run.stop = StopRequests(
        directory / "STOP" if run.writes else None,
        run.training.time_limit_seconds,
        save_seconds=run.training.save_seconds if run.writes else 0,
        parallel=run.parallel,
        began=getattr(run.args, "supervised_since", None),
        stopwatch=run.stopwatch,
        check=run.directory.check,
    )
    run.on_close.callback(run.stop.remove_stop_file)
    run.on_close.callback(run.ledger.close)
    _watch_for_hanging(run)
    if reason := getattr(run.args, "restart_reason", ""):
        run.warn(reason)


def check_setup(run: Run) -> None:
    """Checks that training has what it needs, and says what there is."""
    experiment = run.experiment
    state = run.state
    state.look_into_objects()
    found = state.saved()
    checks.check_visualizer(experiment.visualizer)
    run.data.check(experiment.train_loader, run.training)
    checks.check_state(found)
    if run.update.has_shares:
        checks.check_whole(found)
    facts = {f"config.{key}": repr(value) for key, value in flatten(run.config).items()}
    facts["self.train_loader"] = f"{run.data.adapter.batches_per_epoch} batches"
    facts["self.valid_loader"] = f"{num_samples(experiment.valid_loader)} samples"
    alike.check_alike({**facts, **found.shapes()})
    run.update.check_wrapped()
    run.checkpointer.expect(found)
    _say_what_there_is(run)


def _say_what_there_is(run: Run) -> None:
    """The card, and what looks like a mistake."""
    experiment = run.experiment
    saved = run.state.saved()
    for text in card.card(
        type(experiment).__name__,
        run.report.config_changes(),
        saved.layers,
        run.data.adapter,
        experiment.valid_loader,
        run.world_size,
        run.update.batches,
    ):
        run.logger.info("%s", text)
    if run.read_only:
        return
    is_divided = run.parallel and not run.update.has_shares
    left_out = checks.likely_left_out(run.state.found(), saved, parallel=is_divided)
    mistakes = checks.likely_mistakes(run.training, run.data.adapter.loader)
    for text in (*mistakes, *left_out):
        run.warn(text)
