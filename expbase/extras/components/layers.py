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
from expbase.base.errors import NotImplementedMistake, ValueMistake
from expbase.base.terminal import show

Specs = Sequence[InputSpec]
PHASES = ("train", "predict")
_BELOW = ("reader", "backbone")  # the components from which a head takes inputs, beside heads


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
        """Reads one sample; you write it.

        Args:
            index: From 0 on, below len().

        Returns:
            Numpy arrays and numbers, without the batch axis, by the names of outputs_attr.
        """
        raise _not_written(self, "sample(self, index)")

    def __len__(self) -> int:
        raise _not_written(self, "__len__(self)")

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.sample(index)
        return {name: sample[name] for name in sorted(self._registered)}

    def require_attr(self, name: str) -> None:
        """Registers one output: the reader yields it from then on.

        Args:
            name: Of an InputSpec in outputs_attr.

        Raises:
            ValueError: The reader does not return it.
        """
        place = f"reader {type(self).__name__}"
        names = [spec.name for spec in _declared(f"{place}: outputs_attr", self.outputs_attr)]
        if name not in names:
            raise ValueMistake(f"{place}: {name!r} is asked for; it returns {_names(names)}.")
        self._registered.add(name)

    def register_with(self, model: Composed | Backbone) -> None:
        """Registers all that a model takes in this phase.

        Args:
            model: The whole model, or its backbone alone.

        Raises:
            ValueError: The reader does not return one of them.
        """
        whole = isinstance(model, Composed)
        for spec in model.reader_inputs(self.phase) if whole else model.inputs_attr:
            self.require_attr(spec.name)

    def clone(self, phase: str = "train") -> Reader:
        """Makes a reader of the same data for another phase.

        Args:
            phase: "train" or "predict".

        Returns:
            The reader, with no output registered yet.
        """
        other = copy.copy(self)
        other.phase = phase
        other._registered = set()
        return other

    def get_epoch_outputs(self) -> dict[str, Any]:
        """Says after the last batch what the heads get that declare epoch_inputs_attrs.

        Returns:
            Values by name; without an override none.
        """
        return {}

    @property
    def num_examples(self) -> int:
        """The number of samples in an epoch."""
        return len(self)


