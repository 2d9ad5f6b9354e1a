"""What is checked before training: at the end of setup, and what the first update shows."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from expbase.base.arrays import is_piece
from expbase.command_line import check_system
from expbase.config import Config, ConfigError, check_training, fill, fill_in
from expbase.data.shared_memory import SHARED_MEMORY
from expbase.engine import due
from expbase.ranks import alike, collectives
from expbase.record.visualizer import Visualizer
from expbase.state import objects

# Where Slurm and MPI tell a process how many there are. Paddle does not look.
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_LITTLE_ROOM = 256  # MB in shared memory; docker gives 64


def check_state(found: objects.StatefulObjects) -> None:
    """Raises a ValueError where training would fail, or would lose something."""
    if not found.layers:
        raise ValueError(
            "setup_model: no paddle.nn.Layer is an attribute; expected one, self.model say."
        )
    if not found.optimizers and not found.excluded_optimizers:
        raise ValueError(
            "setup_model: no optimizer is an attribute; expected one, self.optimizer say."
        )
    for name, optimizer in found.optimizers.items():
        if isinstance(optimizer, (paddle.optimizer.LBFGS, paddle.incubate.LookAhead)):
            raise ValueError(
                f"self.{name}: paddle's {type(optimizer).__name__} does not continue exactly from "
                f"its state. To accept that, call exclude_from_state({name!r}): a resumed run "
                "begins it anew."
            )
    names = objects.parameter_names(found)
    _check_sharding(found)
    for name, optimizer in found.optimizers.items():
        unknown = [p.name for p in objects.parameters_of(optimizer) if p.name not in names]
        if unknown:
            raise ValueError(
                f"self.{name}: updates {len(unknown)} parameters of no layer among the attributes "
                f"({unknown[0]} …), so they would not be saved. Make their layer an attribute."
            )


def _check_sharding(found: objects.StatefulObjects) -> None:
    stages = {type(layer).__name__ for layer in found.parallel.values()}
    if "GroupShardedStage3" in stages or any(
        hasattr(optimizer, "_slice_params") for optimizer in found.optimizers.values()
    ):
        raise ValueError(
            "setup_model: fleet's split_param and group_sharded_parallel's p_g_os divide single "
            "parameters, which a checkpoint cannot hold; expected split_param=False, or os or os_g."
        )


def check_platform() -> None:
    """Raises a ConfigError on Windows, or if this version of paddle is too old."""
    check_system()
    major = int(paddle.__version__.partition(".")[0])  # 0 for a build between two versions
    if 0 < major < 3:
        raise ConfigError(
            f"paddle {paddle.__version__}: expected 3.0 to 3.3, with which expbase was tried. The "
            "tensors of this one cannot be saved: no __dlpack__."
        )


def checked_config(experiment: type, base: type, config: Mapping[str, Any], args: Any) -> Config:
    """The completed config of an experiment that is being made with these.

    Raises:
        TypeError: One of the methods is missing, or cannot be called.
        ConfigError: The config, the args or this version of paddle cannot be used.
    """
    check_platform()
    # What mixins add is there, however the config was made.
    completed = fill({**fill(experiment.default_config()), **config})  # type: ignore[attr-defined]
    check_training(completed.training)
    check_arguments(args, completed)
    check_class(experiment, base, completed.training, args)
    return completed


def check_attribute(base: type, name: str, value: Any) -> None:
    """Raises an AttributeError if an attribute would hide a method, or is only to be read."""
    ours = getattr(base, name, None)
    if isinstance(ours, property) and ours.fset is None:
        raise AttributeError(
            f"self.{name}: {value!r} given, and expbase sets it; expected another name."
        )
    # A function may take the place of a method; a layer is called, too, and is none.
    if inspect.isroutine(ours) and (not callable(value) or isinstance(value, paddle.nn.Layer)):
        raise AttributeError(
            f"self.{name}: {type(value).__name__} given, which hides the method of that name; "
            "expected another name."
        )


def check_class(experiment: type, base: type, training: Any, args: Any) -> None:
    """Raises a TypeError if a method is missing, or cannot be called as the base class calls it."""
    required = ["setup_dataloader", "setup_model", "train_batch"]
    if inspected(args) is not None or due.is_wanted(training, "valid"):
        required += ["valid"]
    missing = [name for name in required if getattr(experiment, name) is getattr(base, name)]
    if missing:
        raise TypeError(
            f"{experiment.__name__}: {', '.join(missing)} not defined; expected the methods "
            f"{', '.join(required)}" + ", or training.valid_interval=0" * ("valid" in missing) + "."
        )
    for name in dir(base):
        ours = getattr(base, name)
        if name.startswith("__") or not inspect.isfunction(ours):
            continue
        # Before a slash, as in log(self, mapping=None, /), even self is positional only.
        given = inspect.signature(ours).parameters.values()
        needed = [p for p in given if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        try:
            inspect.signature(getattr(experiment, name)).bind(*needed)
        except TypeError:
            raise TypeError(
                f"{experiment.__name__}.{name}: cannot be called as the method of that name in "
                f"{base.__name__}; expected {inspect.signature(ours)}, or another name."
            ) from None


def named_scalars(mapping: Any, others: tuple[Any, ...]) -> Mapping[str, Any]:
    """What `log` was given without a keyword, if anything; a TypeError if it has no names."""
    if mapping is None and not others:
        return {}
    if others or not isinstance(mapping, Mapping):
        raise TypeError(
            f"log: {mapping!r} given without a name; expected self.log(loss=loss) or "
            'self.log({"loss": loss}).'
        )
    return mapping


def numbers_of_valid(logged: Mapping[str, float], results: Any) -> dict[str, float]:
    """What valid() has logged and returned, as numbers; a TypeError if that cannot be."""
    if results is not None and not isinstance(results, Mapping):
        raise TypeError(f"valid: returned {results!r}; expected numbers by name, or None.")
    numbers = {}
    for name, value in {**logged, **(results or {})}.items():
        try:
            numbers[name] = collectives.number(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"valid: the metric {name!r} is {value!r}; expected a number or a tensor of one."
            ) from None
    return numbers


def check_layer_alike(layer: Any) -> None:
    """Raises a ValueError if the ranks give layers with other parameters to data_parallel."""
    found = objects.StatefulObjects(layers={f"data_parallel({type(layer).__name__})": layer})
    alike.check_alike(found.shapes())


def check_arguments(args: Any, config: Config) -> None:
    """Checks what an experiment is made with, and fills config values into the output directory.

    Raises:
        ConfigError: There is no output directory, options exclude each other, or one has no effect.
    """
    if not getattr(args, "output", None):
        raise ConfigError("--output: not given; expected the directory of the run.")
    for option in ("fresh", "force", "checkpoint_path", "init_model_path", "smoke", "restarts"):
        if getattr(args, option, None) and inspected(args) is not None:
            raise ConfigError(
                f"--{option}: given with --evaluate or --export, which only look at a run."
            )
    if getattr(args, "nprocs", 1) > 1 and collectives.world_size() == 1:
        raise ConfigError("--nprocs: is done by main(Experiment), which this script does not call.")
    args.output = fill_in(str(args.output), config)


def inspected(args: Any) -> str | None:
    """The checkpoint that --evaluate or --export only look at; None: the run is to train."""
    # "", of a shell variable that is not set, is one that does not exist: nothing must be trained.
    given = (getattr(args, option, None) for option in ("evaluate", "export"))
    return next((str(which) for which in given if which not in (None, False)), None)


def check_visualizer(visualizer: Any) -> None:
    """Raises a TypeError if it is none of ours, which has more methods than VisualDL's writer."""
    if not isinstance(visualizer, Visualizer):
        raise TypeError(
            f"self.visualizer: is a {type(visualizer).__name__}; expected a class derived from "
            "expbase.record.visualizer.Visualizer, or another name."
        )


