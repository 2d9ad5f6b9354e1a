"""Model files: weights alone, out of checkpoints and other tools' files, and into such files.
Optimizers and counters are not here: they come out of checkpoints alone.

    save_model(Path("model.safetensors"), layer)
    load_model(Path("other/best"), {"model": layer}, logger=logger, code=code)
    export(Path("export/model"), layer, [InputSpec([None, 8])])
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle.amp.auto_cast import StateDictHook

from expbase.base.arrays import (
    Array,
    describe,
    dtype_name,
    fetch,
    is_piece,
    parse,
    serialize,
)
from expbase.base.errors import Mistake, TypeMistake, ValueMistake
from expbase.base.exit_codes import ExitCode
from expbase.base.files import mapped, read_bytes, write_single_file
from expbase.checkpoint import rank_state, storage
from expbase.checkpoint.layout import MANIFEST, OF_RANK, SUFFIX, CheckpointError
from expbase.checkpoint.named import find_named
from expbase.config import ConfigError
from expbase.ranks import collectives
from expbase.record.sources import Code
from expbase.state.optimizers import set_masters
from expbase.state.parts import misfits, tensors_of
from expbase.state.walk import unwrap

Weights = dict[str, Array]
Rename = Callable[[str], str] | Mapping[str, str]  # of a weight in a file: its name here

_FLOATS = "float16", "bfloat16", "float32", "float64"  # of which each becomes each
_INDEX = ".safetensors.index.json"  # names the files of a model in parts
_PROGRAM_BYTES = 1 << 20  # for what an export has beside the weights
_OF_OTHERS = f"model{_INDEX}", "model.safetensors"  # what Hugging Face and PaddleFormers write


class WeightsError(Mistake, ValueError):
    """A model file that cannot be read, or does not fit."""

    exit_code = ExitCode.MISTAKE


def find_weights(path: Path) -> Path:
    """Returns the file or checkpoint that a path means: of a run the newest one, or `RUN/best`.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    if not path.exists() and (file := path.with_name(f"{path.name}.pdparams")).exists():
        return file
    if not (path / MANIFEST).exists():
        path = next(filter(Path.is_file, (path / name for name in _OF_OTHERS)), path)
    return path if path.suffix and not path.is_dir() else find_named(path)


