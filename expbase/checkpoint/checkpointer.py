"""From the contents of a checkpoint to files and back, over all ranks.

What a checkpoint holds is the one mapping that `contents` returns, of which each Part is asked for
its `problems` before any is restored: nothing is changed by a checkpoint that does not fit.

    checkpointer = Checkpointer(directory, config.training, logger, contents=…, …)
    checkpointer.find_own(None)
    notes = checkpointer.restore(checkpointer.resumable)
    checkpointer.capture(iteration, sizes)      # a copy in memory, before what may fail
    checkpointer.write()                        # … which is wanted: its files, in a thread
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from expbase.base.arrays import Array
from expbase.base.background import Background, SnapshotBuffer
from expbase.base.checkpoint_part import Part
from expbase.base.errors import RuntimeMistake, TypeMistake
from expbase.base.json_values import Decoder, Encoder
from expbase.checkpoint import best, layout, rank_state, storage
from expbase.checkpoint.compare_rank_weights import OnDifference, not_exact
from expbase.checkpoint.contents import LOOP, OBJECTS, USERS, VALUES
from expbase.checkpoint.layout import (
    ARRAYS,
    STATE_FILE,
    CheckpointError,
    NonFiniteError,
)
from expbase.checkpoint.named import find_in_run
from expbase.checkpoint.rank_state import GatheredState
from expbase.ranks import collectives
from expbase.record.sources import Code
from expbase.record.starts_and_ends import DIGEST
from expbase.state.parts import UPDATED, ParameterKeys, StatefulObjects, Tensors

VALIDATIONS_BYTES = "validations_bytes"  # a fact in the manifest
_TOLD = "told"  # another one: what had changed and is in no checkpoint
_Kept = Callable[[Collection[int]], Collection[int]]  # of those that are there, the best ones
_LOOKED_AT = (OBJECTS, VALUES, USERS)  # the entries of a checkpoint that is not continued


@dataclass(eq=False)
class _Memory:
    """What a copy of the state is kept in, on rank 0."""

    own: SnapshotBuffer = field(default_factory=SnapshotBuffer)
    received: SnapshotBuffer = field(default_factory=SnapshotBuffer)  # of the other ranks


@dataclass
class _Copy:
    """The state of all ranks after an iteration, in memory: a checkpoint that can be written."""

    iteration: int
    state: GatheredState
    info: Mapping[str, Any]  # for the manifest
    memory: _Memory


class _Fitting(NamedTuple):
    """What was read of a checkpoint that fits."""

    states: dict[str, Any]  # of this rank, by entry
    num_ranks: int  # that have saved it
    changed_code: str  # since then; "": none
    differing: list[str]  # parameters that differed between the ranks, of which it has rank 0's


class Checkpointer:
    """The checkpoints of one run.

    Args:
        directory: Where they are.
        training: That section of the config.
        contents: Returns the entries of a checkpoint, in the order of restoring; with
            `saving=True` it asks on_save_checkpoint first.
        told: Returns what was said to be in no checkpoint, on rank 0.
        on_written: Called on rank 0 for each one that is on the disk.
        code: The experiment's class and files.
        facts: Returns the facts for a reader who has a checkpoint without its run.
        refuse: Raises for what differs between the ranks, if no bit may depend on their number.
        on_difference: Called on every rank when what is trained, or a rate, differs between them.
    """

    def __init__(
        self,
        directory: Path,
        training: Any,
        logger: logging.Logger,
        *,
        contents: Callable[..., dict[str, Part]],
        told: Callable[[], Mapping[str, Any]],
        on_written: Callable[[Path], object],
        code: Code,
        facts: Callable[[], Mapping[str, Any]],
        refuse: rank_state.Refusal | None = None,
        on_difference: OnDifference | None = None,
    ) -> None:
        self.code = code
        self._rank = collectives.rank()
        file = None if self._rank else directory.parent / best.FILE
        self.validations = best.Validations(file, training)
        self.resumable: Path | None = None  # this run's newest, found at its start
        self.newest_saved: Path | None = None  # that is known to be good
        self.restored: Path | None = None  # the one from which this start goes on
        self.changed_code = ""  # since the restored one; "": none
        self.inspected = ""  # the name of the checkpoint that was loaded for inspection
        self.sizes: Mapping[str, int] = {}  # of the logs at the restored checkpoint, in bytes
        self.told_then: Mapping[str, Any] = {}  # of that checkpoint
        self._background = Background()
        # While one copy is being written another one can be made.
        self._memories = _Memory(), _Memory()
        self._copy: _Copy | None = None  # on rank 0, if one is kept
        self._under_way: _Copy | None = None  # that is being written
        self._writing_now = threading.Lock()
        self._written: list[Path] = []  # of which `on_written` does not know yet
        self._expected: Mapping[str, str] | None = None  # what had state after setup
        self._ignored: set[str] = set()  # checkpoints that are damaged, or cannot be deleted
        self._has_looked = False  # for a checkpoint to go on from
        self._directory = directory
        self._logger = logger
        self._training = training
        self._contents = contents
        self._told = told
        self._on_written = on_written
        self._facts = facts
        self._depends_on_ranks = refuse is None
        self._gatherer = rank_state.Gatherer(logger, refuse, on_difference)

    def find_own(self, inspected: str | None) -> Path | None:
        """Looks for this run's newest intact checkpoint; damaged ones are moved aside, loudly.

        Of a run that is only looked at, verifies the `inspected` one, "best" say. Returns what it
        has found.

        Raises:
            CheckpointError: There is no such one, all are damaged, or another rank has a newer one.
        """
        self._has_looked = True
        if inspected is not None:
            run = self._directory.parent
            return collectives.on_rank_zero(lambda: find_in_run(run, inspected), "the checkpoint")

        def look() -> Path | None:
            path = storage.newest_intact(self._directory, self._logger.warning)
            if path is not None:
                storage.check_format_at(path)  # an error comes before the data is read
                there = layout.listed(self._directory)
                self._ignored = {one.name for one in there[there.index(path) + 1 :]}
            return path

        self.resumable = collectives.on_rank_zero(look, "looking for a checkpoint")
        self._refuse_newer_elsewhere()
        return self.resumable

    def _refuse_newer_elsewhere(self) -> None:
        """Raises a CheckpointError if another rank has a newer checkpoint in its directory.

        Without a shared disk the checkpoints are with rank 0 alone, so machines that have changed
        places would begin anew in silence.
        """
        run = self._directory.parent
        position = f"rank {self._rank} ({platform.node()}, {run})"
        of_ranks = collectives.all_gather_object((layout.newest_iteration(run), position))
        (first, of_zero), (last, of_last) = of_ranks[0], max(of_ranks, key=lambda found: found[0])
        if last > first:
            raise CheckpointError(
                f"output directory of {of_zero}: the newest checkpoint, of iteration {last}, is "
                f"with {of_last}. Start so that the machine with the newest checkpoint is rank 0 "
                "(paddle's launcher: --rank 0 on it), or copy it to rank 0's directory; --fresh "
                "begins a new run on purpose."
            )

    def expect(self, found: StatefulObjects) -> None:
        """Notes what has state after setup.

        Raises:
            TypeError: Nobody has called `find_own`.
        """
        if not self._has_looked:
            raise TypeMistake(
                "setup_checkpointer: does not call super().setup_checkpointer(); expected it to."
            )
        self._expected = found.outline()

    def capture(self, iteration: int, sizes: Mapping[str, int]) -> None:
        """Copies the state of now into memory, on rank 0, in the place of the copy before.

        It is what a checkpoint of now would hold. `sizes` are those of the logs, in bytes.
        Collective.

        Raises:
            RuntimeError, TypeError: A value that a checkpoint cannot hold; something with state was
                added after setup; the state is that of a checkpoint that is only looked at.
        """
        if self.inspected:
            raise RuntimeMistake(
                f"save: the state is that of {self.inspected}, loaded to be looked at; as "
                f"iteration {iteration} it would spoil the run."
            )
        self.let_go()
        contents = self._contents(saving=True)
        found = _objects(contents)
        self.refuse_changes(found)
        tensors, values = _capture(contents)
        memory = self._memories[0]
        if self._under_way and self._under_way.memory is memory and not self._background.is_done:
            memory = self._memories[1]
        if self._rank == 0:
            tensors = memory.own.snapshot(tensors)
        collectives.barrier("saving")  # on_save_checkpoint may take long on one rank
        state = self._gatherer.gather(found, tensors, values, memory.received)
        if self._rank == 0:
            info = {
                **sizes,
                VALIDATIONS_BYTES: self.validations.size(),
                **self.code.facts(),
                _TOLD: self._told(),
                **self._facts(),
            }
            self._copy = _Copy(iteration, state, info, memory)

    def let_go(self) -> None:
        """Forgets the copy, which nobody wants any more."""
        with self._writing_now:
            self._copy = None

    def write(self, *, needed: bool = True) -> None:
        """Writes the copy, if there is one, and deletes the checkpoints that nothing asks to keep.

        The files are written while training goes on; what fails there is raised by the next call,
        by `settle` or by `close`. That the system refuses, for lack of room say, is an error if the
        checkpoint is `needed` or the first one; else a line says so. Only rank 0 has a copy.

        Raises:
            CheckpointError: The one before could not be written.
            NonFiniteError: A trained parameter or an accumulator of that one is not finite.
        """
        self.settle()
        with self._writing_now:  # write_now waits for what is taken here
            copy, self._copy = self._copy, None
            if copy is not None:
                kept = self.validations.kept(self._coming(copy))
                self._under_way = copy
                self._background.start(functools.partial(self._write, copy, kept, needed=needed))

    def write_now(self) -> None:
        """Writes the copy, if there is one, before it returns: the process is about to end.

        May be called in any thread; it waits for the file that is under way.
        """
        with self._writing_now:
            copy, self._copy = self._copy, None
            try:
                self._background.wait()
            finally:
                if copy is not None:
                    self._write(copy, self.validations.kept(self._coming(copy)), needed=True)

    def note_validation(self, iteration: int, epoch: int, results: Mapping[str, float]) -> bool:
        """Notes the results of a validation; writes the copy from before it if they are among the
        best. Collective.

        Returns:
            Whether the copy is written.
        """

        def note() -> bool:
            self.validations.add(iteration, epoch, results)
            copy = self._copy
            is_wanted = copy is not None and self.validations.is_kept(iteration, self._coming(copy))
            if is_wanted:
                self.write(needed=False)
            return is_wanted

        return bool(collectives.on_rank_zero(note, "the results of the validation"))

    def _coming(self, *copies: _Copy) -> list[int]:
        """Returns the iterations of copies, and of the one that is being written."""
        if self._under_way is not None and not self._background.is_done:
            copies = (*copies, self._under_way)
        return [copy.iteration for copy in copies]

    @property
    def newest_name(self) -> str:
        """The name of the newest good checkpoint, for a message; rank 0 alone has written it."""
        there = layout.listed(self._directory)[-1:] if self._rank else []
        newest = there[0] if there else self.newest_saved
        return newest.name if newest else "none yet" if self._rank == 0 else "rank 0's newest"

    def close(self) -> None:
        """Returns when this rank writes no more; raises what went wrong. May be called twice."""
        self.validations.close()
        self.settle()

    def settle(self, *, wait: bool = True) -> None:
        """Raises what went wrong in a save that has ended, or calls `on_written`.

        While that runs nothing is saved, so nothing is deleted. Without `wait` it does nothing if
        the save still runs.
        """
        if wait or self._background.is_done:
            self._background.wait()
            self._under_way = None
            while self._written:
                self._on_written(self._written.pop())

    def refuse_changes(self, found: StatefulObjects) -> None:
        """Raises a RuntimeError if what has state is not what setup made: none could load it."""
        before = self._expected or {}
        now = found.outline()
        for name in sorted(before.keys() | now.keys()):
            old = before.get(name)
            new = now.get(name)
            if old == new or (old == UPDATED and new is None):  # a list of parameters may be cut
                continue
            how = f"is {new}, and was {old} after setup; a resumed run has what setup makes"
            if old is None:
                how = "appeared after setup, and a resumed run would not have it"
            if new is None:
                how = "is gone since setup, and a resumed run has it"
            raise RuntimeMistake(
                f"self.{name}: {how} when its state is restored. Make in setup_model all that "
                "training needs, and use a part of it; or exclude_from_state it there."
            )

    def _write(self, copy: _Copy, kept: _Kept, *, needed: bool) -> None:
        """Writes what was captured, if it is good and the system does not refuse."""
        iteration = copy.iteration
        bad = "" if self._training.nonfinite == "ignore" else copy.state.nonfinite()
        if bad and self._training.nonfinite == "error":
            raise NonFiniteError(f"{bad} after iteration {iteration}", self.newest_name)
        if bad:
            return self._go_on_without(iteration, f"not finite: {bad}.")
        storage.flush_logs(self._directory.parent)  # whose sizes are in `info`
        with contextlib.suppress(OSError):  # a run that goes on is another one
            (self._directory.parent / DIGEST).unlink(missing_ok=True)
        try:
            files = copy.state.files()
            self.newest_saved = storage.write(self._directory, iteration, files, copy.info)
        except CheckpointError as error:
            if needed or self.newest_saved is None:
                raise CheckpointError(f"{error} Then run the same command again.") from error
            return self._go_on_without(iteration, error)
        self._written.append(self.newest_saved)
        self._ignored.discard(self.newest_saved.name)
        self._logger.info("[%d] saved %s", iteration, self.newest_saved.name)
        self._prune(kept)

    def _go_on_without(self, iteration: int, reason: object) -> None:
        text = "[%d] NO CHECKPOINT: %s The newest good one is %s, and training goes on."
        self._logger.warning(text, iteration, reason, self.newest_name)

    def _prune(self, kept: _Kept) -> None:
        keep = self._training
        how = keep.keep_last, keep.keep_every, kept
        for name, refused in storage.prune(self._directory, *how, ignored=self._ignored).items():
            if refused:
                self._ignored.add(name)  # told once
                text = "%s cannot be deleted: %s. This start leaves it, and training goes on."
                self._logger.warning(text, name, refused)
            else:
                self._logger.info("deleted %s (training.keep_last=%d)", name, keep.keep_last)

    def finish(self) -> None:
        """Waits for the last checkpoint, and deletes what is not the best any more."""
        self.close()
        if self._rank == 0:
            self._prune(self.validations.kept())

    def note_end(self, iteration: int, epoch: int) -> None:
        """Notes that the run has come to its end."""
        if self._rank == 0:
            self.validations.add_end(iteration, epoch)

    def restore(self, path: Path) -> list[str]:
        """Restores a checkpoint.

        Returns:
            Reasons why continuing is not exact.

        Raises:
            CheckpointError: It does not fit; nothing was changed.
        """
        contents = self._contents()
        fitting = self._read_fitting(path, contents)
        self.changed_code = fitting.changed_code
        notes = [*filter(None, [self.changed_code])]
        if fitting.num_ranks != collectives.world_size() and self._depends_on_ranks:
            notes.append(
                f"saved by {fitting.num_ranks} processes and continued by "
                f"{collectives.world_size()}: they draw other numbers, and sum in another order"
            )
        notes += not_exact(fitting.differing)
        notes += _load(path, contents, fitting.states)
        self.newest_saved, self.restored, self.inspected = path, path, ""
        return notes

    def look_at(self, run: Path, which: str) -> tuple[int, int]:
        """Restores objects and values of a checkpoint of a run, "best" say; the log names it.

        What differed between several processes, like the statistics of batch norm, is rank 0's.

        Returns:
            The position in training, iteration and epoch.

        Raises:
            CheckpointError: There is none, or it does not fit; nothing was changed.
        """
        self.close()  # the last one may still be under way
        path = collectives.on_rank_zero(lambda: find_in_run(run, which), "load_checkpoint")
        assert path is not None
        contents = {n: entry for n, entry in self._contents().items() if n in _LOOKED_AT}
        _objects(contents).is_to_look = True
        fitting = self._read_fitting(path, contents)
        for note in _load(path, contents, fitting.states):
            self._logger.warning("%s: %s", path.name, note)
        self.inspected = path.name
        if fitting.changed_code:
            self._logger.warning("%s: %s", path.name, fitting.changed_code)
        self._logger.info("loaded %s (%s)", path.name, which)
        position = fitting.states[LOOP]
        return position["iteration"], position["epoch"]

    def _read_fitting(self, path: Path, contents: Mapping[str, Part]) -> _Fitting:
        """Reads a checkpoint, of which what is in `contents` fits; sets `sizes` and `told_then`."""
        opened = rank_state.open_checkpoint(path)
        with storage.reading(path / layout.MANIFEST):
            changed_code = self.code.changes_since(opened.info)
            self.told_then = dict(opened.info.get(_TOLD, {}))
            sizes = {name: n for name, n in opened.info.items() if name.endswith("_bytes")}
            self.sizes = {name: len(range(size)) for name, size in sizes.items()}
        with storage.reading(path / STATE_FILE):
            values, num_ranks = opened.of_this_rank()
            differing = [*map(str, opened.state.get("differing", []))]
        tensors, problems = rank_state.take(opened, _objects(contents), num_ranks)
        with storage.reading(path / STATE_FILE):
            expected = (LOOP, *contents)
            problems += [f"{n}: missing in the checkpoint." for n in expected if n not in values]
            keys = ParameterKeys(_objects(contents))
            states = {} if problems else _decoded(tensors, values, keys)
            for name in contents if states else ():
                problems += contents[name].problems(states[name])
        self._raise_together(path, problems)
        return _Fitting(states, num_ranks, changed_code, differing)

    def _raise_together(self, path: Path, problems: list[str]) -> None:
        for rank, of_rank in enumerate(collectives.all_gather_object(problems)):
            if of_rank:
                lines = "\n  ".join(of_rank[:20])
                raise CheckpointError(
                    f"{path}: does not fit this experiment on rank {rank}, in {len(of_rank)} "
                    f"points:\n  {lines}\n"
                    "Nothing was changed. Use the model it was saved from; or begin a new run, in "
                    "another --output or with --fresh, from the weights that fit: "
                    "--init_model_path with --init_partial."
                )


def _objects(contents: Mapping[str, Part]) -> StatefulObjects:
    found = contents[OBJECTS]
    assert isinstance(found, StatefulObjects)
    return found


def _load(path: Path, contents: Mapping[str, Part], states: Mapping[str, Any]) -> list[str]:
    """Restores entries from states that fit; returns reasons why continuing is not exact."""
    notes: list[str] = []
    for name, entry in contents.items():
        is_users = name in (OBJECTS, USERS)  # an error in them is the user's, and no damage
        with contextlib.nullcontext() if is_users else storage.reading(path / STATE_FILE):
            notes += entry.load_state_dict(states[name])
    return notes


def _capture(contents: Mapping[str, Part]) -> tuple[Tensors, dict[str, Any]]:
    """Returns the tensors by file and key, live views, and JSON values by entry."""
    arrays: dict[str, Array] = {}
    encoder = Encoder(arrays, ParameterKeys(_objects(contents)))
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for name in reversed([*contents]):
        state = contents[name].state_dict()
        if name == OBJECTS:
            tensors, state = state
        values[name] = {k: encoder.encode(v, f"{name}.{k}") for k, v in state.items()}
    return (tensors | {ARRAYS: arrays} if arrays else tensors), values


def _decoded(tensors: Tensors, values: Mapping[str, Any], keys: ParameterKeys) -> dict[str, Any]:
    decoder = Decoder(tensors.pop(ARRAYS, {}), keys)
    states = {
        name: {key: decoder.decode(value, f"{name}.{key}") for key, value in entry.items()}
        for name, entry in values.items()
    }
    return states | {OBJECTS: (tensors, states[OBJECTS])}
