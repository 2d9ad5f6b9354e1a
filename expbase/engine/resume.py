"""What a checkpoint of an experiment holds; how a start finds one, restores it or looks at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expbase.checkpoint import storage
from expbase.checkpoint.checkpointer import VALIDATIONS_BYTES, choose, find_named
from expbase.checkpoint.contents import Environment, Gradients, OwnStates
from expbase.engine import checks
from expbase.engine.loop import Life
from expbase.engine.run import Run
from expbase.ranks import alike, collectives
from expbase.record import provenance, sources
from expbase.record.ledger import LEDGER, flat
from expbase.record.meter import json_value
from expbase.state.objects import named_parameters


def contents(run: Run) -> dict[str, Any]:
    """What a checkpoint holds, in the order of restoring."""
    found = run.state.saved()
    return {
        "objects": found,
        "shares": run.update.shares,
        "loop": run.loop,
        **_data_and_values(run),
        "gradients": Gradients(named_parameters(found)),
        "log": run.report.metrics.meter,
        "listeners": run.events,
        "environment": Environment(),
        "own": OwnStates(run.events.fire),
    }


def _data_and_values(run: Run) -> dict[str, Any]:
    """A sampler must be what it was before it is asked; a stream is replayed, which changes it."""
    entries = {"values": run.state.values, "data": run.data}
    is_stream = run.data.adapter.num_samples is None
    return dict(reversed(entries.items())) if is_stream else entries


def find(run: Run) -> None:
    """Looks for a checkpoint of this run: it is continued."""
    checkpointer = run.checkpointer

    @collectives.rank_zero_only
    def on_checkpoint_written(path: Path) -> None:
        run.events.fire("on_checkpoint_written", path)

    checkpointer.contents = lambda: contents(run)
    checkpointer.on_written = on_checkpoint_written
    # Of the files now, which are loaded: one may be edited while they run.
    checkpointer.sources = sources.checksums(type(run.experiment))
    checkpointer.facts = {"config": flat(run.config), "versions": provenance.versions()}
    run.on_close.callback(checkpointer.close)
    output = run.output_dir
    if run.read_only:  # an error comes before the data is read
        which = checks.inspected(run.args) or ""
        collectives.on_rank_zero(lambda: choose(output, which), "the checkpoint")
        return
    checkpointer.resumable = checkpointer.newest()
    if run.parallel:
        from expbase.engine import machines  # here: one process has no other machine

        machines.compare(run.directory.path)
        code = {"versions": provenance.versions(), **checkpointer.sources}
        if difference := alike.first_difference(collectives.all_gather_object(code)):
            run.warn(f"not all ranks run the same code: {difference}")
    if checkpointer.resumable is not None:
        run.logger.info(
            f"CONTINUING the run in {run.args.output} from {checkpointer.resumable.name} "
            "(--fresh starts over and keeps the old run)"
        )
    elif (output / LEDGER).exists():
        run.logger.info("the run in %s has no checkpoint: it begins anew", run.args.output)


def resume_or_load(run: Run) -> None:
    """Restores the state: this run's own, else checkpoint_path's, else init_model_path's."""
    run.life.need_setup("resume_or_load")
    checkpointer = run.checkpointer
    if run.read_only:
        return
    resumable = path = checkpointer.resumable
    other = getattr(run.args, "checkpoint_path", None)
    weights = getattr(run.args, "init_model_path", None)
    if path is not None and other:
        run.warn(
            f"--checkpoint_path {other}: not used, because {run.args.output} has {path.name} of "
            "its own, which is continued. To begin with the other one: --fresh, or another "
            "--output."
        )
    if path is None and other:
        path = collectives.on_rank_zero(lambda: find_named(Path(other)), "checkpoint_path")
    if path is not None:
        _resume(run, path)
    elif weights:
        partial = getattr(run.args, "init_partial", False)
        run.experiment.load_model(weights, partial=partial)
    _continue_files(run, resumable)
    run.life = Life.RESTORED
    run.ledger.resumed = path.name if path else None


def _continue_files(run: Run, resumable: Path | None) -> None:
    """Cuts the logs back to the checkpoint: what came after it is done and logged again.

    Not if the run has come to its end, on_train_end included: then nothing is done again.
    """
    validations = run.checkpointer.validations
    sizes = run.checkpointer.sizes
    is_over = run.is_last
    if resumable and is_over:
        is_over = bool(collectives.on_rank_zero(validations.is_finished, "the end"))
    if resumable and is_over:
        validations.cut(validations.size())
    else:  # a new run begins with no logs, perhaps with the state of another one
        run.report.metrics.cut(sizes if resumable else None)
        validations.cut(sizes.get(VALIDATIONS_BYTES, 0) if resumable else 0)
    if is_over:
        run.loop.end()
        run.loop.todo = []


def _resume(run: Run, path: Path) -> None:
    is_own = path == run.checkpointer.resumable
    notes = run.checkpointer.restore(path)
    run.state.values.expect("" if run.rank else run.checkpointer.inventory)
    run.loop.saved_at = run.iteration if is_own else -1
    position = f"iteration {run.iteration}, "
    if run.epoch > 0:
        position += f"epoch {run.epoch}, batch {run.data.batch_in_epoch} of the epoch, "
    rates = " ".join(f"{name}={rate:g}" for name, rate in run.experiment.learning_rates().items())
    run.logger.info("resumed %s: %s%s", path.name if is_own else path, position, rates)
    for key, (old, new) in run.directory.changed_keys(run.config).items():
        run.logger.info(
            f"config: {key}: {old!r} at the first start, {new!r} now (state, like a learning "
            "rate under way, is the checkpoint's)"
        )
    for note in notes:
        run.warn(f"not exact: {note}")


def load_checkpoint(run: Run, which: str, of_run: str | Path | None) -> None:
    """Loads models, optimizers and values of a checkpoint, to look at them."""
    by_hand = run.life is Life.RESTORED and not run.loop.is_over
    if by_hand or run.life is Life.TRAINING:
        raise RuntimeError(
            "load_checkpoint: called before the end of training, which would go on with other "
            "weights; expected it after train(): in on_train_end, say."
        )
    run.checkpointer.close()  # the last one may still be under way
    directory = run.output_dir if of_run is None else Path(of_run)
    path = collectives.on_rank_zero(lambda: choose(directory, which), "load_checkpoint")
    assert path is not None
    position = run.checkpointer.load_for_inspection(path)
    if run.life is Life.READY:  # there is no other position in training
        run.loop.iteration = position["iteration"]
        run.loop.epoch = position["epoch"]
    run.logger.info("loaded %s (%s)", path.name, which)


def inspect(run: Run) -> None:
    """--evaluate and --export: prints what was found as one line of JSON."""
    with run.closing():
        experiment = run.experiment
        experiment.load_checkpoint(checks.inspected(run.args) or "")
        found: dict[str, Any] = {"iteration": run.iteration, "epoch": run.epoch}
        if getattr(run.args, "export", None) in (None, False):
            found["loader"] = "valid_loader" if experiment.test_loader is None else "test_loader"
            results = experiment.evaluate(experiment.test_loader)
            found = {name: json_value(value) for name, value in results.items()} | found
        else:
            name = storage.name_of(run.iteration)
            path = Path(run.args.output) / "export" / name / "model"
            experiment.export(path)
            found["exported"] = str(path)
        if run.rank == 0:
            print(json.dumps(found))
