"""How a start finds a checkpoint, its own or another run's, and goes on from it.

To look at one and not go on: inspect_run.py.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from expbase.checkpoint import layout, storage
from expbase.checkpoint.checkpointer import VALIDATIONS_BYTES
from expbase.checkpoint.named import find_named
from expbase.engine.run import Run
from expbase.engine.run_dir import MOST_KEYS
from expbase.engine.run_states import Life
from expbase.ranks import collectives, compare_gathered
from expbase.record import origin_digests, provenance
from expbase.record.logs import NOT_EXACT
from expbase.record.starts_and_ends import LEDGER, sessions


def find_own(run: Run) -> None:
    """Looks for the checkpoint from which this start goes on: this run's own, or the one given."""
    path = run.checkpointer.find_own(run.start.options.inspected)  # an error comes before the data
    if not run.start.read_only:
        _say_what_goes_on(run)
        if path is None and run.start.training.max_epoch:
            path = _find_other(run)
    if path is not None:
        # setup_model may ask how long the run is, before anything is restored.
        position = functools.partial(storage.position_at, path)
        found = collectives.on_rank_zero(position, "the position of a checkpoint")
        run.data.expect(*(found or (None, None)))


def _find_other(run: Run) -> Path | None:
    """Returns the checkpoint of --checkpoint_path, verified; None: the option is not given."""
    if not (other := run.start.options.checkpoint_path):
        return None
    return collectives.on_rank_zero(lambda: find_named(run.start.path(other)), "checkpoint_path")


def _say_what_goes_on(run: Run) -> None:
    if run.start.parallel:
        code = {"versions": provenance.versions(), **run.checkpointer.code.files}
        if difference := compare_gathered.first_difference(collectives.all_gather_object(code)):
            run.start.warn(f"not all ranks run the same code: {difference}")
    if (resumable := run.checkpointer.resumable) is not None:
        run.start.logger.info(
            f"CONTINUING the run in {run.start.output} from {resumable.name} "
            "(--fresh starts over and keeps the old run)"
        )
    elif (run.start.output_dir / LEDGER).exists():
        run.start.logger.info("the run in %s has no checkpoint: it begins anew", run.start.output)


def resume_or_load(run: Run) -> None:
    """Restores the state: this run's own, else checkpoint_path's, else init_model_path's."""
    run.life.need_setup("resume_or_load", run.experiment)
    checkpointer = run.checkpointer
    if run.start.read_only:
        return
    path = checkpointer.resumable or _find_other(run)
    options = run.start.options
    if checkpointer.resumable is not None:
        _say_what_is_not_used(run, checkpointer.resumable.name)
    notes = []
    if path is not None:
        notes = _restore(run, path)
    elif options.init_model_path:
        weights = run.start.path(options.init_model_path)
        run.experiment.load_model(weights, partial=options.init_partial)
    has_finished = _nothing_is_left(run)
    if has_finished:
        run.loop.end_with_nothing_left()
        notes = [note for note in notes if note == checkpointer.changed_code]
    for note in notes:
        run.start.warn(NOT_EXACT + note)
    _cut_logs(run, has_finished=has_finished and checkpointer.resumable is not None)
    run.life = Life.RESTORED
    run.ledger.note(resumed=path.name if path else None)
    doing = "the digests of what the run begins from"  # which may take long: of a slow disk
    run.ledger.note(began_from=collectives.on_rank_zero(lambda: _began_from(run, path), doing))


def _say_what_is_not_used(run: Run, own: str) -> None:
    """Says which options to begin from have no effect; they had one if the run began from them."""
    options = run.start.options
    given = {
        "--checkpoint_path": options.checkpoint_path,
        "--init_model_path": options.init_model_path,
    }
    for option, other in given.items():
        if other:
            had_effect = _began_with(run, option, other)
            run.start.logger.log(
                logging.INFO if had_effect else logging.WARNING,
                f"{option} {other}: not used, because {run.start.output} has {own} of its own, "
                "which is continued. To begin with the other one: --fresh, or another --output.",
            )


def _began_with(run: Run, option: str, other: str) -> bool:
    """Returns whether a start before began from what an option names, in the same words.

    Where the command had no such words, as in a notebook, the option alone counts.
    """
    for start in (session.start for session in sessions(run.start.output_dir)):
        command = [*map(str, start.get("command") or ())]
        is_same = other in command or f"{option}={other}" in command
        has_words = any(word.startswith(option) for word in command)
        if option in start.get("began_from", ()) and (is_same or not has_words):
            return True
    return False


