"""From an experiment to its checkpoints and back, over all ranks.

`SECTIONS` is the one list of what a checkpoint holds beside the tensors. Rank 0 alone reads and
writes files; what differs between ranks (random states, running statistics) is gathered and kept
per rank. checkpoint.py knows how a directory is written, state.py how an object is captured.

    checkpointer = Checkpointer(experiment, directory)
    checkpointer.save()
    path = checkpointer.newest()
    checkpointer.restore(path)
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from expbase import distributed
from expbase.state import checkpoint, encoding, objects, rng
from expbase.state.arrays import Array, TensorFileError, parse, serialize
from expbase.state.background import Background, SnapshotBuffer
from expbase.state.checkpoint import CheckpointError

if TYPE_CHECKING:
    from expbase.experiment import ExperimentBase

STATE_FILE = "state.json"
_FORMAT = 1
_SUFFIX = ".safetensors"
_CHUNK = 1 << 26  # bytes of one broadcast


@dataclass(frozen=True)
class Section:
    """One entry of state.json.

    Attributes:
        capture: Gives its JSON values by name; arrays go into the mapping it is handed.
        restore: Takes them back; returns what of it costs exactness, in words.
    """

    capture: Callable[[ExperimentBase, dict[str, Array]], dict[str, Any]]
    restore: Callable[[ExperimentBase, dict[str, Any], Mapping[str, Array]], list[str]]


def _capture_counters(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return {
        "iteration": exp.iteration,
        "epoch": exp.epoch,
        "pass_is_closed": exp._pass_is_closed,
        **encoding.encode(exp._cursor.state_dict(), "counters", arrays),
    }


def _restore_counters(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    exp.iteration = values["iteration"]
    exp.epoch = values["epoch"]
    exp._pass_is_closed = values["pass_is_closed"]
    return exp._cursor.load_state_dict(encoding.decode(values, arrays))


def _capture_registered(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return {n: encoding.encode(getattr(exp, n), f"registered.{n}", arrays) for n in exp._registered}


def _restore_registered(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    for name, value in values.items():
        setattr(exp, name, encoding.decode(value, arrays))
    return []


def _capture_own(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return {n: encoding.encode(value, f"own.{n}", arrays) for n, value in exp._own_states.items()}


def _restore_own(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    # Comes last, and must not spoil the random states that were restored before it.
    with rng.isolated():
        states = {n: encoding.decode(value, arrays) for n, value in values.items()}
        exp._handlers.fire("on_load_checkpoint", states)
    return []


def _capture_environment(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return {
        "paddle": paddle.__version__,
        "device": paddle.device.get_device().partition(":")[0],
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
    }


def _restore_environment(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    now = _capture_environment(exp, {})
    return [
        f"{name}: {values.get(name)} there, {now[name]} now: kernels may sum in another order"
        for name in now
        if values.get(name) != now[name]
    ]


def _capture_random(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return rng.capture()


def _restore_random(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    unknown = rng.restore(values)
    return [f"the random states of {name} are new" for name in unknown]


def _capture_log(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    journal = exp._journal
    pending = encoding.encode(journal.meter.numbers(), "log", arrays)
    return {"pending": pending, "hparams": journal.has_hparams}


def _restore_log(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    exp._journal.meter.restore(encoding.decode(values["pending"], arrays))
    exp._journal.has_hparams = values["hparams"]
    return []


def _capture_gradients(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    # A gradient of zeros is not none: momentum moves the weights of the one, not of the other.
    zeros = []
    for name, parameter in objects.named_parameters(exp._find_state()):
        gradient = parameter.grad_
        if gradient is None or gradient.is_selected_rows():
            continue
        array = Array.of(gradient)
        if array.data.any():
            arrays[f"gradients.{name}"] = array
        else:
            zeros.append(name)
    return {"zeros": zeros}


def _restore_gradients(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    zeros = set(values["zeros"])
    for name, parameter in objects.named_parameters(exp._find_state()):
        array = arrays.get(f"gradients.{name}")
        if array is None and name not in zeros:
            parameter.clear_gradient(False)
            continue
        gradient = paddle.zeros_like(parameter)
        if array is not None:
            array.copy_to(gradient)
        parameter.grad = gradient
    return []


def _capture_best(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return {"scores": encoding.encode(exp._checkpointer.scores, "best", arrays)}


def _restore_best(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    exp._checkpointer.scores = encoding.decode(values["scores"], arrays)
    return []


def _capture_listeners(exp: ExperimentBase, arrays: dict[str, Array]) -> dict[str, Any]:
    return dict(exp._handlers.counters())


def _restore_listeners(
    exp: ExperimentBase, values: dict[str, Any], arrays: Mapping[str, Array]
) -> list[str]:
    return exp._handlers.restore(values)


# In the order in which they are restored; what objects on the experiment hold is restored before.
SECTIONS: dict[str, Section] = {
    "counters": Section(_capture_counters, _restore_counters),
    "registered": Section(_capture_registered, _restore_registered),
    "gradients": Section(_capture_gradients, _restore_gradients),
    "log": Section(_capture_log, _restore_log),
    "best": Section(_capture_best, _restore_best),
    "listeners": Section(_capture_listeners, _restore_listeners),
    "environment": Section(_capture_environment, _restore_environment),
    "random": Section(_capture_random, _restore_random),
    "own": Section(_capture_own, _restore_own),
}
_OBJECTS = "objects"  # the section of what stands on the experiment by itself
# Names of files that no attribute can have.
_ARRAYS = "@values"  # of the arrays that sections hold
_RANK = "@rank_"  # of what a rank has other than rank 0


class Checkpointer:
    """The checkpoints of one experiment.

    Args:
        experiment: Whose.
        directory: Where they stand.

    Attributes:
        newest_saved: The newest that is known to be good; None: none yet.
        scores: Iteration and score of the best ones that were saved, best first.
    """

    def __init__(self, experiment: ExperimentBase, directory: Path) -> None:
        self._exp = experiment
        self._directory = directory
        self._names: set[str] = set()
        self._background = Background()
        self._buffer = SnapshotBuffer()
        self._compared = False  # whether the ranks' parameters were
        self.newest_saved: Path | None = None
        self.scores: list[tuple[int, float]] = []

    def expect(self, names: Iterable[str]) -> None:
        """Notes what has state; whatever appears later is refused at the next save."""
        self._names = set(names)

    def newest(self) -> Path | None:
        """The newest intact checkpoint of this run; damaged ones are moved aside, loudly."""
        return distributed.on_rank_zero(self._newest, "looking for a checkpoint")

    def _newest(self) -> Path | None:
        checkpoint.clean(self._directory)
        path, rejected = checkpoint.newest_intact(self._directory)
        for text in rejected:
            self._exp.logger.warning("damaged checkpoint: %s", text)
        if rejected and path is None:
            raise CheckpointError(
                f"{self._directory}: no intact checkpoint is left; the damaged ones were moved "
                "aside. Mend one and give it its old name back, or start over with --fresh."
            )
        return path

    def save(self, results: Mapping[str, float]) -> None:
        """Writes the state of now, and deletes the checkpoints that nothing asks to keep.

        With training.background_save the files are written while training goes on; what fails
        there is raised by the next save, by `raise_failure` or by `wait`.

        Args:
            results: Of the validation in this iteration; empty if there was none.

        Raises:
            CheckpointError: It could not be written.
            TypeError: A value that a checkpoint cannot carry.
            RuntimeError: Something stateful appeared on the experiment after setup.
        """
        exp = self._exp
        found = exp._find_state()
        self.refuse_newcomers(found)
        if results:
            self._note_score(results)
        self.wait()
        tensors, values = self._capture(found)
        ranks = self._gather(found, tensors, values)
        if not self._exp.config.training.background_save:
            distributed.on_rank_zero(self._writing(tensors, values, ranks), "saving")
        elif self._exp.rank == 0:
            copies = self._buffer.snapshot(tensors)
            self._background.start(self._writing(copies, values, ranks))

    def wait(self) -> None:
        """Returns on all ranks when the files of the last save are on disk.

        Raises:
            CheckpointError: They could not be written.
        """
        distributed.on_rank_zero(self._background.wait, "saving")

    def raise_failure(self) -> None:
        """Raises what went wrong in the background, if anything did by now."""
        self._background.raise_failure()

    def close(self) -> None:
        """Returns when this rank writes no more. May be called twice."""
        self._background.wait()

    def _note_score(self, results: Mapping[str, float]) -> None:
        """Remembers how good this checkpoint is, for keep_best."""
        training = self._exp.config.training
        name = training.monitor.removeprefix("valid/")
        if not name:
            return
        if not math.isnan(results[name]):
            sign = -1 if training.monitor_mode == "max" else 1
            scores = [*self.scores, (self._exp.iteration, results[name])]
            self.scores = sorted(scores, key=lambda score: sign * score[1])[
                : max(training.keep_best, 1)
            ]

    def restore(self, path: Path) -> list[str]:
        """Puts the state of a checkpoint back, after everything was found to fit.

        Returns:
            What of it costs exactness, in words.

        Raises:
            CheckpointError: It does not fit; nothing was changed.
        """
        exp = self._exp
        world_size, tensors, values = self._read_fitting(path)
        arrays = tensors.pop(_ARRAYS, {})
        notes = []
        if world_size != exp.world_size:
            notes.append(
                f"saved by {world_size} processes and continued by {exp.world_size}: the "
                "order of the data is the same, the random states are new"
            )
            seed = rng.derive(
                exp.config.training.seed, rng.TRAIN, exp.rank, values["counters"]["iteration"]
            )
            rng.seed_all(seed)
            values["random"] = rng.capture()
        objects.apply(exp._find_state(), tensors, values[_OBJECTS])
        for name, section in SECTIONS.items():
            notes += section.restore(exp, values[name], arrays)
        self.newest_saved = path
        return notes

    def look_at(self, path: Path) -> dict[str, Any]:
        """Puts back what stands on the experiment, and not its place in training.

        Returns:
            The counters of the checkpoint, `iteration` and `epoch` among them.

        Raises:
            CheckpointError: It does not fit; nothing was changed.
        """
        world_size, tensors, values = self._read_fitting(path)
        if world_size != self._exp.world_size:
            self._exp.logger.info(
                "saved by %d processes and looked at by %d: what differed between the ranks, like "
                "the statistics of batch norm, is rank 0's",
                world_size,
                self._exp.world_size,
            )
        arrays = tensors.pop(_ARRAYS, {})
        objects.apply(self._exp._find_state(), tensors, values[_OBJECTS])
        for name in ("registered", "own"):
            SECTIONS[name].restore(self._exp, values[name], arrays)
        counters: dict[str, Any] = values["counters"]
        return counters

    # Capturing

    def refuse_newcomers(self, found: objects.StatefulObjects) -> None:
        """Checks that nothing stateful appeared on the experiment since setup.

        Raises:
            RuntimeError: Something did.
        """
        new = [name for name in found.names() if name not in self._names]
        if new:
            raise RuntimeError(
                f"self.{new[0]}: appeared after setup, and a resumed run would not have it when "
                "its state comes back. Make it in setup_model, or exclude_from_state it there."
            )

    def _capture(self, found: objects.StatefulObjects) -> tuple[objects.Tensors, dict[str, Any]]:
        with rng.isolated():  # first, and felt by nothing: what it changes on self is saved
            self._exp._own_states = dict(self._exp._handlers.fire("on_save_checkpoint") or {})
        tensors, of_objects = objects.capture(found)
        arrays: dict[str, Array] = {}
        values: dict[str, Any] = {_OBJECTS: of_objects}
        for name, section in SECTIONS.items():
            values[name] = section.capture(self._exp, arrays)
        if arrays:
            tensors[_ARRAYS] = arrays
        return tensors, values

    def _gather(
        self, found: objects.StatefulObjects, tensors: objects.Tensors, values: dict[str, Any]
    ) -> list[tuple[objects.Tensors, dict[str, Any]]]:
        """What each rank has other than rank 0, in the order of the ranks; itself is empty."""
        if self._exp.world_size == 1:
            return [({}, {})]
        # Trained parameters and optimizers are the same on all ranks: that is what DataParallel
        # is for. Running statistics are parameters too, for paddle, which are not trained.
        same = {
            name: {n for n, parameter in layer.named_parameters() if not parameter.stop_gradient}
            for name, layer in found.layers.items()
        }
        local = {
            file: {key: array for key, array in arrays.items() if key not in same.get(file, ())}
            for file, arrays in tensors.items()
            if file not in found.optimizers
        }
        if not self._compared:
            self._compared = True
            self._warn_of_drift(found, tensors, same)
        sums = {
            (file, key): (str(array), _checksum(array))
            for file, arrays in local.items()
            for key, array in arrays.items()
        }
        shared, shared_sums = distributed.broadcast_object((values, sums))
        other: objects.Tensors = {}
        for (file, key), checksum in sums.items():
            if shared_sums.get((file, key)) != checksum:
                other.setdefault(file, {})[key] = local[file][key].copy()
        differing = {
            section: {n: v for n, v in entries.items() if shared[section].get(n) != v}
            for section, entries in values.items()
        }
        return distributed.gather_objects((other, differing))

    def _warn_of_drift(
        self, found: objects.StatefulObjects, tensors: objects.Tensors, same: Mapping[str, set[str]]
    ) -> None:
        """Says, at the first save, which parameters are not the same on all ranks after all."""
        names = [(layer, n) for layer in found.layers for n in sorted(same[layer])]
        sums = [_checksum(tensors[layer][n]) for layer, n in names]
        others = distributed.gather_objects(sums)
        drifted = [
            f"{layer}.{name}"
            for (layer, name), *of_ranks in zip(names, *others, strict=True)
            if len(set(of_ranks)) > 1
        ]
        if drifted:
            self._exp.logger.warning(
                "%d trained parameters differ between the ranks (%s …), and only rank 0's are "
                "saved: a resumed run will not be exact. Put their layer into self.data_parallel "
                "and call that in train_batch.",
                len(drifted),
                drifted[0],
            )

    def _writing(
        self,
        tensors: objects.Tensors,
        values: dict[str, Any],
        ranks: list[tuple[objects.Tensors, dict[str, Any]]],
    ) -> Callable[[], None]:
        """What writes the captured state; it looks at nothing that training changes."""
        exp = self._exp
        iteration, settings = exp.iteration, exp.config.training
        best = [one for one, _ in self.scores[: settings.keep_best]]
        # How long the logs are now is no part of the state: times have more or fewer digits.
        info = {"metrics_bytes": exp._journal.file.size(), "visualdl_bytes": exp.visualizer.size()}
        files: dict[str, Any] = {f"{n}{_SUFFIX}": list(serialize(a)) for n, a in tensors.items()}
        for rank, (other, _) in enumerate(ranks):
            flat = {f"{file}/{key}": array for file, a in other.items() for key, array in a.items()}
            if flat:
                files[f"{_RANK}{rank}{_SUFFIX}"] = list(serialize(flat))
        text = {
            "format": _FORMAT,
            "world_size": exp.world_size,
            "values": values,
            "ranks": [differing for _, differing in ranks],
        }
        files[STATE_FILE] = [json.dumps(text, allow_nan=False).encode()]
        keep = {"keep_last": settings.keep_last, "keep_every": settings.keep_every}

        def write() -> None:
            self.newest_saved = checkpoint.write(self._directory, iteration, files, info)
            exp.logger.info("[%d] saved %s", iteration, self.newest_saved.name)
            checkpoint.prune(self._directory, keep_best=best, **keep)

        return write

    # Restoring

    def _read_fitting(self, path: Path) -> tuple[int, objects.Tensors, dict[str, Any]]:
        """The number of ranks that saved it, and this rank's tensors and values, which fit."""
        content = self._read(path)
        saved = json.loads(content.pop(STATE_FILE).tobytes())
        if saved["format"] != _FORMAT:
            raise CheckpointError(
                f"{path}: has format {saved['format']}; expected {_FORMAT}. "
                "Continue it with the version of expbase that wrote it."
            )
        tensors, values = self._own_part(content, saved)
        own = {name: arrays for name, arrays in tensors.items() if name != _ARRAYS}
        problems = self._check_sections(values)
        problems += objects.check(self._exp._find_state(), own, values.get(_OBJECTS, {}))
        self._raise_together(path, problems)
        return saved["world_size"], tensors, values

    def _read(self, path: Path) -> dict[str, Any]:
        """The files of a checkpoint, on every rank; rank 0 reads them and sends them round."""
        contents: dict[str, Any] = {}

        def read_here() -> list[tuple[str, int]]:
            info = checkpoint.verify(path)["info"]
            self._exp._journal.sizes = (info["metrics_bytes"], info["visualdl_bytes"])
            contents.update(checkpoint.read(path))
            return [(name, content.size) for name, content in contents.items()]

        names = distributed.on_rank_zero(read_here, "reading the checkpoint") or []
        if self._exp.world_size > 1:
            for name, size in names:
                contents[name] = _broadcast_bytes(contents.get(name), size)
        return contents

    def _own_part(
        self, content: dict[str, Any], saved: Mapping[str, Any]
    ) -> tuple[objects.Tensors, dict[str, Any]]:
        try:
            files = {name.removesuffix(_SUFFIX): parse(data) for name, data in content.items()}
        except TensorFileError as error:
            raise CheckpointError(f"checkpoint: {error}") from error
        others = {name: files.pop(name) for name in list(files) if name.startswith(_RANK)}
        values = {section: dict(entries) for section, entries in saved["values"].items()}
        if saved["world_size"] == self._exp.world_size:
            rank = self._exp.rank
            for name, array in others.get(f"{_RANK}{rank}", {}).items():
                file, _, key = name.partition("/")
                files.setdefault(file, {})[key] = array
            for section, entries in saved["ranks"][rank].items():
                values[section] |= entries
        return files, values

    def _check_sections(self, values: Mapping[str, Any]) -> list[str]:
        sections = [_OBJECTS, *SECTIONS]
        problems = [
            f"{name}: missing in the checkpoint." for name in sections if name not in values
        ]
        saved, expected = set(values.get("registered", {})), set(self._exp._registered)
        problems += [f"{n}: registered, and missing in the checkpoint." for n in expected - saved]
        problems += [f"{n}: in the checkpoint, and not registered here." for n in saved - expected]
        return problems

    def _raise_together(self, path: Path, problems: list[str]) -> None:
        for rank, of_rank in enumerate(distributed.gather_objects(problems)):
            if of_rank:
                where = f"{path}" if self._exp.world_size == 1 else f"{path} (rank {rank})"
                lines = "\n  ".join(of_rank[:20])
                more = f"\n  and {len(of_rank) - 20} more" if len(of_rank) > 20 else ""
                raise CheckpointError(
                    f"{where}: does not fit this experiment:\n  {lines}{more}\n"
                    "Nothing was changed. Use the model it was saved from, or start over: --fresh."
                )


