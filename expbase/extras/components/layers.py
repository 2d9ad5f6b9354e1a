"""Reader, backbone, head, and the model composed of them.

    model = Composed(Encoder(), {"tags": Tags(), "kinds": Kinds()})
    reader.register_with(model)
    loss = model(batch, "tags")["loss"]

`experiment.export(path, *model.for_export("tags"))` writes one head for inference.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle.static import InputSpec

from expbase.state.arrays import describe

Specs = Sequence[InputSpec]
_FIRST_BATCH = "the first batch (is its reader registered, in this phase?)"


def _check_phase(phase: str) -> str:
    if phase not in ("train", "predict"):
        raise ValueError(f"phase: {phase!r} given; expected train or predict.")
    return phase


class Reader(paddle.io.Dataset):  # type: ignore[misc]  # paddle has no types
    """A data set whose samples are mappings; it yields only the outputs that were registered.

    A subclass declares `outputs_attr`, of whole batches, and writes `sample` and `__len__`. Its
    phase is "train" or "predict".
    """

    outputs_attr: Specs = ()

    def __init__(self, phase: str = "train") -> None:
        self.phase = _check_phase(phase)
        self._registered: set[str] = set()

    def sample(self, index: int) -> Mapping[str, Any]:
        """The sample of an index: numpy arrays and numbers by the names of outputs_attr."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.sample(index)
        try:
            return {name: sample[name] for name in sorted(self._registered)}
        except KeyError as error:
            raise ValueError(
                f"reader {type(self).__name__}: sample returns {_names(sample)}; it declares "
                f"{error} for the phase {self.phase!r}."
            ) from None

    def require_attr(self, name: str) -> None:
        """Registers one output by its name; a ValueError says that the reader has none."""
        names = [spec.name for spec in self.outputs_attr]
        if name not in names:
            raise ValueError(
                f"reader {type(self).__name__}: {name!r} is asked for; it returns {_names(names)}."
            )
        self._registered.add(name)

    def register_with(self, model: Composed) -> None:
        """Registers everything that a model takes in this reader's phase.

        Raises:
            ValueError: An output is missing, or has another type or shape.
        """
        model.check(self)
        for spec in model.reader_inputs(self.phase):
            self.require_attr(spec.name)

    def clone(self, phase: str = "train") -> Reader:
        """A reader of the same data, for a phase, with no output registered yet."""
        other = copy.copy(self)
        other.phase = _check_phase(phase)
        other._registered = set()
        return other

    def get_epoch_outputs(self) -> dict[str, Any]:
        """What heads that declare epoch_inputs_attrs get after the last batch."""
        return {}

    @property
    def num_examples(self) -> int:
        """Samples of an epoch."""
        return len(self)


