"""Model files: weights alone, out of checkpoints and other tools' files, and into such files.
Optimizers and counters are not here: they come out of checkpoints alone.

    found = read_weights(Path("other/checkpoints/step-00000400"))  # {"model": {"fc.weight": Array}}
    reports = load(found, {"model": layer}, into=None, partial=False)
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from expbase.state import checkpoint
from expbase.state.arrays import Array, describe, parse, serialize

Weights = dict[str, Array]

_TENSORS = ".safetensors"


class WeightsError(ValueError):
    """A model file that cannot be read, or does not fit."""


def read_weights(path: Path) -> dict[str, Weights]:
    """Reads the weights in a checkpoint, a run, a `.safetensors` or a `.pdparams`; runs nothing.

    Returns:
        The weights of each model by its name; a single file holds one, whose name is "".

    Raises:
        WeightsError: It cannot be read, or holds more than weights.
    """
    if not path.exists() and (file := path.with_name(f"{path.name}.pdparams")).exists():
        path = file
    try:
        if path.is_dir():
            path = checkpoint.find(path)
            checkpoint.verify(path)
            files = checkpoint.read(path).items()
            return {n.removesuffix(_TENSORS): parse(d) for n, d in files if n.endswith(_TENSORS)}
        if path.suffix == _TENSORS:
            return {"": parse(path.read_bytes())}
        if path.suffix == ".pdparams":
            from expbase.state import pdparams  # here: few runs read one, and it takes 2 ms

            return {"": pdparams.parse(path.read_bytes())}
    except (OSError, ValueError, checkpoint.CheckpointError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    raise WeightsError(
        f"{path}: does not exist, or is of an unknown kind; expected a checkpoint directory, "
        ".safetensors or .pdparams."
    )


def read_pdopt(path: str | Path, layer: Any) -> dict[str, Any]:
    """The state in a `.pdopt` of paddle.save, for `optimizer.set_state_dict`; runs nothing.

    Its tensors go by automatic names of parameters, which may be others in this process. The
    `.pdparams` beside it says which they are.

    Args:
        path: Without a suffix: `step-24` for step-24.pdopt and step-24.pdparams.
        layer: Its parameters are those of the latter, and the optimizer's.

    Raises:
        WeightsError: One cannot be read, or the state is not that of the layer's parameters alone.
    """
    from expbase.state import pdparams

    try:
        state, _ = pdparams.unpack(Path(f"{path}.pdopt").read_bytes())
        _, theirs = pdparams.unpack(Path(f"{path}.pdparams").read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    parameters = dict(layer.named_parameters())
    ours = {f"{old}_": parameters[n].name for n, old in theirs.items() if n in parameters}
    renamed = {}
    for key, value in state.items():  # linear_0.w_0_moment1_0: the parameter, and what it is
        owner = max((old for old in ours if key.startswith(old)), key=len, default="")
        if not owner and key != "LR_Scheduler":
            raise WeightsError(f"{path}.pdopt: {key!r} is of no parameter of this layer.")
        renamed[f"{ours[owner]}_{key.removeprefix(owner)}" if owner else key] = value
    return renamed


def write_weights(path: Path, layer: Any) -> None:
    """Writes a layer's weights, as `.safetensors` or as `.pdparams`; whole or not at all.

    Raises:
        WeightsError: The path ends in something else, or the system refused.
    """
    tensors = layer.state_dict()
    if path.suffix == _TENSORS:
        parts = list(serialize({name: Array.of(tensor) for name, tensor in tensors.items()}))
    elif path.suffix == ".pdparams":  # what paddle.save writes
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        parts = [pickle.dumps(arrays, protocol=4)]
    else:
        raise WeightsError(f"{path}: ends in {path.suffix!r}; expected .safetensors or .pdparams.")
    try:
        checkpoint.write_single_file(path, parts)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be written: {error.strerror}.") from error


@dataclass
class Report:
    """Which weights of a model file fit a layer."""

    fitted: list[str]  # the names that both have, with the same type and shape
    misfits: list[str]  # what is wrong with each of the others

    def __str__(self) -> str:
        return "\n  ".join([f"{len(self.fitted)} fitted", *self.misfits])


def export_model(path: Path, layer: Any, input_spec: Sequence[Any]) -> None:
    """Writes a layer in eval mode by paddle.jit.save; each of its files appears complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=path.parent) as directory:
        paddle.jit.save(layer, str(Path(directory) / path.name), input_spec=list(input_spec))
        for file in Path(directory).iterdir():
            file.replace(path.parent / file.name)


def _compare(weights: Mapping[str, Array], layer: Any) -> Report:
    report, tensors = Report([], []), layer.state_dict()
    for name, tensor in tensors.items():
        here = describe(tensor)
        if name not in weights:
            report.misfits.append(f"missing in the file: {name}")
        elif str(weights[name]) != here:
            report.misfits.append(f"other shape: {name}: {weights[name]} there, {here} here")
        else:
            report.fitted.append(name)
    report.misfits += [f"only in the file: {name}" for name in weights if name not in tensors]
    return report


def _target_layers(
    found: Mapping[str, Weights], layers: Mapping[str, Any], into: str | None
) -> list[str]:
    if into is not None and into not in layers:
        raise WeightsError(f"load_model: into={into!r} given; expected one of {', '.join(layers)}.")
    if into is not None:
        return [into]
    if "" not in found:
        return [*layers]
    if len(layers) == 1 or "model" in layers:
        return ["model" if "model" in layers else next(iter(layers))]
    raise WeightsError(
        f"load_model: the file holds one model and self has {', '.join(layers)}; "
        "expected into=NAME."
    )


def load(
    found: Mapping[str, Weights], layers: Mapping[str, Any], into: str | None, *, partial: bool
) -> dict[str, Report]:
    """Sets the weights of layers, after all of them were compared; returns what fitted.

    Args:
        found: What `read_weights` returned.
        layers: The layers of the experiment, by name.
        into: The name of one of them; None: those of the names in the file, or the only one.
        partial: Whether it is enough that something fits.

    Raises:
        WeightsError: They do not fit, or the user must say which layer; nothing was changed.
    """
    names = _target_layers(found, layers, into)
    sources = {name: found.get(name) or found.get("", {}) for name in names}
    reports = {name: _compare(sources[name], layers[name]) for name in names}
    for name, report in reports.items():
        if report.misfits and not sources[name]:
            report.misfits = [f"not in the file, which has {', '.join(found)}"]
    if partial:
        fits = any(report.fitted for report in reports.values())
    else:
        fits = bool(reports) and not any(report.misfits for report in reports.values())
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
