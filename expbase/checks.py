"""What is checked before training: at the end of setup, and what the first update shows.

check(found, feed)      # raises where training would fail, or would lose something
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import paddle

from expbase.config import ConfigError
from expbase.data.loaders import LoaderAdapter
from expbase.events import HELPER_EVENTS
from expbase.state import objects


def check(found: objects.StatefulObjects, feed: LoaderAdapter) -> None:
    """Checks that what training needs stands on the experiment.

    Raises:
        ValueError: No batch, no layer, no optimizer, or an optimizer of parameters that nobody
            would save.
    """
    if feed.batches_per_epoch == 0:
        raise feed.no_batch()
    if not found.layers:
        raise ValueError(
            "setup_model: no paddle.nn.Layer on self; expected at least one, self.model say."
        )
    if not found.optimizers and not found.excluded_optimizers:
        raise ValueError(
            "setup_model: no optimizer on self; expected at least one, self.optimizer say."
        )
    for name, optimizer in found.optimizers.items():
        if isinstance(optimizer, (paddle.optimizer.LBFGS, paddle.incubate.LookAhead)):
            raise ValueError(
                f"self.{name}: paddle's {type(optimizer).__name__} does not continue exactly from "
                f"its state. To accept that, call exclude_from_state({name!r}): a resumed run "
                "begins it anew."
            )
    names = objects.parameter_names(found)
    for name, optimizer in found.optimizers.items():
        unknown = [p.name for p in objects.parameters_of(optimizer) if p.name not in names]
        if unknown:
            raise ValueError(
                f"self.{name}: updates {len(unknown)} parameters that belong to no layer on "
                f"self ({unknown[0]} …), so they would not be saved. Put their layer on self."
            )


def check_class(experiment: type, base: type, required: tuple[str, ...]) -> None:
    """Checks the methods of a subclass, before anything is built.

    Raises:
        TypeError: A required one is missing, or one cannot be called as the base class calls it.
    """
    missing = [name for name in required if getattr(experiment, name) is getattr(base, name)]
    if missing:
        raise TypeError(
            f"{experiment.__name__}: {', '.join(missing)} not defined; expected the methods "
            f"{', '.join(required)}."
        )
    for name in dir(base):
        ours, theirs = getattr(base, name), getattr(experiment, name)
        if name.startswith("__") or theirs is ours or not inspect.isfunction(ours):
            continue
        if not callable(theirs):
            raise TypeError(
                f"{experiment.__name__}.{name}: is no method; {base.__name__} has a method of "
                "that name. Choose another one."
            )
        needed = [None for p in inspect.signature(ours).parameters.values() if _is_needed(p)]
        try:
            inspect.signature(theirs).bind(*needed)
        except TypeError:
            raise TypeError(
                f"{experiment.__name__}.{name}: takes {inspect.signature(theirs)}; expected "
                f"{inspect.signature(ours)} as in {base.__name__}."
            ) from None


def _is_needed(parameter: inspect.Parameter) -> bool:
    # Before a slash, as in log(self, mapping=None, /), even self is positional only.
    positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return positional and parameter.default is parameter.empty


def check_names(attributes: Iterable[str], base: type) -> None:
    """Checks that no attribute hides a method of the base class.

    Raises:
        ValueError: One does.
    """
    for name in attributes:
        if inspect.isfunction(getattr(base, name, None)):
            raise ValueError(
                f"self.{name}: set on self, but {base.__name__} has a method of that name. "
                "Choose another name."
            )


def check_ranks(names: Sequence[Sequence[str]]) -> None:
    """Checks that all ranks have the same stateful objects on the experiment.

    Args:
        names: Of each rank's.

    Raises:
        ValueError: One stands on some ranks only.
    """
    for of_rank in names:
        for name in {*of_rank} ^ {*names[0]}:
            raise ValueError(
                f"self.{name}: stands on self on some ranks only; make it on every rank, or "
                "exclude_from_state it."
            )


def check_metric(key: str, name: str, results: Mapping[str, float]) -> None:
    """Checks that valid() returned a metric that the config names.

    Raises:
        ConfigError: It did not.
    """
    if name.removeprefix("valid/") not in results:
        raise ConfigError(
            f"{key}: {name!r} given; expected one of the metrics that valid() returned: "
            f"{', '.join(results) or 'nothing'}."
        )


def unsaved_validations(training: Mapping[str, Any]) -> str:
    """That the best validation may be one without a checkpoint, in words; empty if it has one."""
    valid, save = training["valid_interval"], training["save_interval"]
    if not (training["monitor"] and training["keep_best"] and valid and save and valid % save):
        return ""
    if training["save_every_epoch"]:
        return ""
    return (
        f"training.monitor: validations come every {valid} iterations and checkpoints every "
        f"{save}, so the best one may have no checkpoint. With training.save_interval at {valid} "
        "each has one."
    )


def check_accumulation(accumulation_steps: int, used: Set[str]) -> None:
    """Checks that an update takes as many batches as the config says, after the first one.

    Args:
        accumulation_steps: Of the config.
        used: The helpers that train_batch called.

    Raises:
        ValueError: It took one.
    """
    if accumulation_steps > 1 and "micro_batches" not in used:
        raise ValueError(
            f"training.accumulation_steps: {accumulation_steps} given, and train_batch did not "
            "call self.micro_batches(); expected `for batch in self.micro_batches():` in it."
        )


def unfired(heard: Set[str], used: Set[str]) -> Iterator[tuple[str, str]]:
    """The events that somebody hears and that did not come, with the helper they come from."""
    for helper, events in HELPER_EVENTS.items():
        for event in events:
            if event in heard and helper not in used:
                yield event, helper


def not_updated(found: objects.StatefulObjects) -> list[str]:
    """The layers with trainable parameters none of which an optimizer updates."""
    updated = {id(p) for o in found.optimizers.values() for p in objects.parameters_of(o)}
    trainable = {
        name: [p for p in layer.parameters() if not p.stop_gradient]
        for name, layer in found.layers.items()
    }
    return [n for n, ps in trainable.items() if ps and not any(id(p) in updated for p in ps)]


def unsynchronized(found: objects.StatefulObjects) -> list[str]:
    """The layers with trainable parameters that stand in no DataParallel."""
    wrapped = {id(objects.unwrap(wrapper)) for wrapper in found.parallel.values()}
    return [
        name
        for name, layer in found.layers.items()
        if id(layer) not in wrapped and any(not p.stop_gradient for p in layer.parameters())
    ]