class Backbone(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A network that heads share: from a reader's outputs to its own.

    A subclass declares `inputs_attr` and `outputs_attr` and writes forward(inputs) -> mapping.
    """

    inputs_attr: Specs = ()
    outputs_attr: Specs = ()


class Head(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A task on top of a backbone.

    A subclass declares what it takes and returns, which may depend on `self.phase`, and writes
    forward(inputs) -> mapping, where inputs has a mapping for each component that
    inputs_attrs names: `inputs["reader"]["label"]`. In training it returns a `loss`.
    """

    inputs_attrs: Mapping[str, Specs] = {}  # by component: "reader", "backbone"
    outputs_attr: Specs = ()
    # Names of the reader's epoch outputs, for epoch_postprocess: {"reader": ["size"]}
    epoch_inputs_attrs: Mapping[str, Sequence[str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.phase = "train"  # or "predict"; the model sets it
        self.head_name = type(self).__name__.lower()  # the model sets it, too
        self.results: list[Any] = []  # since the last reset

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Sets the phase for a block: declarations and forward depend on it."""
        before = self.phase
        self.phase = _check_phase(phase)
        try:
            yield
        finally:
            self.phase = before

    def batch_postprocess(self, rt_outputs: Mapping[str, Any]) -> list[Any] | None:
        """Turns a batch's outputs into results, one per sample, and keeps them.

        Args:
            rt_outputs: Numpy arrays by the names of outputs_attr.

        Returns:
            A mapping per sample; None if the outputs have different lengths: then they are kept
            together as one result.
        """
        try:
            rows = list(zip(*rt_outputs.values(), strict=True))
        except (TypeError, ValueError):  # one is a number, or has another length
            text = f"head {self.head_name}: outputs of different lengths, kept as one result"
            warnings.warn(text, stacklevel=2)
            self.results.append(dict(rt_outputs))
            return None
        results = [dict(zip(rt_outputs, row, strict=True)) for row in rows]
        self.results.extend(results)
        return results

    def reset(self) -> None:
        """Forgets the results."""
        self.results = []

    def get_results(self) -> list[Any]:
        """A copy of the results since the last reset."""
        return copy.deepcopy(self.results)

    def epoch_postprocess(
        self, post_inputs: Mapping[str, Any] | None = None, output_dir: str | Path | None = None
    ) -> None:
        """Writes the results since the last reset as JSON lines.

        Args:
            post_inputs: What epoch_inputs_attrs asks for, by component.
            output_dir: Where `<head>.<phase>.jsonl` is written; None prints.
        """
        texts = [json.dumps(one, default=lambda array: array.tolist()) for one in self.results]
        lines = "".join(f"{text}\n" for text in texts)
        if output_dir is None:
            print(lines, end="")
            return
        path = Path(output_dir) / f"{self.head_name}.{self.phase}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines, encoding="utf-8")


class Composed(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A backbone and the heads on it, by name; a head may have several names."""

    def __init__(self, backbone: Backbone, heads: Mapping[str, Head]) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = paddle.nn.LayerDict(dict(heads))
        self._checked: set[tuple[str, str]] = set()  # heads and phases that have had a batch
        for name, head in reversed(list(heads.items())):
            head.head_name = name  # of several names the first

    def forward(self, batch: Mapping[str, Any], head: str, phase: str = "train") -> dict[str, Any]:
        """The outputs of one head for a batch.

        Args:
            batch: What the reader returns.
            head: Its name.
            phase: "train" or "predict".

        Raises:
            ValueError: In the first batch, something is not as it was declared.
        """
        layer = self.find_head(head)
        place = f"backbone {type(self.backbone).__name__}"
        is_first = (head, phase) not in self._checked
        with layer.in_phase(phase):
            if is_first:
                _check_fit(place, self.backbone.inputs_attr, _FIRST_BATCH, batch)
                labels = layer.inputs_attrs.get("reader", ())
                _check_fit(f"head {head}", labels, _FIRST_BATCH, batch)
            features = self.backbone(_select(batch, self.backbone.inputs_attr))
            if is_first:
                _check_outputs(place, self.backbone, features)
            outputs = layer(_inputs_of(layer, batch, features))
            if is_first:
                _check_outputs(f"head {head}", layer, outputs)
        self._checked.add((head, phase))
        return dict(outputs)

    def find_head(self, name: str) -> Head:
        """The head of a name; a ValueError says that there is none."""
        if name not in self.heads:
            raise ValueError(f"head {name!r}: not in the model, which has {_names(self.heads)}.")
        head: Head = self.heads[name]
        return head

    def reader_inputs(self, phase: str) -> list[InputSpec]:
        """What backbone and heads take from the reader in a phase, each name once."""
        specs = {spec.name: spec for spec in self.backbone.inputs_attr}
        for head in self.heads.values():
            with head.in_phase(phase):
                specs |= {spec.name: spec for spec in head.inputs_attrs.get("reader", ())}
        return list(specs.values())

    def check(self, reader: Reader) -> None:
        """Checks that each part gets what it takes, in the reader's phase.

        Raises:
            ValueError: An output is missing or does not fit, or a training head has no loss.
        """
        sources = {}
        for part, component in ("reader", reader), ("backbone", self.backbone):
            place = f"{part} {type(component).__name__}"
            sources[part] = place, _by_name(place, component.outputs_attr)
        _check_fit(sources["backbone"][0], self.backbone.inputs_attr, *sources["reader"])
        for name, head in self.heads.items():
            with head.in_phase(reader.phase):
                _check_head(f"head {name} ({type(head).__name__})", head, sources)

    def for_export(self, head: str) -> tuple[list[Any], Any]:
        """What export takes after the path: the inputs of one head's prediction, and a layer."""
        layer = _Prediction(self, head)
        return [layer.inputs], layer


def _select(values: Mapping[str, Any], specs: Specs) -> dict[str, Any]:
    return {spec.name: values[spec.name] for spec in specs}


def _inputs_of(
    head: Head, batch: Mapping[str, Any], features: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    sources = {"reader": batch, "backbone": features}
    return {part: _select(sources[part], specs) for part, specs in head.inputs_attrs.items()}


class _Prediction(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """One head's prediction from a list of tensors to a list of tensors.

    paddle.jit.save takes neither mappings nor `*tensors`, but lists.
    """

    def __init__(self, model: Composed, head: str) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.head = model.find_head(head)
        with self.head.in_phase("predict"):
            own = self.head.inputs_attrs.get("reader", ())
            self._output_names = [spec.name for spec in self.head.outputs_attr]
        specs = {spec.name: spec for spec in (*model.backbone.inputs_attr, *own)}
        self.inputs = list(specs.values())

    def forward(self, tensors: Sequence[Any]) -> list[Any]:
        batch = {spec.name: tensors[i] for i, spec in enumerate(self.inputs)}
        features = self.backbone(_select(batch, self.backbone.inputs_attr))
        # By hand: a context manager cannot be traced.
        before = self.head.phase
        self.head.phase = "predict"
        outputs = self.head(_inputs_of(self.head, batch, features))
        self.head.phase = before
        return [outputs[name] for name in self._output_names]


# --- checks of declarations ------------------------------------------------------------------


def _by_name(place: str, specs: Any) -> dict[str, InputSpec]:
    is_list = isinstance(specs, (list, tuple))
    if not is_list or not all(isinstance(spec, InputSpec) and spec.name for spec in specs):
        raise ValueError(
            f"{place}: declares {specs!r}; expected a list of paddle.static.InputSpec with names."
        )
    return {spec.name: spec for spec in specs}


def _check_head(place: str, head: Head, sources: Mapping[str, Any]) -> None:
    for component, specs in head.inputs_attrs.items():
        if component not in sources:
            raise ValueError(f"{place}: takes from {component!r}; expected reader or backbone.")
        _check_fit(place, specs, *sources[component])
    outputs = _by_name(place, head.outputs_attr)
    if head.phase == "train" and "loss" not in outputs:
        raise ValueError(f"{place}: returns {_names(outputs)}; expected a 'loss' in training.")


def _check_outputs(place: str, layer: Backbone | Head, outputs: Any) -> None:
    if not isinstance(outputs, Mapping):
        kind = type(outputs).__name__
        raise ValueError(f"{place}: forward returned a {kind}; expected a mapping.")
    _check_fit(place, layer.outputs_attr, "what forward returned", outputs)


def _check_fit(place: str, specs: Any, source: str, found: Mapping[str, Any]) -> None:
    """Checks a declaration against what a source has: tensors, or declarations of its own."""
    for name, spec in _by_name(place, specs).items():
        if name not in found:
            raise ValueError(
                f"{place}: declares {name!r}, {describe(spec)}; {source} has {_names(found)}."
            )
        if difference := _difference(spec, found[name]):
            raise ValueError(
                f"{place}: declares {name!r} as {describe(spec)}; {source} has it as "
                f"{describe(found[name])}: {difference}."
            )


def _difference(spec: InputSpec, other: Any) -> str:
    if spec.dtype != other.dtype:
        return "another type"
    if len(spec.shape) != len(other.shape):
        return "another number of dimensions"
    sizes = zip(spec.shape, other.shape, strict=True)  # below 0: a size that varies
    return "another size" if any(a != b and a >= 0 and b >= 0 for a, b in sizes) else ""


def _names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
