"""What is checked before training: at the end of setup, and what the first update shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from expbase.base.processes import SHARED_MEMORY
from expbase.config import ConfigError
from expbase.data.loaders import LoaderAdapter
from expbase.ranks import world

# Where Slurm and MPI tell a process how many there are. Paddle does not look.
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_LITTLE_ROOM = 256  # MB in shared memory; docker gives 64


def check_data(adapter: LoaderAdapter, loader: Any, training: Mapping[str, Any]) -> None:
    """Raises a ValueError if there are no batches, or a limit of epochs without a loader.

    `loader` is self.train_loader now.
    """
    if adapter.batches_per_epoch == 0:
        raise adapter.no_batch()
    if adapter.loader is not loader:
        raise ValueError("self.train_loader: set too late; expected it in setup_dataloader.")
    for key in ("max_epoch", "valid_every_epoch", "save_every_epoch"):
        if training[key] and loader is None:
            raise ConfigError(
                f"training.{key}: {training[key]} given, and without a self.train_loader there are "
                "no epochs; expected 0, and max_iteration, valid_interval, save_interval."
            )


def check_same_loader(attached: Any, loader: Any) -> None:
    """Raises a RuntimeError if self.train_loader was set anew after setup."""
    if attached is not loader:
        raise RuntimeError(
            "self.train_loader: set anew after setup, and a resumed run has the one that "
            "setup_dataloader makes. Make one loader there, and change what is in it, in "
            "on_train_epoch_begin say: self.train_loader.dataset.level = 2, or a sampler's weights."
        )


def check_alike(facts: Mapping[str, str]) -> None:
    """Raises a ValueError if the ranks have different facts of one name; one collective."""
    if difference := first_difference(world.gather_objects(dict(facts))):
        raise ValueError(
            f"{difference}; expected the same on all ranks. Start each with the same config and "
            "the same data, and do what makes it on every rank alike."
        )


def first_difference(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """What a rank has other than rank 0, with both values; empty: they have the same."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for name in {**first, **other}:
            ours, theirs = (of.get(name, "not there") for of in (first, other))
            if repr(ours) != repr(theirs):
                return f"{name}: {ours} on rank 0, {theirs} on rank {rank}"
    return ""


def check_loops(begun: Sequence[int]) -> None:
    """Raises a RuntimeError if valid() began loops over its data on some ranks only."""
    if 0 in begun and any(begun):
        raise RuntimeError(
            f"valid: valid_batches() was called on rank {begun.index(max(begun))} and not on rank "
            f"{begun.index(0)}, whose share of the data nobody validates. Call it on every rank: "
            "look for `if self.rank == 0`, @rank_zero_only or a return before it."
        )


def check_metric(key: str, name: str, results: Mapping[str, float]) -> None:
    """Raises a ConfigError if valid() did not return the metric that a config key names, if any."""
    if name and name.removeprefix("valid/") not in results:
        raise ConfigError(
            f"{key}: {name!r} given; expected one of the metrics that valid() returned: "
            f"{', '.join(results) or 'nothing'}."
        )


def likely_mistakes(training: Mapping[str, Any], loader: Any) -> Iterator[str]:
    """What a person would want to know before training; each may be meant so."""
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
        if size != "1" and world.world_size() == 1:
            yield f"{name} is {size}, and this process trains alone; expected a launcher per node."
    monitor = training["monitor"]
    if monitor.endswith(("loss", "error")) and training["monitor_mode"] == "max":
        yield (
            f"training.monitor: the best {monitor!r} is the largest one; expected "
            "training.monitor_mode='min' for it."
        )
