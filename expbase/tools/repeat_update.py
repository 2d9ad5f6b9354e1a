"""Makes updates of a user's script several times from one state and one batch, for `verify`.

It writes what went through each (update_trace.py); nondeterminism.py reads it.

    python repeat_update.py train.py --output runs/a …      # writes runs/a.updates.rank_0.jsonl
    python repeat_update.py -m package.train --output runs/a …

How it trains is in the environment, as for verified_run.py, and so is the iteration (FIRST) from
which on each update is made several times. Those before it are made once.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from expbase.base.any_object import module_of
from expbase.base.arrays import Array
from expbase.base.gradients import copies_of, set_gradient
from expbase.base.json_values import checksum
from expbase.base.rng import seed_all
from expbase.experiment import ExperimentBase
from expbase.mixins_in_front import put_in_front
from expbase.ranks import collectives
from expbase.state import optimizers
from expbase.state.parts import (
    StatefulObjects,
    named_parameters,
    parameters_of,
    sparse_embeddings,
    sparse_under_adam,
)
from expbase.state.rollback import Rollback
from expbase.state.value_kinds import is_users
from expbase.state.walk import LOADERS, nodes_in_layers
from expbase.tools.child_processes import run_script
from expbase.tools.update_trace import (
    AFTER,
    BATCH,
    BEFORE,
    LOSS,
    SAMPLES,
    Trace,
    operators_of_paddle,
    traced_layers,
)
from expbase.tools.verified_run import Verified

FIRST = "EXPBASE_REPEAT_FROM"
TIMES = 4  # that an update is made
MORE = 9  # updates after the first one, since a race shows now and then
_ASKED = 16  # samples, or batches of a sampler, that are asked for twice


class UpdateUnderWay:
    """An update that is made several times: its batches, and a trace of each making."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.batches: list[tuple[Any, Any]] = []  # the indices of the samples, and the batch
        self.traces: list[Trace] = []
        self.is_last = False  # whether it is not made once more
        self._used = 0  # batches, in this making

    @property
    def trace(self) -> Trace:
        """What has gone through the making under way."""
        return self.traces[-1]

    def begin(self, *, is_last: bool) -> Trace:
        """Begins a making, and returns its trace; random numbers begin alike in each."""
        self.is_last = is_last
        self._used = 0
        self.traces.append(Trace())
        seed_all(self.iteration)
        return self.trace

    def next_batch(self, read: Callable[[], tuple[Any, Any]]) -> Any:
        """Returns a batch: as `read` gives it, or as it did in the first making."""
        if self._used == len(self.batches):
            self.batches.append(read())
        indices, batch = self.batches[self._used]
        self._used += 1
        self.trace.add(SAMPLES, "", indices)
        for name, part in _parts_of(batch):
            self.trace.add(BATCH, name, part)
        seed_all(self.iteration + self._used)
        return _copied(batch)  # training may write into it


# At most one. As an attribute of the experiment it would be part of its state.
_under_way: list[UpdateUnderWay] = []


class Repeated(ExperimentBase):
    """Makes updates several times, writes a line about each, and ends all ranks soon."""

    def train_batch(self) -> None:
        """Makes an update, from FIRST on several times from one state."""
        first = int(os.environ[FIRST])
        update = UpdateUnderWay(self.iteration)
        _under_way[:] = [update]
        before = State(self) if self.iteration >= first else None
        for number in range(TIMES if before else 1):
            if before:
                before.restore()
            found = self.internals.stateful_objects()
            trace = update.begin(is_last=not before or number == TIMES - 1)
            trace.add_weights(BEFORE, found)
            with traced_layers(found, trace):
                super().train_batch()
            trace.add_weights(AFTER, self.internals.stateful_objects())
        line: dict[str, Any] = {"iteration": self.iteration, "traces": [*map(vars, update.traces)]}
        if self.iteration == first:
            line |= self._facts(update)
        self._write(line)
        if before:
            self._leave_if_done(update, before)
        _under_way.clear()

    def _write(self, line: dict[str, Any]) -> None:
        with updates_path(self.output_dir, self.rank).open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def _leave_if_done(self, update: UpdateUnderWay, before: State) -> None:
        """Ends all ranks if something differs, or is to be looked for no longer."""
        differs = any(trace.steps != update.trace.steps for trace in update.traces)
        last = int(os.environ[FIRST]) + MORE
        if not any(collectives.all_gather_object(differs)) and self.iteration < last:
            return
        notes = Path(f"{self.output_dir}.operators.rank_{self.rank}")
        operators: list[list[list[str]]] = []
        # Of a sparse gradient its notes end the process (SIGSEGV, paddle 3.3.1).
        is_sparse = bool(sparse_embeddings(self.internals.stateful_objects()))
        with contextlib.suppress(KeyError):  # a second step within the update misses a name
            for _ in range(0 if is_sparse else TIMES):
                before.restore()
                update.begin(is_last=False)
                with operators_of_paddle(notes, self.internals.stateful_objects()) as found:
                    super().train_batch()
                operators.append(found)
        self._write({"iteration": self.iteration, "operators": operators})
        collectives.barrier("the end of what is repeated")
        os._exit(0)  # no event tells the experiment that it had finished

    def read_batch(self) -> Any:
        """Reads a batch once for all makings of an update."""
        read = super().read_batch

        def fresh() -> tuple[Any, Any]:
            batch = read()
            return self.internals.batch_indices, batch

        return _under_way[0].next_batch(fresh) if _under_way else read()

    def backward(self, loss: Any) -> None:
        """Notes a loss."""
        for update in _under_way:
            update.trace.add(LOSS, "", loss)
        super().backward(loss)

    def log(self, mapping: Any = None, /, *misplaced: Any, **scalars: Any) -> None:
        """Notes what each making logs; the log has it from the last one alone."""
        for update in _under_way if self.internals.phase == "train" else ():
            for name, value in {**(mapping or {}), **scalars}.items():
                number = value.item() if hasattr(value, "item") else value
                update.trace.logged.append([name, repr(number)])
            if not update.is_last:
                return
        super().log(mapping, *misplaced, **scalars)

    def _facts(self, update: UpdateUnderWay) -> dict[str, Any]:
        """Returns what may be a cause, and what data set and sampler give when they are asked."""
        found = self.internals.stateful_objects()
        indices = [index for indices, _ in update.batches for index in indices or ()]
        sparse = {id(embedding.weight) for embedding in sparse_under_adam(found).values()}
        return {
            **_asked(getattr(self, "train_loader", None), indices[:_ASKED]),
            "layers": {path: type(layer).__name__ for path, layer in found.sublayers()},
            "optimizers": {name: type(one).__name__ for name, one in found.optimizers.items()},
            "sparse_under_adam": [name for name, p in named_parameters(found) if id(p) in sparse],
            "threads": _threads(),
            "own_operators": sorted(_own_operators(PyLayer)),
            "device": str(paddle.get_device()),
        }