def _checksum(array: Array) -> int:
    return checkpoint.checksum([array.data])


def _broadcast_bytes(data: Any, size: int) -> Any:
    received = np.empty(size, np.uint8) if data is None else data
    for start in range(0, size, _CHUNK):
        end = min(start + _CHUNK, size)
        if data is None:
            chunk = paddle.empty([end - start], dtype="uint8")
        else:
            chunk = paddle.to_tensor(np.array(data[start:end]))
        paddle.distributed.broadcast(chunk, src=0)
        if data is None:
            received[start:end] = chunk.numpy()
    return received


def choose(run: Path, which: str) -> Path:
    """The checkpoint of a run that is meant; nothing there is changed.

    Args:
        run: The output directory, or a checkpoint itself.
        which: "best", "last" or the number of an iteration; not looked at for a checkpoint.

    Raises:
        CheckpointError: There is none.
    """
    if which == "last" or (run / checkpoint.MANIFEST).exists():
        return checkpoint.find(run)
    iteration = (
        _best(run) if which == "best" else int(which) if re.fullmatch("[0-9]+", which) else None
    )
    if iteration is None:
        raise CheckpointError(f"{which!r} given; expected best, last or an iteration.")
    path = run / checkpoint.FOLDER / checkpoint.name_of(iteration)
    if not path.exists():
        there = ", ".join(p.name for p in checkpoint.listed(path.parent)) or "none"
        raise CheckpointError(f"{path}: does not exist ({which}); there are: {there}.")
    checkpoint.verify(path)
    return path


def _best(run: Path) -> int:
    scores = scores_of(checkpoint.find(run))
    if not scores:
        raise CheckpointError(
            f"{run}: no checkpoint is the best one; expected training.monitor to name a metric of "
            "valid(), and a save at an iteration that is validated."
        )
    return scores[0][0]


def scores_of(path: Path) -> list[tuple[int, float]]:
    """Iteration and score of the best checkpoints that a checkpoint knows of, best first."""
    values = json.loads((path / STATE_FILE).read_bytes())["values"]
    scores: list[tuple[int, float]] = encoding.decode(values["best"]["scores"], {})
    return scores