def read_weights(path: Path) -> dict[str, Weights]:
    """Reads the weights of a checkpoint, a `.safetensors`, in parts, too, or a `.pdparams`.

    Nothing in it is run.

    Args:
        path: What `find_weights` returned.

    Returns:
        The weights of each model by its name; a file of weights alone holds one, named "".

    Raises:
        WeightsError: It cannot be read, or holds more than weights.
    """
    try:
        if path.is_dir():
            return _without_rank_state(storage.opened(path).arrays)
        if path.name.endswith(_INDEX):
            return {"": _in_parts(path)}
        if path.suffix == SUFFIX:
            return {"": parse(mapped(path))}
        if path.suffix == ".pdparams":
            from expbase.checkpoint import pdparams  # here: few runs read one, and it takes 2 ms

            return {"": pdparams.read_arrays(path)}
    except (OSError, ValueError, CheckpointError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    raise WeightsError(
        f"{path}: does not exist, or is of an unknown kind; expected a checkpoint directory, "
        ".safetensors or .pdparams."
    )


def _in_parts(index: Path) -> Weights:
    with storage.reading(index):
        content = json.loads(read_bytes(index, storage.MOST_BYTES))
        names = sorted({*content["weight_map"].values()})
        parts = [index.with_name(name) for name in names]
    return {name: array for part in parts for name, array in parse(mapped(part)).items()}


def renamed(weights: Weights, rename: Rename) -> Weights:
    """Returns the weights by other names; what a mapping does not name keeps its name.

    Raises:
        WeightsError: Several get the same name.
    """
    name_of = rename if callable(rename) else lambda name: rename.get(name, name)
    new = {name_of(name): array for name, array in weights.items()}
    if len(new) < len(weights):
        raise WeightsError("rename: gives several weights the same name; expected one each.")
    return new


def _without_rank_state(files: Mapping[str, Weights]) -> dict[str, Weights]:
    for name in files.get(f"{OF_RANK}0", ()):  # of rank 0 nothing else is there
        raise ValueError(
            f"{name!r} is in pieces, one for each rank that saved it; expected as many ranks, and "
            "their whole state by --checkpoint_path."
        )
    return {file: weights for file, weights in files.items() if not file.startswith(OF_RANK)}


def _live(layer: Any) -> dict[str, Any]:
    """Returns the tensors of a layer by their names in its state_dict."""
    tensors: dict[str, Any] = layer.state_dict()
    hooks = [h for part in layer.sublayers(True) for h in part._state_dict_hooks.values()]
    if any(isinstance(hook, StateDictHook) for hook in hooks):  # of decorate(save_dtype=…): copies
        own = tensors_of(layer)
        tensors = {name: own.get(name, tensor) for name, tensor in tensors.items()}
    return tensors


def _need_whole(tensors: Mapping[str, Any], place: object) -> None:
    pieces = [name for name, tensor in tensors.items() if is_piece(tensor)]
    if pieces and collectives.world_size() > 1:
        raise WeightsError(
            f"{place}: {pieces[0]!r} is in pieces, one on each rank; expected a whole layer."
        )


def need_layer(call: str, given: Any) -> Any:
    """Returns a layer that is to be written, out of its DataParallel.

    Raises:
        TypeError: It is none.
    """
    layer = unwrap(given)
    if not isinstance(layer, paddle.nn.Layer):
        what = "no self.model is there, and no layer" if layer is None else f"{layer!r:.80}"
        hint = ", for a function or a method one whose forward calls it" * callable(layer)
        raise TypeMistake(f"{call}: {what} given; expected a paddle.nn.Layer{hint}.")
    return layer


def save_model(path: Path, layer: Any) -> None:
    """Writes the weights of a layer, or of the one in a DataParallel, on rank 0, as `.safetensors`
    or as `.pdparams`; whole or not at all.

    Raises:
        TypeError: It is no layer.
        WeightsError: The path ends in something else, or the system refused.
    """
    layer = need_layer("save_model", layer)
    collectives.on_rank_zero(lambda: write_weights(path, layer), "save_model")


def write_weights(path: Path, layer: Any) -> None:
    """Writes a layer's weights in this process; see `save_model`."""
    _need_whole(_live(layer), path)
    tensors = layer.state_dict()
    if path.suffix == SUFFIX:
        contents = {name: Array.of(tensor) for name, tensor in tensors.items()}
        fetch(contents.values())
        parts = list(serialize(contents))
    elif path.suffix == ".pdparams":  # what paddle.save writes
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        parts = [pickle.dumps(arrays, protocol=4)]
    else:
        raise WeightsError(f"{path}: ends in {path.suffix!r}; expected .safetensors or .pdparams.")
    try:
        write_single_file(path, parts)
    except OSError as error:
        raise _not_written(path, error) from error


def export(path: Path, layer: Any, spec: Sequence[Any] | None) -> None:
    """Writes a layer in eval mode for inference, by paddle.jit.save, on rank 0.

    Raises:
        ConfigError: There is no `spec` of the inputs, or it is no list.
        WeightsError: The layer is in pieces, or the file cannot be written.
        ValueError: Paddle cannot call it with such inputs, or cannot convert its forward.
    """
    if not isinstance(spec, (list, tuple)):
        given = "no input_spec" if spec is None else f"input_spec={spec!r}"
        raise ConfigError(
            f"export: {given} given; expected a list with a paddle.static.InputSpec for "
            "each input of the model, here or as self.input_spec."
        )

    def write() -> None:
        _need_whole(_live(layer), path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent) as file:  # paddle's error names the spec
                # On a full disk paddle writes files of 0 bytes, and raises nothing.
                os.posix_fallocate(file.fileno(), 0, _bytes_of(layer) + _PROGRAM_BYTES)
            paddle.jit.save(layer, str(path), input_spec=list(spec))
        except OSError as error:
            raise _not_written(path, error) from error
        except Exception as error:
            raise ValueMistake(
                f"export: {_reason(error)} Expected an input_spec with the shape and the type of "
                "each input of the model, and a forward that paddle.jit.to_static can convert."
            ) from error

    collectives.on_rank_zero(write, "export")


def _bytes_of(layer: Any) -> int:
    tensors = [*layer.parameters(), *layer.buffers()]
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


def _not_written(path: Path, error: OSError) -> WeightsError:
    return WeightsError(f"{path}: cannot be written: {error.strerror}.")


def _reason(error: Exception) -> str:
    """Returns the line of paddle's that says what is wrong; a whole traceback may be its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+Error: ", line)]
    return (named or [f"{type(error).__name__}: {' '.join(lines)}"])[-1]


def _target_layers(
    found: Mapping[str, Weights], layers: Mapping[str, Any], into: str | None
) -> list[str]:
    if into is None and "" not in found:
        return [*layers]
    only = next(iter(layers)) if len(layers) == 1 else "model"
    name = only if into is None else into
    if name not in layers:
        raise WeightsError(
            f"load_model: into={into!r} given, and self has {', '.join(layers)}; expected the one "
            "that the model in the file is for: into=NAME."
        )
    return [name]


def load_model(
    path: Path,
    layers: Mapping[str, Any],
    into: str | None = None,
    rename: Rename | None = None,
    *,
    partial: bool = False,
    optimizers: Iterable[Any] = (),
    logger: logging.Logger,
    code: Code,
) -> Path | None:
    """Loads weights, and nothing else, on all ranks; what fitted goes into the log.

    Of `optimizers` the master weights are set, too. A line names the files of the `code` that have
    changed since a checkpoint was written.

    Returns:
        On rank 0, the file or the checkpoint that `path` means.

    Raises:
        WeightsError: They cannot be read, do not fit, or the user must say which layer is meant;
            nothing was changed.
    """
    place, found = _on_all_ranks(path)
    if rename is not None:
        found = {model: renamed(of_model, rename) for model, of_model in found.items()}
    texts = set_weights(found, layers, into, partial=partial, optimizers=optimizers)
    for name, text in texts.items():
        logger.info("loaded %s from %s: %s", name, place, text)
    if place is not None and not collectives.rank() and (place / MANIFEST).exists():
        info = storage.read_manifest(place)["info"]
        if changed_code := code.changes_since(info, of_others=False):
            logger.warning("%s: %s", place, changed_code)
    return place


def _on_all_ranks(path: Path) -> tuple[Path | None, dict[str, Weights]]:
    """Returns where rank 0 finds weights, and these; a rank that finds the same ones reads them."""
    found: dict[str, Weights] = {}

    def read() -> Path:
        place = find_weights(path)
        found.update(read_weights(place))
        return place

    place = collectives.on_rank_zero(read, "load_model")
    if collectives.rank():
        with contextlib.suppress(WeightsError, CheckpointError):
            read()
    collectives.barrier("load_model")
    return place, rank_state.as_on_rank_zero(found)


def set_weights(
    found: Mapping[str, Weights],
    layers: Mapping[str, Any],
    into: str | None,
    *,
    partial: bool,
    optimizers: Iterable[Any],
) -> dict[str, str]:
    """Sets the weights of layers, after all of them were compared; says for each what fitted.

    `found` is what `read_weights` returned; `into` names one of the layers (None: those of the
    names in the file, or the only one); with `partial` it is enough that something fits. Numbers of
    another precision are converted: a model in 16 bits begins with weights of float32, and the
    other way round. `optimizers` have the master weights of those that are set.

    Raises:
        WeightsError: They do not fit, or the user must say which layer; nothing was changed.
    """
    texts: dict[str, str] = {}
    fitting = []
    has_misfits = False
    for name in _target_layers(found, layers, into):
        tensors = _live(layers[name])
        _need_whole(tensors, name)
        other = "model" if into and "" not in found else ""
        weights = found.get(name) or found.get(other, {})
        there = {key: describe(array) for key, array in weights.items()}
        here = {key: describe(tensor) for key, tensor in tensors.items()}
        fits, converted = [], []
        for key in (key for key in here if key in there):
            value = weights[key]
            if _is_converted(value, tensors[key]):
                value = value.converted(dtype_name(tensors[key]))
                if weights[key].is_finite() and not value.is_finite():
                    there[key] += " with numbers too large for it"
                    continue
                converted.append(key)
                there[key] = here[key]
            if there[key] == here[key]:
                fits.append((weights[key], value, tensors[key]))
        fitting += fits
        wrong = misfits(there, here, "file")
        has_misfits = has_misfits or bool(wrong)
        texts[name] = "\n  ".join([f"{len(fits)} fitted", *wrong])
        for key in converted[:1]:
            was, now = weights[key].dtype, dtype_name(tensors[key])
            texts[name] += f"\n  {len(converted)} of them converted: {key} from {was} to {now}"
    if not texts or (not fitting if partial else has_misfits):
        named = "" if "" in found else f"; there are {', '.join(found) or 'none'}"
        table = "\n".join(f"{name}: {text}" for name, text in texts.items())
        raise WeightsError(
            f"the weights do not fit{named}:\n{table}\n"
            "Nothing was changed. If names differ: load_model(path, rename=…). PyTorch has the "
            "weight of a Linear as [out, in]: transpose it in the file, square ones, too."
            + " To take only the weights that fit: partial=True, or --init_partial."
            * bool(fitting)
        )
    for _, value, tensor in fitting:
        value.copy_to(tensor)
    of_parameters = {tensor.name: array for array, _, tensor in fitting}  # with all their digits
    for optimizer in optimizers:
        set_masters(optimizer, of_parameters)
    return texts


def _is_converted(array: Array, tensor: Any) -> bool:
    """Returns whether they differ, and in nothing but the precision of their numbers."""
    types = {array.dtype, dtype_name(tensor)}
    return len(types) == 2 and types <= {*_FLOATS} and array.shape == (*tensor.shape,)
