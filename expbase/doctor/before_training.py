"""What looks like a mistake before training, and may be meant so: machine, launcher, config, names.

for text in likely_mistakes(config.training, loader): ...
for text in changed_by_its_file(type(experiment), config): ...
for text in (*misnamed_loaders(experiment), *methods_nobody_calls(type(experiment))): ...
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paddle.io import DataLoader

from expbase.base import other_expbase
from expbase.base.did_you_mean import nearest
from expbase.config import (
    CONFIG,
    Config,
    ConfigError,
    adopt,
    defaults_of,
    dump_yaml,
    flatten,
    load_yaml,
)
from expbase.data.loaders import several_loaders
from expbase.data.shared_memory import SHARED_MEMORY
from expbase.engine.evaluation import OF_SEVERAL
from expbase.events import own_methods
from expbase.ranks import collectives

# Where Slurm and MPI tell a process how many there are. Paddle does not look.
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_METHODS = {name for name in dir(Config) if not name.startswith("_")}
_LITTLE_ROOM = 256  # MB in shared memory; docker gives 64


def likely_mistakes(training: Mapping[str, Any], loader: Any) -> Iterator[str]:
    """Yields what a person would want to know before training."""
    yield from other_expbase.told()
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


def changed_by_its_file(experiment: type, config: Config) -> Iterator[str]:
    """Yields what --evaluate, --export and --config RUN/config.yaml would not get as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG)
        path.write_bytes(dump_yaml(config).encode())
        back = defaults_of(experiment)
        try:
            adopt(back, load_yaml(path))
            back.merge_from_file(path)
        except ConfigError as error:
            yield f"{CONFIG} cannot be read back: {str(error).removeprefix(f'{path}: ')}"
            return
    before, after = flatten(config), flatten(back)
    # With their types: a tuple is not equal to a list here.
    unlike = [key for key in before if repr(before[key]) != repr(after.get(key))]
    for key in unlike[:1]:
        yield (
            f"{CONFIG} does not give back {len(unlike)} of {len(before)} values as they are now: "
            f"config.{key}, {before[key]!r:.80}, would be {after.get(key)!r:.80} in --evaluate, "
            "--export and --config RUN/config.yaml; expected a default of the same type in "
            "default_config."
        )


def keys_that_are_methods(config: Config) -> Iterator[str]:
    """Yields the keys that are read as a method, since each dict has one of that name."""
    for path in flatten(config):
        *sections, key = path.split(".")
        if key in _METHODS:
            section = ".".join(["config", *sections])
            yield (
                f"config.{path} is a method of each section, as of each dict, and not your value; "
                f"expected {section}[{key!r}], or another name."
            )


def misnamed_loaders(experiment: Any) -> Iterator[str]:
    """Yields which attribute looks as if it were meant to be train_loader or another loader."""
    loaders = [n for n, value in vars(experiment).items() if isinstance(value, DataLoader)]
    for name in ("train_loader", "valid_loader", "test_loader"):
        near = [other for other in loaders if nearest(name, [other], 0.8)]
        if getattr(experiment, name) is None and len(near) == 1:
            yield f"self.{near[0]} is set, and self.{name} is not; did you mean {name}?"


def loaders_nobody_reads(experiment: Any) -> Iterator[str]:
    """Yields that self.valid_loader has several loaders, and no method of the user's reads them."""
    kind = several_loaders(experiment.valid_loader)
    methods = own_methods(type(experiment))
    methods.pop("setup_dataloader", None)
    if kind and not any("valid_loader" in m.__code__.co_names for m in methods.values()):
        yield f"self.valid_loader: a {kind} of loaders, and valid_batches() reads one. {OF_SEVERAL}"


# The methods of a task of PaddleHub 1, and what is here in their place.
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