class State:
    """The state of an experiment before an update, to be put back."""

    def __init__(self, experiment: ExperimentBase) -> None:
        self._found = found = experiment.internals.stateful_objects()
        _make_accumulators(found)
        tensors, self._of_objects = copy.deepcopy(_on_host(found))
        self._tensors = tensors
        self._gradients = copies_of([parameter for _, parameter in named_parameters(found)])
        nodes = experiment.internals.state.reach.walk().nodes.items()
        # Without the data, which may be large: no making but the first reads any.
        others = [node for path, node in nodes if path.partition(".")[0] not in LOADERS]
        self._others = Rollback([*others, *nodes_in_layers(found.layers.values())])

    def restore(self) -> None:
        """Puts it back."""
        self._others.restore()
        self._found.load_state_dict((self._tensors, copy.deepcopy(self._of_objects)))
        for parameter, kept in self._gradients:
            set_gradient(parameter, None if kept is None else kept.clone())


def _on_host(found: StatefulObjects) -> Any:
    tensors, of_objects = found.state_dict()
    arrays = {
        file: {key: Array(a.dtype, a.shape, a.data) for key, a in by_key.items()}
        for file, by_key in tensors.items()
    }
    return arrays, of_objects


def _make_accumulators(found: StatefulObjects) -> None:
    """Makes what the first step of each optimizer would make, so that it can be put back."""
    block = paddle.base.framework.default_main_program().global_block()
    for optimizer in map(optimizers.innermost, found.optimizers.values()):
        trained = [p for p in parameters_of(optimizer) if not p.stop_gradient]
        if hasattr(optimizer, "_create_accumulators"):
            optimizer._create_accumulators(block, trained)


def _parts_of(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a batch with their places in it."""
    if isinstance(batch, dict):
        yield from ((f"[{name!r}]", part) for name, part in batch.items())
    elif isinstance(batch, (list, tuple)):
        yield from ((f"[{number}]", part) for number, part in enumerate(batch))
    else:
        yield "", batch


def _copied(value: Any) -> Any:
    """Returns a batch whose tensors and arrays are others with the same content."""
    if isinstance(value, paddle.Tensor):
        kept = value.clone().detach()
        kept.stop_gradient = value.stop_gradient
        return kept
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _asked(loader: Any, indices: list[Any]) -> dict[str, Any]:
    """Returns checksums of what a data set and a sampler give, asked twice from one seed."""
    data: Any = getattr(loader, "dataset", None)
    sampler: Any = getattr(loader, "batch_sampler", None)
    can_be_asked = hasattr(type(data), "__getitem__")
    given = {str(i): _twice(partial(data.__getitem__, i)) for i in indices if can_be_asked}
    order: list[str] = []
    if hasattr(type(sampler), "__iter__"):
        order = _twice(lambda: [*itertools.islice(iter(sampler), _ASKED)])
    of = {"data_set": type(data).__name__, "sampler": type(sampler).__name__}
    return {"samples": {i: twice for i, twice in given.items() if twice}, "order": order, **of}


def _twice(ask: Callable[[], Any]) -> list[str]:
    """Returns two checksums of an answer; none if it cannot be asked out of its turn."""
    given: list[str] = []
    with contextlib.suppress(Exception):
        for _ in range(2):
            seed_all(0)
            given.append(checksum(ask()))
    return given


def _threads() -> list[str]:
    """Returns the names of threads that run the user's code."""
    found = [(thread.name, getattr(thread, "_target", None)) for thread in threading.enumerate()]
    return [name for name, target in found if target and is_users(module_of(target))]


def _own_operators(kind: Any) -> Iterator[str]:
    """Yields the names of the user's operators: classes derived from PyLayer."""
    for derived in kind.__subclasses__():
        if is_users(module_of(derived)):
            yield derived.__qualname__
        yield from _own_operators(derived)


def updates_path(output: Path, rank: int) -> Path:
    """Returns where a rank's lines are, beside the output directory."""
    return output.with_name(f"{output.name}.updates.rank_{rank}.jsonl")


if __name__ == "__main__":
    # By its full name, under which the processes of --nprocs can import the class, too.
    module = importlib.import_module("expbase.tools.repeat_update")
    with put_in_front(module.Repeated):  # behind the other one, whose notes are of no update
        run_script(Verified, sys.argv[1:])