def _began_from(run: Run, path: Path | None) -> dict[str, str]:
    """Returns, by option, a digest of each file or folder that this start begins from.

    Args:
        run: The run.
        path: The checkpoint that was restored, perhaps the run's own; None: there is none.
    """
    options = run.start.options
    digests_of: dict[str, Callable[[], str]] = {}
    if path is None and options.init_model_path:
        # Else nobody knows what an override of load_model has read.
        weights = run.ledger.weights_from or run.start.path(options.init_model_path)
        digests_of["--init_model_path"] = lambda: _of_weights(weights)
    elif path is not None and run.checkpointer.resumable is None:
        digests_of["--checkpoint_path"] = lambda: _of_weights(path)
    if isinstance(options.data, (str, os.PathLike)) and options.data:
        data = run.start.path(os.fspath(options.data))
        if os.path.exists(data):
            digests_of["--data"] = lambda: origin_digests.of_path(data)
    return {option: origin_digests.or_reason(digest) for option, digest in digests_of.items()}


def _of_weights(place: Path) -> str:
    """Returns the digest of a checkpoint, or of a file or a folder of weights."""
    if (place / layout.MANIFEST).exists():
        # It lists the checksum of each file, and each was compared when the checkpoint was chosen.
        return f"{origin_digests.of_path(place / layout.MANIFEST)}, a checkpoint's manifest"
    in_parts = place.suffix == ".json"  # which lists the files beside it
    return origin_digests.of_path(place.parent if in_parts else place)


def _nothing_is_left(run: Run) -> bool:
    """Returns whether nothing is left to do; a run may still owe on_train_end at its last."""
    checkpointer = run.checkpointer
    if not run.loop.is_last or checkpointer.resumable is None:
        return run.loop.is_last
    return bool(collectives.on_rank_zero(checkpointer.validations.is_finished, "the end"))


def _cut_logs(run: Run, *, has_finished: bool) -> None:
    """Cuts the logs back to the checkpoint: what came after it is done and logged again.

    A new run begins with no logs, perhaps with the state of another one. One that has finished does
    nothing again.
    """
    checkpointer = run.checkpointer
    validations = checkpointer.validations
    _say_of_lost_lines(run)
    if has_finished:
        return validations.cut(validations.size())
    sizes = checkpointer.sizes if checkpointer.resumable else {}
    run.report.metrics.cut(sizes)
    validations.cut(sizes.get(VALIDATIONS_BYTES, 0))


def _say_of_lost_lines(run: Run) -> None:
    """Says which logs are shorter than at the checkpoint; a run without a ledger was copied so."""
    own = run.checkpointer.resumable
    if own is None or not run.start.writes or not (run.start.output_dir / LEDGER).exists():
        return
    then = run.checkpointer.sizes
    now = {**run.report.metrics.sizes(), VALIDATIONS_BYTES: run.checkpointer.validations.size()}
    for key, size in now.items():
        if size < then.get(key, 0):
            what = key.removesuffix("_bytes")
            run.start.warn(
                f"the file of {what} has {size} bytes, and had {then[key]} at {own.name}: it was "
                "removed or cut, and what it had is lost"
            )


def _restore(run: Run, path: Path) -> list[str]:
    """Restores a checkpoint, and says where the run goes on; returns what is not exact."""
    is_own = path == run.checkpointer.resumable
    notes = run.checkpointer.restore(path)
    run.update.wrappers.follow()
    run.state.told.load_state_dict({} if run.start.rank else run.checkpointer.told_then)
    run.loop.note_checkpoint(is_own=is_own)
    position = f"iteration {run.loop.iteration}, "
    if run.loop.epoch > 0:
        position += f"epoch {run.loop.epoch}, batch {run.data.batch_in_epoch} of the epoch, "
    rates = " ".join(f"{name}={rate:g}" for name, rate in run.state.learning_rates().items())
    run.start.logger.info("resumed %s: %s%s", path.name if is_own else path, position, rates)
    _say_of_skips(run)
    changed = run.directory.changed_keys(run.start.config)
    for key, (old, new) in [*changed.items()][:MOST_KEYS]:
        run.start.logger.info(f"config: {key}: {old!r} at the first start, {new!r} now")
    if (more := len(changed) - MOST_KEYS) > 0:
        run.start.logger.info(
            f"config: and {more:,} keys more, with other values than at the first start"
        )
    if changed:
        run.start.logger.info(
            "config: what training has changed comes from the checkpoint, all else from the config"
        )
    return notes


def _say_of_skips(run: Run) -> None:
    """Says which changes of training.skip_updates come too late for this run."""
    iteration = run.loop.iteration
    used, left_out = run.data.skips.go_on(iteration)
    if used:
        run.start.warn(
            f"training.skip_updates: {used} given, and the run goes on from iteration {iteration}, "
            "which has used their batches: they have no effect. To leave them out, continue from "
            "a checkpoint before them: --checkpoint_path RUN/N with another --output, or --fresh."
        )
    if left_out:
        run.start.logger.info(
            f"training.skip_updates: lacks {left_out}, which the run has left out; they stay so"
        )
