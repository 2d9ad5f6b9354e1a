"""What looks like a mistake, and may be meant so: said before training."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from paddle.io import DataLoader

from expbase.base import namesake
from expbase.base.did_you_mean import nearest
from expbase.base.error_text import users_line
from expbase.base.errors import add_note
from expbase.data.shared_memory import SHARED_MEMORY
from expbase.events import own_methods
from expbase.ranks import collectives

# Where Slurm and MPI tell a process how many there are. Paddle does not look.
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_LITTLE_ROOM = 256  # MB in shared memory; docker gives 64


def likely_mistakes(training: Mapping[str, Any], loader: Any) -> Iterator[str]:
    """Yields what a person would want to know before training."""
    yield from namesake.told()
    is_used = getattr(loader, "num_workers", 0) and loader.use_shared_memory
    if is_used and SHARED_MEMORY.exists():
        room = shutil.disk_usage(SHARED_MEMORY).free >> 20
        batches = loader.num_workers * loader.prefetch_factor + 1
        if room < _LITTLE_ROOM:
            yield (
                f"{SHARED_MEMORY} has room for {room} MB: if {batches} batches need more, the "
                "workers die of a bus error. Enlarge it (docker run --shm-size=4g), or give the "
                "DataLoader use_shared_memory=False."
            )
    for name in _SIZES:
        size = os.environ.get(name, "1")
        if size != "1" and collectives.world_size() == 1:
            yield f"{name} is {size}, and this process trains alone; expected a launcher per node."
    monitor = training["monitor"]
    if monitor.endswith(("loss", "error")) and training["monitor_mode"] == "max":
        yield (
            f"training.monitor: the best {monitor!r} is the largest one; expected "
            "training.monitor_mode='min' for it."
        )


@contextlib.contextmanager
def explaining_missing_model(experiment: Any) -> Iterator[None]:
    """Adds to an error of setup_dataloader that what it wants is not there yet, if that is so."""
    try:
        yield
    except AttributeError as error:
        line = users_line(error)
        made = getattr(type(experiment).setup_model, "__code__", None)
        wanted = re.search(rf"self\.(\w+)\.{error.name}\b", line)
        if error.obj is experiment and made and error.name in made.co_names:
            wanted = re.search(rf"self\.({error.name})\b", line)
        if wanted and getattr(experiment, wanted[1], None) is None:
            add_note(
                error,
                f"setup_dataloader: self.{wanted[1]} is not there yet; setup_model runs after it. "
                "Expected there what needs a model, an optimizer say.",
            )
        raise


def misnamed_loaders(experiment: Any) -> Iterator[str]:
    """Yields which attribute looks as if it were meant to be train_loader or another loader."""
    loaders = [n for n, value in vars(experiment).items() if isinstance(value, DataLoader)]
    for name in ("train_loader", "valid_loader", "test_loader"):
        near = [other for other in loaders if nearest(name, [other], 0.8)]
        if getattr(experiment, name) is None and len(near) == 1:
            yield f"self.{near[0]} is set, and self.{name} is not; did you mean {name}?"


def explain_schedule(error: BaseException) -> None:
    """Adds to what paddle's schedules raise of a length what it may come from."""
    if isinstance(error, AssertionError) and re.search(
        "'[A-Za-z_]+' must be a positive", str(error)
    ):
        add_note(
            error,
            "A schedule of the learning rate is given a length that is no positive number: the "
            "run is shorter than its warm-up, or training.max_iteration is 0, since max_epoch "
            "ends the run. Expected a shorter warm-up or a longer run, or self.total_iterations.",
        )


def explain_memory(error: BaseException) -> None:
    """Adds to an update's error that there is no memory what would need less of it."""
    # Paddle raises it for the host and for a GPU (paddle/fluid/pybind/exception.cc, BadAlloc), and
    # within some operators a RuntimeError of the same text; what a custom device answers is an
    # OSError with a number (paddle/phi/backends/custom/custom_device.cc).
    if isinstance(error, MemoryError) or "Out of memory error on" in str(error):
        add_note(
            error,
            "Out of memory in an update: expected smaller batches, with as many samples in an "
            "update by training.accumulation_steps=2, or amp. The same command with --force goes "
            "on with them, from the newest checkpoint.",
        )


# The methods of a task of PaddleHub 1 (document 000), and what is here in their place.
_OF_A_TASK = {
    "_build_net": "setup_model", "_add_label": "train_batch", "_add_metrics": "valid",
    "_build_env_start_event": "on_setup_begin of the mixin AllEvents",
    "_build_env_end_event": "on_setup_end of the mixin AllEvents",
    "_finetune_start_event": "on_train_begin", "_finetune_end_event": "on_train_end",
    "_eval_start_event": "on_evaluate_begin of the mixin AllEvents",
    "_eval_end_event": "on_evaluate_end",
    "_predict_start_event": "on_predict_begin of the mixin Prediction",
    "_predict_end_event": "on_predict_end of the mixin Prediction",
    "_log_interval_event": "on_log", "_save_ckpt_interval_event": "on_save_checkpoint",
    "_eval_interval_event": "evaluate", "_run_step_event": "on_train_batch_end",
}  # fmt: skip


def methods_nobody_calls(experiment: type) -> Iterator[str]:
    """Yields what to do with methods that a task of PaddleHub has, and no method here names."""
    methods = own_methods(experiment).values()
    named = {name for method in methods for name in method.__code__.co_names}
    for theirs, ours in _OF_A_TASK.items():
        if hasattr(experiment, theirs) and theirs not in named:
            yield (
                f"{experiment.__name__}.{theirs}: PaddleHub's name, which nothing calls here; "
                f"expected {ours}, or a call of it there."
            )