def check_metric(key: str, name: str, results: Mapping[str, float]) -> None:
    """Raises a ConfigError if valid() did not return the metric that a config key names, if any."""
    if name and name.removeprefix("valid/") not in results:
        raise ConfigError(
            f"{key}: {name!r} given; expected one of the metrics that valid() returned: "
            f"{', '.join(results) or 'nothing'}."
        )


def check_shares(shares: int, world_size: int) -> None:
    """Raises a ConfigError if the processes cannot have equally many shares."""
    if shares and shares % world_size:
        numbers = ", ".join(str(1 << n) for n in range(shares.bit_length()))
        raise ConfigError(
            f"training.shares: {shares} given, and {world_size} processes; expected one of "
            f"{numbers} processes."
        )


def check_whole(found: objects.StatefulObjects) -> None:
    """Raises a ValueError if gradients or statistics go over the ranks in a way of their own."""
    parts = [*found.sublayers(), *(("", wrapper) for wrapper in found.parallel.values())]
    across = (paddle.nn.SyncBatchNorm, paddle.DataParallel)
    names = [f"{type(part).__name__} {name}" for name, part in parts if isinstance(part, across)]
    if names := [*names, *sorted(found.pieces()), *found.sharded()]:
        raise ValueError(
            f"training.shares: {names[0].strip()} depends on the number of ranks; expected layers "
            "in self.data_parallel, BatchNorm, of which each share has statistics, and no sharding."
        )


def check_accumulation(training: Any, *, accumulates: bool) -> None:
    """Raises a ValueError if train_batch did not use the helper that accumulates batches."""
    key = "shares" if training.shares else "accumulation_steps"
    if (training.shares or training[key] > 1) and not accumulates:
        raise ValueError(
            f"training.{key}: {training[key]} given, and train_batch did not "
            "call self.micro_batches(); expected `for batch in self.micro_batches():` in it."
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
        if size != "1" and collectives.world_size() == 1:
            yield f"{name} is {size}, and this process trains alone; expected a launcher per node."
    monitor = training["monitor"]
    if monitor.endswith(("loss", "error")) and training["monitor_mode"] == "max":
        yield (
            f"training.monitor: the best {monitor!r} is the largest one; expected "
            "training.monitor_mode='min' for it."
        )


def likely_left_out(
    found: objects.StatefulObjects, saved: objects.StatefulObjects, *, parallel: bool
) -> Iterator[str]:
    """Layers that are trained otherwise than one would expect.

    `found` is what has state, excluded attributes too; `saved` is what a checkpoint holds of it.
    """
    updated = {
        id(parameter)
        for optimizer in found.optimizers.values()
        for parameter in objects.parameters_of(optimizer)
    }
    wrapped = [objects.unwrap(wrapper) for wrapper in saved.parallel.values()]
    synchronized = {id(part) for layer in wrapped for part in layer.sublayers(True)}
    for name, layer in found.layers.items():
        trained = [p for p in layer.parameters() if not p.stop_gradient and not is_piece(p)]
        is_updated = any(id(parameter) in updated for parameter in trained)
        if trained and not is_updated:
            yield (
                f"self.{name} has trainable parameters, and no optimizer updates them; expected "
                "stop_gradient = True of those that are not to be trained."
            )
        if parallel and is_updated and name in saved.layers and id(layer) not in synchronized:
            yield (
                f"self.{name} has trainable parameters and is not in self.data_parallel(…): each "
                "rank trains its own."
            )