class Backbone(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A network that heads share: from a reader's outputs to its own.

    A subclass declares `inputs_attr` and `outputs_attr` and writes forward(inputs) -> mapping.
    """

    inputs_attr: Specs = ()
    outputs_attr: Specs = ()

    def __init__(self, phase: str = "train") -> None:
        super().__init__()
        self.phase = phase  # or "predict"; the model sets it

    def forward(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Computes the features of a batch; you write it.

        Args:
            inputs: What the reader returned.

        Returns:
            Tensors by the names of outputs_attr.
        """
        raise _not_written(self, "forward(self, inputs)")

    def get_epoch_outputs(self) -> dict[str, Any]:
        """Says after the last batch what the heads get that declare epoch_inputs_attrs.

        Returns:
            Values by name; without an override none.
        """
        return {}


class Head(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """A task on top of a backbone.

    A subclass declares what it takes and returns, which may depend on `self.phase`, and writes
    forward(inputs) -> mapping, where inputs has what the reader, the backbone and other heads
    returned: `inputs["reader"]["label"]`. In training it returns a `loss`.
    """

    # By component: "reader", "backbone", or the name of another head, which is computed first.
    inputs_attrs: Mapping[str, Specs] = {}
    outputs_attr: Specs = ()
    # What get_epoch_outputs returns, by component and name, for epoch_postprocess:
    # {"reader": ["size"], "backbone": ["skipped"]}. A name may be an InputSpec.
    epoch_inputs_attrs: Mapping[str, Iterable[Any]] = {}

    def __init__(self, phase: str = "train") -> None:
        super().__init__()
        self.phase = phase  # or "predict"; the model sets it
        self.head_name = type(self).__name__.lower()  # the model sets it, too
        self.results: list[Any] = []  # since the last reset

    def forward(self, inputs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Computes the outputs of the task; you write it.

        Args:
            inputs: What the reader, the backbone and other heads returned, by component.

        Returns:
            Tensors by the names of outputs_attr.
        """
        raise _not_written(self, "forward(self, inputs)")

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
        """Copies the results.

        Returns:
            Those since the last reset, one per sample.
        """
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
    """A backbone and the heads on it, by name; a head may have several names.

    Raises:
        ValueError: A declaration is no list of InputSpec, or a head takes what nobody returns.
        NotImplementedError: A part has no forward.
    """

    def __init__(self, backbone: Backbone, heads: Mapping[str, Head]) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = paddle.nn.LayerDict(dict(heads))
        for name, head in reversed(list(heads.items())):
            head.head_name = name  # if it has several names, the first
        for phase in PHASES:
            with self.in_phase(phase):
                self._check_declarations()

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Sets the phase of all parts for a block: declarations and forward depend on it.

        Args:
            phase: "train" or "predict".

        Yields:
            Nothing; afterwards each part has the phase that it had.

        Raises:
            ValueError: The phase is another one.
        """
        if phase not in PHASES:
            raise ValueMistake(f"phase: {phase!r} given; expected train or predict.")
        parts = (self.backbone, *self.heads.values())
        others = [(part, part.phase) for part in parts if part.phase != phase]
        for part, _ in others:
            part.phase = phase
        try:
            yield
        finally:
            for part, before in others:
                part.phase = before

    def forward(self, batch: Mapping[str, Any], head: str, phase: str = "train") -> dict[str, Any]:
        """Computes one head, with the backbone and the heads that it takes from.

        Args:
            batch: What the reader returns.
            head: Its name.
            phase: "train" or "predict".

        Returns:
            The outputs of the head, by the names of its outputs_attr.

        Raises:
            ValueError: Something is not as it was declared.
        """
        self.find_head(head)
        backbone = f"backbone {type(self.backbone).__name__}"
        with self.in_phase(phase):
            _check(f"{backbone} takes", self.backbone.inputs_attr, batch)
            features = self.backbone(batch)
            _check(f"{backbone} returns", self.backbone.outputs_attr, features)
            sources = {"reader": batch, "backbone": features}
            for name in self.needed_by(head):
                layer = self.heads[name]
                for component, specs in layer.inputs_attrs.items():
                    whose = f"its {component}" if component in _BELOW else f"head {component}"
                    _check(f"head {name} takes from {whose}", specs, sources[component])
                sources[name] = layer(sources)
                _check(f"head {name} returns", layer.outputs_attr, sources[name])
        return dict(sources[head])

    def needed_by(self, head: str, *waiting: str) -> list[str]:
        """Lists the heads that are to be computed for one of them, in this phase.

        Args:
            head: Its name.
            waiting: The heads that ask for it, which it must not take from.

        Returns:
            Their names, in the order of computing, that of the head last.

        Raises:
            ValueError: A head takes from one that is not there, or its own output.
        """
        if head in waiting:
            raise ValueMistake(
                f"head {head}: takes its own output: {' ← '.join([*waiting, head])}."
            )
        found: list[str] = []
        for component in self.find_head(head).inputs_attrs:
            if component in _BELOW:
                continue
            if component not in self.heads:
                raise ValueMistake(
                    f"head {head} takes from {component!r}; expected reader, backbone or a head of "
                    f"the model, which has {_names(self.heads)}."
                )
            more = self.needed_by(component, *waiting, head)
            found += [name for name in more if name not in found]
        return [*found, head]

    def _check_declarations(self) -> None:
        for part in (self.backbone, *self.heads.values()):
            if type(part).forward in (Backbone.forward, Head.forward):
                raise _not_written(part, "forward(self, inputs)")
        backbone = f"backbone {type(self.backbone).__name__}"
        _declared(f"{backbone}: inputs_attr", self.backbone.inputs_attr)
        _declared(f"{backbone}: outputs_attr", self.backbone.outputs_attr)
        for name, head in self.heads.items():
            if name in _BELOW:
                raise ValueMistake(f"head {name!r}: means the {name} here. Give it another name.")
            for component, specs in head.inputs_attrs.items():
                _declared(f"head {name}: inputs_attrs[{component!r}]", specs)
            _declared(f"head {name}: outputs_attr", head.outputs_attr)
            self.needed_by(name)

    def find_head(self, name: str) -> Head:
        """Looks for a head by its name.

        Args:
            name: Its name in the model.

        Returns:
            The head.

        Raises:
            ValueError: There is none.
        """
        if name not in self.heads:
            raise ValueMistake(f"head {name!r}: not in the model, which has {_names(self.heads)}.")
        head: Head = self.heads[name]
        return head

    def reader_inputs(self, phase: str, *heads: str) -> list[InputSpec]:
        """Lists what the parts of the model take from the reader.

        Args:
            phase: "train" or "predict".
            heads: The names of those that count beside the backbone; by default all.

        Returns:
            The declarations, each name once.
        """
        with self.in_phase(phase):
            specs = {spec.name: spec for spec in self.backbone.inputs_attr}
            for head in heads or self.heads:
                own = self.heads[head].inputs_attrs.get("reader", ())
                specs |= {spec.name: spec for spec in own}
        return list(specs.values())

    def for_export(self, head: str) -> tuple[list[Any], Any]:
        """Prepares one head for inference: `self.export(path, *model.for_export("tags"))`.

        Args:
            head: Its name.

        Returns:
            The input_spec, and a layer that predicts with this head alone.
        """
        layer = _Prediction(self, head)
        return [layer.inputs], layer


class _Prediction(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """One head's prediction from a list of tensors to a list of tensors.

    paddle/jit/api.py, save, takes neither mappings nor `*tensors`, but lists.
    """

    def __init__(self, model: Composed, head: str) -> None:
        super().__init__()
        model.find_head(head)
        self.backbone = model.backbone
        with model.in_phase("predict"):
            self.names = model.needed_by(head)
            self.inputs = model.reader_inputs("predict", *self.names)
            self.output_names = [spec.name for spec in model.heads[head].outputs_attr]
        self.heads = paddle.nn.LayerList([model.heads[name] for name in self.names])

    def forward(self, tensors: Sequence[Any]) -> list[Any]:
        # By hand: a context manager cannot be traced.
        parts = [self.backbone, *self.heads]
        before = [part.phase for part in parts]
        for part in parts:
            part.phase = "predict"
        batch = {spec.name: tensors[i] for i, spec in enumerate(self.inputs)}
        sources = {"reader": batch, "backbone": self.backbone(batch)}
        for i, layer in enumerate(self.heads):
            sources[self.names[i]] = layer(sources)
        for i, part in enumerate(parts):
            part.phase = before[i]
        return [sources[self.names[-1]][name] for name in self.output_names]


# What PALM calls what a part must have.
_OF_PALM = {
    "sample(self, index)": "_iterator", "__len__(self)": "_iterator",
    "forward(self, inputs)": "build",
}  # fmt: skip


def _not_written(part: Any, method: str) -> NotImplementedError:
    """Returns the error to raise when a part lacks a method that its author writes."""
    theirs = _OF_PALM[method]
    is_there = hasattr(part, theirs)
    return NotImplementedMistake(
        f"{type(part).__name__}.{method.partition('(')[0]}: not defined; expected "
        f"`def {method}:`"
        + f" in place of {theirs}, PALM's name, which nothing calls here" * is_there
        + (". docs/moving/palm.md has both side by side." if is_there else ".")
    )


def _declared(place: str, specs: Any) -> Specs:
    """Returns a declaration; a ValueError if it is no list of InputSpec with names."""
    if isinstance(specs, Mapping) or not all(isinstance(s, InputSpec) and s.name for s in specs):
        raise ValueMistake(
            f"{place}: {specs!r} given; expected a list of InputSpec with names, as "
            "[InputSpec([-1, 4], 'float32', 'point')]."
        )
    found: Specs = specs
    return found


def _check(place: str, specs: Specs, found: Mapping[str, Any]) -> None:
    """Compares the tensors of a batch with a declaration; it takes 2 µs for each."""
    for spec in specs:
        if spec.name not in found:
            raise ValueMistake(
                f"{place} {spec.name!r}, {describe(spec)}; there is {_names(found)}."
            )
        tensor = found[spec.name]
        sizes = zip(spec.shape, tensor.shape, strict=False)  # below 0: a size that varies
        is_like_it = len(spec.shape) == len(tensor.shape) and all(a in (-1, b) for a, b in sizes)
        if spec.dtype != tensor.dtype or not is_like_it:
            raise ValueMistake(
                f"{place} {spec.name!r}, {describe(spec)}; it is {describe(tensor)}."
            )


def _names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
