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

from expbase.base.arrays import describe
from expbase.base.streams import show

Specs = Sequence[InputSpec]


class Reader(paddle.io.Dataset):  # type: ignore[misc]  # paddle has no types
    """A data set whose samples are mappings; it yields only the outputs that were registered.

    A subclass declares `outputs_attr`, of whole batches, and writes `sample` and `__len__`. Its
    phase is "train" or "predict".
    """

    outputs_attr: Specs = ()

    def __init__(self, phase: str = "train") -> None:
        self.phase = phase
        self._registered: set[str] = set()

    def sample(self, index: int) -> Mapping[str, Any]:
        """Returns the sample of an index: numpy arrays and numbers by the names of outputs_attr."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.sample(index)
        return {name: sample[name] for name in sorted(self._registered)}

    def require_attr(self, name: str) -> None:
        """Registers one output by its name; a ValueError says that the reader has none."""
        names = [spec.name for spec in self.outputs_attr]
        if name not in names:
            raise ValueError(
                f"reader {type(self).__name__}: {name!r} is asked for; it returns {_names(names)}."
            )
        self._registered.add(name)

    def register_with(self, model: Composed) -> None:
        """Registers all that a model takes in this phase; a ValueError names what is missing."""
        for spec in model.reader_inputs(self.phase):
            self.require_attr(spec.name)

    def clone(self, phase: str = "train") -> Reader:
        """Returns a reader of the same data for a phase, with no output registered yet."""
        other = copy.copy(self)
        other.phase = phase
        other._registered = set()
        return other

    def get_epoch_outputs(self) -> dict[str, Any]:
        """Returns what heads that declare epoch_inputs_attrs get after the last batch."""
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
    forward(inputs) -> mapping, where inputs has what the reader and the backbone returned:
    `inputs["reader"]["label"]`. In training it returns a `loss`.
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
        if phase not in ("train", "predict"):
            raise ValueError(f"phase: {phase!r} given; expected train or predict.")
        before = self.phase
        self.phase = phase
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
        """Returns a copy of the results since the last reset."""
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
            show(lines, end="")
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
        for name, head in reversed(list(heads.items())):
            head.head_name = name  # if it has several names, the first

    def forward(self, batch: Mapping[str, Any], head: str, phase: str = "train") -> dict[str, Any]:
        """Returns the outputs of one head for a batch.

        Args:
            batch: What the reader returns.
            head: Its name.
            phase: "train" or "predict".

        Raises:
            ValueError: Something is not as it was declared.
        """
        layer = self.find_head(head)
        backbone = f"backbone {type(self.backbone).__name__}"
        with layer.in_phase(phase):
            _check(f"{backbone} takes", self.backbone.inputs_attr, batch)
            features = self.backbone(batch)
            _check(f"{backbone} returns", self.backbone.outputs_attr, features)
            sources = {"reader": batch, "backbone": features}
            for component, specs in layer.inputs_attrs.items():
                _check(f"head {head} takes from its {component}", specs, sources[component])
            outputs = layer(sources)
            _check(f"head {head} returns", layer.outputs_attr, outputs)
        return dict(outputs)

    def find_head(self, name: str) -> Head:
        """Returns the head of a name; raises a ValueError if there is none."""
        if name not in self.heads:
            raise ValueError(f"head {name!r}: not in the model, which has {_names(self.heads)}.")
        head: Head = self.heads[name]
        return head

    def reader_inputs(self, phase: str) -> list[InputSpec]:
        """Returns what backbone and heads take from the reader in a phase, each name once."""
        specs = {spec.name: spec for spec in self.backbone.inputs_attr}
        for head in self.heads.values():
            with head.in_phase(phase):
                specs |= {spec.name: spec for spec in head.inputs_attrs.get("reader", ())}
        return list(specs.values())

    def for_export(self, head: str) -> tuple[list[Any], Any]:
        """Returns what export takes after the path: the inputs of one head, and a layer."""
        layer = _Prediction(self, head)
        return [layer.inputs], layer


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
        features = self.backbone(batch)
        # By hand: a context manager cannot be traced.
        before = self.head.phase
        self.head.phase = "predict"
        outputs = self.head({"reader": batch, "backbone": features})
        self.head.phase = before
        return [outputs[name] for name in self._output_names]


def _check(place: str, specs: Specs, found: Mapping[str, Any]) -> None:
    """Compares what there is with a declaration, in each batch: 2 µs for a tensor."""
    for spec in specs:
        if spec.name not in found:
            raise ValueError(f"{place} {spec.name!r}, {describe(spec)}; there is {_names(found)}.")
        tensor = found[spec.name]
        sizes = zip(spec.shape, tensor.shape, strict=False)  # below 0: a size that varies
        is_like_it = len(spec.shape) == len(tensor.shape) and all(a in (-1, b) for a, b in sizes)
        if spec.dtype != tensor.dtype or not is_like_it:
            raise ValueError(f"{place} {spec.name!r}, {describe(spec)}; it is {describe(tensor)}.")


def _names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
