"""Model files: weights alone, from our checkpoints or other tools, and into such files.

Reads a checkpoint directory, a `.safetensors` or a `.pdparams` file, and writes the latter two.
A `.pdparams` is a pickle; it is read by a reader that builds arrays and nothing else, so a file
that would run code is refused. Optimizers and counters are state.py's.

    found = read_weights("other/checkpoints/step-00000400")   # {"model": {"fc.weight": Array}}
    report = compare(found["model"], layer)
    report.fitted, report.missing, report.unexpected, report.reshaped
"""

from __future__ import annotations

import io
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase.state import checkpoint
from expbase.state.arrays import Array, TensorFileError, describe, parse, serialize

Weights = dict[str, Array]

# What a .pdparams or .pdopt of paddle needs; whatever else a pickle names is refused.
_ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("builtins", "tuple"): tuple,
}
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since numpy 2
_TENSORS = ".safetensors"


class WeightsError(ValueError):
    """A model file that cannot be read, or does not fit."""


def read_weights(path: Path) -> dict[str, Weights]:
    """The weights in a file or a checkpoint, by the name of the model; "" in a single file.

    Args:
        path: A checkpoint or the directory of a run, a `.safetensors` or a `.pdparams`.

    Raises:
        WeightsError: It cannot be read.
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
            return {"": _arrays(read_pickle(path.read_bytes(), str(path)), str(path))}
    except (OSError, TensorFileError, checkpoint.CheckpointError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    raise WeightsError(
        f"{path}: of an unknown kind; expected a checkpoint directory, .safetensors or .pdparams."
    )


def write_weights(path: Path, layer: Any) -> None:
    """Writes a layer's weights, so that the file is whole or not there.

    Args:
        path: Ends in `.safetensors`, or in `.pdparams` for paddle.load.
        layer: Whose state_dict.

    Raises:
        WeightsError: Another ending, or the system refused.
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
    """What of a model file fits a layer.

    Attributes:
        fitted: Names whose type and shape agree.
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
        """Whether everything fits, both ways."""
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
    """Writes a layer for inference by paddle.jit.save; each of its files appears whole.

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


def load_fitting(weights: Mapping[str, Array], layer: Any, report: Report) -> None:
    """Sets the weights that fitted."""
    tensors = layer.state_dict()
    for name in report.fitted:
        weights[name].copy_to(tensors[name])


def choose(found: Mapping[str, Weights], layers: Mapping[str, Any], into: str | None) -> list[str]:
    """Which layers the weights that were found go into.

    Args:
        found: What `read_weights` gave.
        layers: Of the experiment, by name.
        into: The name that the user gave; None: by the names in the file, or the only layer.

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
    """Sets the weights of layers, after everything was compared.

    Args:
        found: What `read_weights` gave.
        layers: Of the experiment, by name.
        into: The name of one of them; None: see `choose`.
        partial: Whether it is enough that something fits.

    Returns:
        What fitted, by layer.

    Raises:
        WeightsError: Something does not fit, or with `partial` nothing does; nothing was changed.
    """
    names = choose(found, layers, into)
    sources = {name: found[name] if name in found else found.get("", {}) for name in names}
    reports = {name: compare(sources[name], layers[name]) for name in names}
    fits = (
        any(report.fitted for report in reports.values())
        if partial
        else bool(reports) and all(report.complete for report in reports.values())
    )
    if not fits:
        table = "\n".join(f"{name}: {report}" for name, report in reports.items())
        raise WeightsError(
            f"the weights do not fit:\n{table or 'no model of a name that self has'}\n"
            "Nothing was changed. "
            + ("" if partial else "To take what fits: partial=True, or --init_partial.")
        )
    for name in names:
        load_fitting(sources[name], layers[name], reports[name])
    return reports


def read_pickle(data: bytes, place: str) -> Any:
    """Reads a paddle pickle without running anything from it.

    Raises:
        WeightsError: It holds something else than arrays in dicts, or is no pickle.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(data)).load()
    except WeightsError as error:
        raise WeightsError(f"{place}: {error}") from error
    except Exception as error:  # a torn pickle raises anything
        raise WeightsError(f"{place}: cannot be read as a paddle file: {error!r}") from error


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _NUMPY and name == "_reconstruct":
            return _new_array
        if module in _NUMPY and name == "scalar":
            return _new_scalar
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise WeightsError(
            f"names {module}.{name}, which weights do not need and which could run code. "
            "Refused; write the file again with save_model or paddle.save of a state_dict."
        )


def _new_array(subtype: Any, shape: Any, dtype: Any) -> Any:
    return np.ndarray.__new__(np.ndarray, shape, dtype)


def _new_scalar(dtype: Any, data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0]


def _arrays(content: Any, place: str) -> Weights:
    if not isinstance(content, dict):
        raise WeightsError(f"{place}: holds a {type(content).__name__}; expected a dict of arrays.")
    if "UnpackBigParamInfor@@" in content:
        raise WeightsError(
            f"{place}: written in slices by protocol 2 or 3; save it with protocol=4."
        )
    weights = {}
    for name, value in content.items():
        # paddle writes each tensor as an array, or as (automatic name, array)
        value = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if isinstance(value, np.ndarray):
            weights[str(name)] = _array(value)
    return weights


def _array(value: np.ndarray[Any, Any]) -> Array:
    # paddle writes bfloat16 as uint16, a type that its tensors do not have
    dtype = "bfloat16" if value.dtype == np.uint16 else value.dtype.name
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return Array(dtype, value.shape, data)
