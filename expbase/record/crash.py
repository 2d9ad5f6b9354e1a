"""What a failure in training leaves, for `python -m expbase replay RUN`.

Of each rank that failed there are, in `crash/iteration-N` of the output directory:

    crash_0.json            error, phase, place in training, samples, checkpoint, what the batch was
    traceback_0.txt
    batch_0.safetensors     the batch's arrays, named by their place in it: 0, 1, image
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase.state.arrays import LABELS, Array, serialize
from expbase.state.checkpoint import write_single_file

CRASH = "crash"


def write_crash_report(
    run: Path, rank: int, error: BaseException, facts: Mapping[str, Any], batch: Any = None
) -> Path:
    """Writes what is listed above into the output directory `run`; returns the folder.

    `facts` are JSON values: iteration, ranks, checkpoint (its name, or None), and others; `batch`
    is the one that was under way, None if none was. An OSError if the system refuses.
    """
    folder = run / CRASH / f"iteration-{facts['iteration']}"
    report = {"error": f"{type(error).__name__}: {error}", **facts}
    if batch is not None:
        report["batch"], arrays = describe_batch(batch)
        write_single_file(folder / f"batch_{rank}.safetensors", serialize(arrays))
    text = "".join(traceback.format_exception(error))
    write_single_file(folder / f"traceback_{rank}.txt", [text.encode()])
    data = json.dumps(report, default=repr, indent=1).encode()
    write_single_file(folder / f"crash_{rank}.json", [data])
    return folder


def is_in_method(error: BaseException, owner: object, name: str) -> bool:
    """Whether an error came out of a method of an object."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    named = [frame for frame in frames if frame.f_code.co_name == name]
    return any(frame.f_locals.get("self") is owner for frame in named)


def describe_batch(batch: Any) -> tuple[Any, dict[str, Array]]:
    """A batch as JSON values, in which an array is its type and shape; and its arrays by place."""
    arrays: dict[str, Array] = {}
    return _described(batch, "", arrays), arrays


def _described(value: Any, place: str, arrays: dict[str, Array]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _described(v, f"{place}.{k}".lstrip("."), arrays) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(v, f"{place}.{i}".lstrip("."), arrays) for i, v in enumerate(value)]
    if isinstance(value, np.ndarray) and value.dtype.name in LABELS:
        value = paddle.to_tensor(value, place=paddle.CPUPlace())
    if isinstance(value, paddle.Tensor):
        arrays[place or "batch"] = array = Array.of(value)
        return str(array)
    if isinstance(value, (str, int, float, type(None))):
        return value
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:200]  # an address is another in each run


def last_failure(run: Path) -> dict[int, dict[str, Any]]:
    """What ranks noted of the last failure of a run, if any; a ValueError if that is damaged."""
    folders = sorted((run / CRASH).glob("iteration-*"), key=lambda path: path.stat().st_mtime_ns)
    paths = sorted(folders[-1].glob("crash_[0-9]*.json")) if folders else []
    return {int(path.stem.removeprefix("crash_")): _read_one(path) for path in paths}


def _read_one(path: Path) -> dict[str, Any]:
    try:
        facts = dict(json.loads(path.read_bytes()))
        if missing := {"error", "iteration", "ranks", "checkpoint"} - facts.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return facts
    except (OSError, TypeError, ValueError) as error:
        known = path.stem.replace("crash", "traceback")
        raise ValueError(
            f"{path}: damaged: {error}; expected what was noted of a failure. Without it the "
            f"failure cannot be repeated. Its traceback is in {known}.txt beside it."
        ) from error
