"""What a failure in training leaves: the batch that was under way, the traceback, the checkpoint.

Nothing has to be recorded while training goes on: `python -m expbase replay RUN` continues a copy
from that checkpoint to the same error. Of each rank that failed there are, in
`crash/iteration-N` of the output directory:

    crash_0.json            error, phase, place in training, samples, checkpoint, what the batch was
    traceback_0.txt
    batch_0.safetensors     the batch's arrays, named by their place in it: 0, 1, image
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from expbase.checkpoint import write_single_file
from expbase.config import ConfigError
from expbase.tensorfile import Array, serialize

if TYPE_CHECKING:
    from expbase.experiment import ExperimentBase

CRASH = "crash"
_LONGEST = 200  # letters of what is no array, number or text


def leave(exp: ExperimentBase, error: BaseException) -> None:
    """Writes what stands above; not of a Ctrl-C, nor of a slip that its message explains.

    Raises:
        OSError: The system refused.
    """
    if not isinstance(error, Exception) or isinstance(error, ConfigError):
        return
    if getattr(exp.args, "smoke", False):  # its directory is gone in a moment
        return
    exp._quietly("saving", exp._checkpointer.close)  # the last one may still be under way
    folder = exp.output_dir / CRASH / f"iteration-{exp.iteration}"
    newest = exp._checkpointer.newest_saved
    facts: dict[str, Any] = {
        "error": f"{type(error).__name__}: {error}",
        "phase": exp.phase,
        "iteration": exp.iteration,
        "epoch": exp.epoch,
        "batch_in_epoch": exp.batch_in_epoch,
        "ranks": exp.world_size,
        "checkpoint": newest and newest.name,
    }
    if _is_in_train_batch(error, exp):
        arrays: dict[str, Array] = {}
        facts["samples"] = exp._cursor.batches.indices
        facts["batch"] = _described(exp._cursor.last, "", arrays)
        write_single_file(folder / f"batch_{exp.rank}.safetensors", serialize(arrays))
    text = "".join(traceback.format_exception(error))
    write_single_file(folder / f"traceback_{exp.rank}.txt", [text.encode()])
    data = json.dumps(facts, default=repr, indent=1).encode()
    write_single_file(folder / f"crash_{exp.rank}.json", [data])
    exp.logger.info(
        "what was under way is in %s; to see it fail again: python -m expbase replay %s",
        folder.relative_to(exp.output_dir),
        exp.args.output,
    )


def _is_in_train_batch(error: BaseException, exp: ExperimentBase) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    named = [frame for frame in frames if frame.f_code.co_name == "train_batch"]
    return any(frame.f_locals.get("self") is exp for frame in named)


def _described(value: Any, place: str, arrays: dict[str, Array]) -> Any:
    """A batch as JSON: a tensor or array is told by its type and shape, and taken into arrays."""
    if isinstance(value, Mapping):
        return {str(k): _described(v, f"{place}.{k}".lstrip("."), arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(v, f"{place}.{i}".lstrip("."), arrays) for i, v in enumerate(value)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = paddle.to_tensor(value, place=paddle.CPUPlace())
    if isinstance(value, paddle.Tensor):
        arrays[place or "batch"] = array = Array.of(value)
        return str(array)
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)[:_LONGEST]


def newest(run: Path) -> Path | None:
    """The folder of the last failure of a run; None if there is none."""
    folders = [path for path in (run / CRASH).glob("iteration-*") if any(path.glob("crash_*.json"))]
    return max(folders, key=lambda path: path.stat().st_mtime_ns, default=None)


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """What each rank that failed said of it, by rank.

    Raises:
        ValueError: A file is damaged.
    """
    found = {}
    for path in sorted(folder.glob("crash_*.json")):
        try:
            found[int(path.stem.removeprefix("crash_"))] = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: damaged ({error}).") from error
    return found
