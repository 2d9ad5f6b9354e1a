"""Readers, backbones and heads that declare what they take and give (seed 001, PALM).

Thin classes over paddle.io and paddle.nn: a declaration is a list of `paddle.static.InputSpec`
with names, -1 or None for what varies. One declaration serves the check at setup, the check of
the first real batch, and the export. Heads share one backbone; `MultiHead` trains one of them
with each update. Optional: the core does not know this module.

    class Lines(Reader): outputs_attr = [InputSpec([-1, 16], "int64", "tokens"), …]
    class Encoder(Backbone): inputs_attr, outputs_attr = [...], [...]
    class Tags(Head): inputs_attrs = {"reader": [...], "backbone": [...]}
    model = Composed(Encoder(), {"tags": Tags()})
    reader.register_with(model)                         # checked, by name, shape and type
    outputs = model(batch, "tags")
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.static import InputSpec

from expbase.config import Config
from expbase.data.iterator import TrainIterator
from expbase.data.loaders import Shard, adapt_loader
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.state import rng
from expbase.state.arrays import describe, to_numpy

PHASES = ("train", "predict")
Specs = Sequence[InputSpec]


def _check_phase(phase: str) -> str:
    if phase not in PHASES:
        raise ValueError(f"phase: {phase!r} given; expected train or predict.")
    return phase


# --- the components --------------------------------------------------------------------------


class Reader(paddle.io.Dataset):  # type: ignore[misc]  # paddle has no types
    """A data set whose samples are mappings, of which it yields what somebody registered for.

    A subclass declares `outputs_attr`, of whole batches, and writes `sample` and `__len__`.

    Args:
        phase: "train" or "predict".
    """

    outputs_attr: Specs = ()

    def __init__(self, phase: str = "train") -> None:
        self.phase = _check_phase(phase)
        self._register: set[str] = set()

    def sample(self, index: int) -> Mapping[str, Any]:
        """The sample of an index: numpy arrays and numbers by the names of outputs_attr."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.sample(index)
        try:
            return {name: sample[name] for name in sorted(self._register)}
        except KeyError as error:
            raise ValueError(
                f"reader {type(self).__name__}: sample gives {', '.join(sample)}; it declares "
                f"{error} for the phase {self.phase!r}."
            ) from None

    def require_attr(self, name: str) -> None:
        """Registers one output by its name.

        Raises:
            ValueError: The reader has no such output.
        """
        names = [spec.name for spec in self.outputs_attr]
        if name not in names:
            raise ValueError(
                f"reader {type(self).__name__}: {name!r} is asked for; it gives "
                f"{', '.join(map(str, names)) or 'nothing'}."
            )
        self._register.add(name)

    def register_with(self, model: Composed) -> None:
        """Registers everything that a model takes in this reader's phase, and checks that it fits.

        Raises:
            ValueError: An output is missing, or has another type or shape.
        """
        model.check(self)
        for spec in model.reader_inputs(self.phase):
            self.require_attr(spec.name)

    def clone(self, phase: str = "train") -> Reader:
        """A reader of the same data, for a phase, with which nobody is registered yet."""
        other = copy.copy(self)
        other.phase = _check_phase(phase)
        other._register = set()
        return other

    def get_epoch_outputs(self) -> dict[str, Any]:
        """What heads that declare epoch_inputs_attrs are given after a pass."""
        return {}

    @property
    def num_examples(self) -> int:
        """Samples in a pass."""
        return len(self)


