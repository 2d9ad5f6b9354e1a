"""Model files: weights alone, from our checkpoints or other tools, and into such files.

Reads a checkpoint directory, a `.safetensors` or a `.pdparams` file, and writes the latter two.
Nothing in a file that is read is run (pdparams.py). Optimizers and counters are objects.py's.

    found = read_weights("other/checkpoints/step-00000400")   # {"model": {"fc.weight": Array}}
    report = compare(found["model"], layer)
    report.fitted, report.missing, report.unexpected, report.reshaped
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle

from expbase.state import checkpoint, pdparams
from expbase.state.arrays import Array, TensorFileError, describe, parse, serialize
from expbase.state.pdparams import PdparamsError

Weights = dict[str, Array]

_TENSORS = ".safetensors"


class WeightsError(ValueError):
    """A model file that cannot be read, or does not fit."""


def read_weights(path: Path) -> dict[str, Weights]:
    """Reads the weights in a file or a checkpoint.

    Args:
        path: A checkpoint or the directory of a run, a `.safetensors` or a `.pdparams`.

    Returns:
        The weights of each model by its name; a single file holds one, whose name is "".

    Raises:
        WeightsError: It cannot be read, or holds more than weights.
    """
    if not path.exists():
        raise WeightsError(f"{path}: does not exist.")
    try:
        if path.is_dir():
            path = checkpoint.find(path)
            checkpoint.verify(path)
            files = checkpoint.read(path).items()
            return {n.removesuffix(_TENSORS): parse(d) for n, d in files if n.endswith(_TENSORS)}
        if path.suffix == _TENSORS:
            return {"": parse(path.read_bytes())}
        if path.suffix in (".pdparams", ".pdopt"):
            return {"": pdparams.parse(path.read_bytes())}
    except (OSError, TensorFileError, PdparamsError, checkpoint.CheckpointError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    raise WeightsError(
        f"{path}: of an unknown kind; expected a checkpoint directory, .safetensors or .pdparams."
    )


def write_weights(path: Path, layer: Any) -> None:
    """Writes a layer's weights; the file is complete or does not exist.

    Args:
        path: Ends in `.safetensors`, or in `.pdparams` for paddle.load.
        layer: Its state_dict is written.

    Raises:
        WeightsError: The path ends in something else, or the system refused.
    """
    if path.suffix == _TENSORS:
        arrays = {name: Array.of(tensor) for name, tensor in layer.state_dict().items()}
        parts = list(serialize(arrays))
    elif path.suffix == ".pdparams":
        arrays_by_name = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
        parts = [pickle.dumps(arrays_by_name, protocol=4)]  # what paddle.save writes
    else:
        raise WeightsError(f"{path}: ends in {path.suffix!r}; expected .safetensors or .pdparams.")
    try:
        checkpoint.write_single_file(path, parts)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be written: {error.strerror}.") from error


@dataclass
class Report:
    """Which weights of a model file fit a layer.

    Attributes:
        fitted: Names that both have with the same type and shape.
        missing: In the layer and not in the file.
        unexpected: In the file and not in the layer.
        reshaped: Name, what the file has, what the layer has.
    """

    fitted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether each weight of the file and each of the layer has its counterpart."""
        return not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        lines = [f"{len(self.fitted)} fitted"]
        lines += [f"missing in the file: {name}" for name in self.missing]
        lines += [f"only in the file: {name}" for name in self.unexpected]
        lines += [
            f"other shape: {n}: {there} there, {here} here" for n, there, here in self.reshaped
        ]
        return "\n  ".join(lines)


def export_model(path: Path, layer: Any, input_spec: Sequence[Any]) -> None:
    """Writes a layer for inference by paddle.jit.save; each of its files appears complete.

    Args:
        path: Without a suffix.
        layer: In eval mode.
        input_spec: A paddle.static.InputSpec for each input.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=path.parent) as directory:
        paddle.jit.save(layer, str(Path(directory) / path.name), input_spec=list(input_spec))
        for file in Path(directory).iterdir():
            file.replace(path.parent / file.name)


def compare(weights: Mapping[str, Array], layer: Any) -> Report:
    """Compares a file's weights with a layer's; changes nothing."""
    report, tensors = Report(), layer.state_dict()
    for name, tensor in tensors.items():
        if name not in weights:
            report.missing.append(name)
        elif str(weights[name]) != describe(tensor):
            report.reshaped.append((name, str(weights[name]), describe(tensor)))
        else:
            report.fitted.append(name)
    report.unexpected = [name for name in weights if name not in tensors]
    return report


def target_layers(
    found: Mapping[str, Weights], layers: Mapping[str, Any], into: str | None
) -> list[str]:
    """The names of the layers that the weights go into.

    Args:
        found: What `read_weights` returned.
        layers: The layers of the experiment, by name.
        into: The name that the user asked for; None: by the names in the file, or the only layer.

    Raises:
        WeightsError: The user must say which.
    """
    if into is not None and into not in layers:
        raise WeightsError(f"load_model: into={into!r} given; expected one of {', '.join(layers)}.")
    if into is not None:
        return [into]
    if "" not in found:
        return [name for name in layers if name in found]
    if len(layers) == 1 or "model" in layers:
        return ["model" if "model" in layers else next(iter(layers))]
    raise WeightsError(
        f"load_model: the file holds one model and self has {', '.join(layers)}; "
        "expected into=NAME."
    )


def load(
    found: Mapping[str, Weights], layers: Mapping[str, Any], into: str | None, *, partial: bool
) -> dict[str, Report]:
    """Sets the weights of layers, after all of them were compared.

    Args:
        found: What `read_weights` returned.
        layers: The layers of the experiment, by name.
        into: The name of one of them, or None, as in `target_layers`.
        partial: Whether it is enough that something fits.

    Returns:
        What fitted, by layer.

    Raises:
        WeightsError: Something does not fit, or with `partial` nothing does; nothing was changed.
    """
    names = target_layers(found, layers, into)
    sources = {name: found[name] if name in found else found.get("", {}) for name in names}
    reports = {name: compare(sources[name], layers[name]) for name in names}
    if partial:
        fits = any(report.fitted for report in reports.values())
    else:
        fits = bool(reports) and all(report.complete for report in reports.values())
    if not fits:
        table = "\n".join(f"{name}: {report}" for name, report in reports.items())
        raise WeightsError(
            f"the weights do not fit:\n{table or 'no model of a name that self has'}\n"
            "Nothing was changed. "
            + ("" if partial else "To take what fits: partial=True, or --init_partial.")
        )
    for name in names:
        tensors = layers[name].state_dict()
        for key in reports[name].fitted:
            sources[name][key].copy_to(tensors[key])
    return reports