class Backbone(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A network that heads share: from a reader's outputs to its own.

    A subclass declares `inputs_attr` and `outputs_attr` and writes forward(inputs) -> mapping.
    """

    inputs_attr: Specs = ()
    outputs_attr: Specs = ()


class Head(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A task on top of a backbone.

    A subclass declares what it takes and gives, which may depend on `self.phase`, and writes
    forward(inputs) -> mapping, where inputs has a mapping for each component that
    inputs_attrs names: `inputs["reader"]["label"]`. In training it gives a `loss`.

    Attributes:
        inputs_attrs: By component: "reader", "backbone".
        outputs_attr: Of each batch.
        epoch_inputs_attrs: Names of the reader's epoch outputs for epoch_postprocess.
        phase: "train" or "predict"; the model sets it.
        head_name: In the model.
    """

    inputs_attrs: Mapping[str, Specs] = {}
    outputs_attr: Specs = ()
    epoch_inputs_attrs: Mapping[str, Sequence[str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.phase = "train"
        self.head_name = type(self).__name__.lower()
        self._results: list[Any] = []

    def batch_postprocess(self, rt_outputs: Mapping[str, Any]) -> list[Any] | None:
        """Turns a batch's outputs into results, one per sample, and keeps them.

        Args:
            rt_outputs: Numpy arrays by the names of outputs_attr.

        Returns:
            A mapping per sample; None if the outputs have different lengths: they are kept
            together then.
        """
        lengths = {_length(value) for value in rt_outputs.values()}
        if len(lengths) == 1 and None not in lengths:
            rows = zip(*rt_outputs.values(), strict=True)
            results = [dict(zip(rt_outputs, row, strict=True)) for row in rows]
            self._results.extend(results)
            return results
        warnings.warn(
            f"head {self.head_name}: outputs of different lengths, kept as one result", stacklevel=2
        )
        self._results.append(dict(rt_outputs))
        return None

    def reset(self) -> None:
        """Forgets the results."""
        self._results = []

    def get_results(self) -> list[Any]:
        """A copy of the results since the last reset."""
        return copy.deepcopy(self._results)

    def epoch_postprocess(
        self, post_inputs: Mapping[str, Any] | None = None, output_dir: str | Path | None = None
    ) -> None:
        """Writes the results of a pass as JSON lines.

        Args:
            post_inputs: What epoch_inputs_attrs asks for, by component.
            output_dir: Where `<head>.<phase>.jsonl` is written; None prints.
        """
        lines = [json.dumps(result, default=_json) for result in self._results]
        if output_dir is None:
            for line in lines:
                print(line)
            return
        directory = Path(output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        text = "".join(line + "\n" for line in lines)
        (directory / f"{self.head_name}.{self.phase}.jsonl").write_text(text, encoding="utf-8")


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def _json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot stand in JSON; expected numbers and arrays.")


class Composed(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A backbone and the heads on it; a head may stand under several names.

    Args:
        backbone: Shared by all.
        heads: By name.
    """

    def __init__(self, backbone: Backbone, heads: Mapping[str, Head]) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = paddle.nn.LayerDict(dict(heads))
        self._checked: set[tuple[str, str]] = set()  # first batches, by head and phase
        for name, head in reversed(list(heads.items())):
            head.head_name = name  # of several the first

    def forward(self, batch: Mapping[str, Any], head: str, phase: str = "train") -> dict[str, Any]:
        """The outputs of one head for a batch.

        Args:
            batch: What the reader gives.
            head: Its name.
            phase: "train" or "predict".

        Raises:
            ValueError: In the first batch, something is not as it was declared.
        """
        layer = self._head(head)
        new = (head, phase) not in self._checked
        self._checked.add((head, phase))
        with _in_phase(layer, phase):
            if new:
                reader_specs = [*self.backbone.inputs_attr, *layer.inputs_attrs.get("reader", ())]
                _check_real("reader", reader_specs, batch)
            of_backbone = self.backbone({s.name: batch[s.name] for s in self.backbone.inputs_attr})
            _check_mapping(f"backbone {type(self.backbone).__name__}", of_backbone)
            if new:
                _check_real("backbone", self.backbone.outputs_attr, of_backbone)
            given = {"reader": batch, "backbone": of_backbone}
            outputs = layer(
                {
                    component: {spec.name: given[component][spec.name] for spec in specs}
                    for component, specs in layer.inputs_attrs.items()
                }
            )
            _check_mapping(f"head {head}", outputs)
            if new:
                _check_real(f"head {head}", layer.outputs_attr, outputs)
        return dict(outputs)

    def _head(self, name: str) -> Head:
        if name not in self.heads:
            raise ValueError(f"head {name!r}: not in the model, which has {', '.join(self.heads)}.")
        head: Head = self.heads[name]
        return head

    def reader_inputs(self, phase: str) -> list[InputSpec]:
        """What backbone and heads take from the reader in a phase, each name once."""
        specs = {spec.name: spec for spec in self.backbone.inputs_attr}
        for head in self.heads.values():
            with _in_phase(head, phase):
                specs |= {spec.name: spec for spec in head.inputs_attrs.get("reader", ())}
        return list(specs.values())

    def check(self, reader: Reader) -> None:
        """Checks that everybody is given what it takes, in the reader's phase.

        Raises:
            ValueError: An attribute is missing or does not fit, or a training head has no loss.
        """
        source = f"reader {type(reader).__name__}"
        backbone = f"backbone {type(self.backbone).__name__}"
        _check_specs(source, reader.outputs_attr)
        _check_specs(backbone, self.backbone.inputs_attr)
        _check_specs(backbone, self.backbone.outputs_attr)
        _check_pair(backbone, self.backbone.inputs_attr, source, reader.outputs_attr)
        for name, head in self.heads.items():
            place = f"head {name} ({type(head).__name__})"
            with _in_phase(head, reader.phase):
                if not isinstance(head.inputs_attrs, Mapping):
                    raise ValueError(
                        f"{place}: inputs_attrs is {head.inputs_attrs!r}; expected a list for each "
                        "component: {'reader': [...], 'backbone': [...]}."
                    )
                _check_specs(place, head.outputs_attr)
                for component, specs in head.inputs_attrs.items():
                    _check_specs(place, specs)
                    if component == "reader":
                        _check_pair(place, specs, source, reader.outputs_attr)
                    elif component == "backbone":
                        _check_pair(place, specs, backbone, self.backbone.outputs_attr)
                    else:
                        raise ValueError(
                            f"{place}: takes from {component!r}; expected reader or backbone."
                        )
                if reader.phase == "train" and "loss" not in {s.name for s in head.outputs_attr}:
                    given = ", ".join(str(spec.name) for spec in head.outputs_attr) or "nothing"
                    raise ValueError(f"{place}: gives {given}; expected a 'loss' in training.")

    def for_export(self, head: str) -> tuple[list[InputSpec], Any]:
        """What export takes after the path: the inputs of one head's prediction, and a layer."""
        layer = _Prediction(self, head)
        return layer.input_spec, layer


class _Prediction(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """One head's prediction, with plain tensors in and out: what paddle.jit.save takes."""

    def __init__(self, model: Composed, head: str) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model._head(head)
        with _in_phase(self.head, "predict"):
            self._taken = {
                c: [s.name for s in specs] for c, specs in self.head.inputs_attrs.items()
            }
            self._given = [spec.name for spec in self.head.outputs_attr]
            own = self.head.inputs_attrs.get("reader", ())
        specs = {spec.name: spec for spec in (*model.backbone.inputs_attr, *own)}
        self._of_backbone = [spec.name for spec in model.backbone.inputs_attr]
        self.input_spec = list(specs.values())
        if len(self.input_spec) > 6:
            raise ValueError(
                f"for_export: head {head} takes {len(self.input_spec)} inputs; expected at most 6."
            )

    def forward(
        self, a: Any, b: Any = None, c: Any = None, d: Any = None, e: Any = None, f: Any = None
    ) -> list[Any]:  # jit.save takes no *tensors, and no context manager
        tensors = (a, b, c, d, e, f)
        batch = {spec.name: tensors[i] for i, spec in enumerate(self.input_spec)}
        given = {
            "reader": batch,
            "backbone": self.backbone({name: batch[name] for name in self._of_backbone}),
        }
        before = self.head.phase
        self.head.phase = "predict"
        outputs = self.head(
            {part: {name: given[part][name] for name in self._taken[part]} for part in self._taken}
        )
        self.head.phase = before
        return [outputs[name] for name in self._given]


@contextlib.contextmanager
def _in_phase(head: Head, phase: str) -> Iterator[None]:
    before, head.phase = head.phase, _check_phase(phase)
    try:
        yield
    finally:
        head.phase = before


# --- checking declarations -------------------------------------------------------------------


def _check_pair(taker: str, taken: Specs, giver: str, given: Specs) -> None:
    by_name = {spec.name: spec for spec in given}
    for spec in taken:
        if spec.name not in by_name:
            names = ", ".join(map(str, by_name)) or "nothing"
            raise ValueError(
                f"{taker}: takes {spec.name!r}, {describe(spec)}, from {giver}, "
                f"which gives {names}."
            )
        other = by_name[spec.name]
        if wrong := _difference(spec, other):
            raise ValueError(
                f"{taker}: takes {spec.name!r} as {describe(spec)}; {giver} gives it as "
                f"{describe(other)}: {wrong}."
            )


def _check_specs(place: str, specs: Any) -> None:
    fits = isinstance(specs, (list, tuple))
    for spec in specs if fits else ():
        fits = fits and isinstance(spec, InputSpec) and bool(spec.name)
    if not fits:
        raise ValueError(
            f"{place}: declares {specs!r}; expected a list of paddle.static.InputSpec with names."
        )


def _check_mapping(place: str, outputs: Any) -> None:
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"{place}: forward gave a {type(outputs).__name__}; expected a mapping by the names of "
            "outputs_attr."
        )


def _check_real(giver: str, specs: Iterable[InputSpec], values: Mapping[str, Any]) -> None:
    for spec in specs:
        if spec.name not in values:
            hint = ""
            if giver == "reader":
                hint = (
                    " Was it registered with the model, in this phase? reader.register_with(model)"
                )
            raise ValueError(
                f"{giver}: declares {spec.name!r}, and the first batch has "
                f"{', '.join(values) or 'nothing'}.{hint}"
            )
        value = values[spec.name]
        if wrong := _difference(spec, value):
            raise ValueError(
                f"{giver}: declares {spec.name!r} as {describe(spec)}; in the first batch it is "
                f"{describe(value)}: {wrong}."
            )


def _difference(spec: InputSpec, other: Any) -> str:
    """Why another declaration, or a tensor, is not what this one says; empty if it is."""
    if spec.dtype != other.dtype:
        return "another type"
    if len(spec.shape) != len(other.shape):
        return "another number of dimensions"
    fixed = zip(spec.shape, other.shape, strict=True)
    return "another size" if any(a != b and a >= 0 and b >= 0 for a, b in fixed) else ""


# --- training several heads ------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """How a head is trained.

    Attributes:
        head: Its name in the model.
        loader: Where its batches come from; None: self.train_loader.
        mix_ratio: How often, in relation to the others.
        auxiliary: Whether training may end before this head had its passes.
    """

    head: str
    loader: Any = None
    mix_ratio: float = 1.0
    auxiliary: bool = False


class Stream:
    """The endless batches of a loader, from a place that is part of the checkpoint.

    Attributes:
        passes: That were used up.
    """

    def __init__(self, loader: Any, name: str, share: Shard) -> None:
        self._cursor = TrainIterator()
        self._cursor.attach(adapt_loader(loader, name, share))

    @property
    def passes(self) -> int:
        """That were used up."""
        return self._cursor.epoch - (not self._cursor.batches.ended)

    def read(self) -> Any:
        """The next batch of this rank."""
        if self._cursor.batches.ended:
            self._cursor.open(self._cursor.epoch + 1)
        return self._cursor.read()

    def state_dict(self) -> dict[str, Any]:
        """The place, for the checkpoint."""
        return self._cursor.state_dict()

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to the place."""
        self._cursor.load_state_dict(state)

    def close(self) -> None:
        """Lets go of the loader."""
        self._cursor.close()


class MultiHead(ExperimentBase):
    """To be mixed in: with each update train_batch trains the head that `draw_task` names.

    setup_model makes self.model, a Composed (in data_parallel with find_unused_parameters=True),
    and calls `setup_tasks`. With `heads.epochs` training ends when every task that is not
    auxiliary had so many passes over its data; else as the training section says.
    """

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.heads = Config({"epochs": 0})  # passes for each task; 0: as `training` says
        return config

    def setup_tasks(self, tasks: Mapping[str, Task]) -> None:
        """Names the tasks; call it in setup_model.

        Raises:
            ValueError: There is none, one has no head, or a ratio is negative.
        """
        heads = self.unwrap(self.model).heads
        for name, task in tasks.items():
            if not isinstance(task, Task):
                raise TypeError(f"task {name}: {task!r} given; expected a Task.")
            if task.head not in heads:
                raise ValueError(
                    f"task {name}: its head {task.head!r} is not in the model, which has "
                    f"{', '.join(heads)}."
                )
            if not task.mix_ratio > 0:
                raise ValueError(f"task {name}: mix_ratio {task.mix_ratio!r}; expected above 0.")
        if not any(not task.auxiliary for task in tasks.values()):
            raise ValueError("setup_tasks: expected a task that is not auxiliary.")
        seed = self.config.training.seed
        self.tasks = dict(tasks)
        self.task_steps = dict.fromkeys(tasks, 0)
        self.register_stateful("task_steps")
        # Of its own, and the same on every rank.
        self.mix_random = np.random.default_rng(rng.derive(seed, rng.SETUP, 2))
        self.streams = {
            name: Stream(
                task.loader,
                f"the loader of task {name}",
                Shard(rng.derive(seed, rng.STREAM, number), self.rank, self.world_size),
            )
            for number, (name, task) in enumerate(tasks.items())
            if task.loader is not None
        }

    def check_setup(self) -> None:
        if not getattr(self, "tasks", None):
            raise ValueError("setup_model: expected it to call self.setup_tasks({name: Task(…)}).")
        super().check_setup()

    def draw_task(self) -> str:
        """The task of this update, drawn by mix_ratio: the same on every rank."""
        ratios = np.array([task.mix_ratio for task in self.tasks.values()])
        name = list(self.tasks)[self.mix_random.choice(len(ratios), p=ratios / ratios.sum())]
        self.task_steps[name] += 1
        return name

    def read_task(self, name: str) -> Any:
        """The next training batch of a task."""
        return self.streams[name].read() if name in self.streams else self.read_batch()

    @on("on_train_batch_end")
    def stop_when_the_tasks_are_through(self) -> None:
        """Stops when every task that is not auxiliary had its passes."""
        epochs = self.config.heads.epochs
        if epochs and all(
            self._passes(name) >= epochs for name, t in self.tasks.items() if not t.auxiliary
        ):
            self.stop(f"every head that is not auxiliary had {epochs} passes over its data")

    def _passes(self, name: str) -> int:
        if name in self.streams:
            return self.streams[name].passes
        return self.epoch - (not self._cursor.batches.ended)

    def predict_batch(self, batch: Any) -> Any:
        outputs = self.model(batch, self.predicted_head, "predict")
        arrays = {name: to_numpy(value) for name, value in outputs.items()}
        results = self.unwrap(self.model).heads[self.predicted_head].batch_postprocess(arrays)
        if results is None:
            raise ValueError(
                f"head {self.predicted_head}: batch_postprocess gave no result per sample; "
                "predict_head needs one for each."
            )
        return results

    def predict_head(
        self, head: str, loader: Any, output_dir: str | Path | None = None
    ) -> list[Any]:
        """Predicts with one head, and has it postprocess all results, on rank 0.

        Args:
            head: Its name.
            loader: Over a reader of the phase "predict", or a Subset of one.
            output_dir: Where `<head>.predict.jsonl` is written; None prints.

        Returns:
            One result per sample, in the order of the data, on every rank.
        """
        layer = self.unwrap(self.model)._head(head)
        reader = getattr(loader, "dataset", None)
        while isinstance(reader, paddle.io.Subset):
            reader = reader.dataset
        if not isinstance(reader, Reader):
            raise TypeError(
                f"predict_head: {loader!r} given; expected a paddle.io.DataLoader over a Reader."
            )
        layer.reset()
        self.predicted_head = head
        results = self.predict(loader)
        layer._results = results
        if self.rank == 0:
            with _in_phase(layer, "predict"):
                inputs = _epoch_inputs(layer, reader)
                layer.epoch_postprocess(inputs, output_dir)
        return results

    def close(self) -> None:
        try:
            super().close()
        finally:
            for stream in getattr(self, "streams", {}).values():
                stream.close()


def _epoch_inputs(head: Head, reader: Any) -> dict[str, dict[str, Any]]:
    """What the head asks for after a pass.

    Raises:
        ValueError: The reader does not give it.
    """
    names = head.epoch_inputs_attrs.get("reader", ())
    given = reader.get_epoch_outputs() if names else {}
    for name in names:
        if name not in given:
            raise ValueError(
                f"head {head.head_name}: takes {name!r} after a pass; reader "
                f"{type(reader).__name__} gives {', '.join(given) or 'nothing'}."
            )
    return {"reader": {name: given[name] for name in names}} if names else {}
