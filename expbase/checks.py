"""What is checked before training: at the end of setup, and what the first update shows.

check(found, adapter)      # raises where training would fail, or would lose something
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import paddle

from expbase.config import ConfigError
from expbase.data.loaders import LoaderAdapter
from expbase.events import HELPER_EVENTS, Subscribers
from expbase.state import objects


def check(found: objects.StatefulObjects, adapter: LoaderAdapter) -> None:
    """Checks that what training needs stands on the experiment.

    Raises:
        ValueError: No batch, no layer, no optimizer, or an optimizer of parameters that nobody
            would save.
    """
    if adapter.batches_per_epoch == 0:
        raise adapter.no_batch()
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


def check_arguments(experiment: type, attributes: Iterable[str], args: Any) -> None:
    """Checks what an experiment is made with.

    Raises:
        TypeError: An attribute was set before the template's, which could not be told from it.
        ConfigError: There is no output directory.
    """
    for name in attributes:
        raise TypeError(
            f"{experiment.__name__}.__init__: self.{name} was set before super().__init__(config, "
            "args), so its state would not be saved. Call super().__init__ first."
        )
    if getattr(args, "output", None) in (None, ""):
        raise ConfigError("args.output: not given; expected the directory of the run.")


def check_private_names(experiment: type, names: Iterable[str]) -> None:
    """Checks that a class defines none of the template's private attributes.

    Raises:
        TypeError: It does.
    """
    for name in sorted(names):
        if name.startswith("_") and hasattr(experiment, name):
            raise TypeError(
                f"{experiment.__name__}.{name}: {name} is an attribute of the template's own. "
                "Choose another name."
            )


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


def likely_omissions(batches: int, subscribers: Subscribers, helpers: Set[str]) -> Iterator[str]:
    """What the first update did not do, and probably should have done.

    Args:
        batches: That were read.
        subscribers: Of the events.
        helpers: That train_batch called.
    """
    if not batches:
        yield (
            "train_batch did not call self.read_batch(): the data it takes is not in the order "
            "of the seed, and is not continued after a stop."
        )
    for helper, events in HELPER_EVENTS.items():
        for event in events:
            if helper not in helpers and (waiting := subscribers.names(event)):
                yield (
                    f"{event} does not come ({', '.join(waiting)}): train_batch did not call "
                    f"self.{helper}()."
                )


def likely_mistakes(
    found: objects.StatefulObjects,
    saved: objects.StatefulObjects,
    training: Mapping[str, Any],
    *,
    parallel: bool,
) -> Iterator[str]:
    """What a person would want to be told before training; each may be meant so.

    Args:
        found: What has state, excluded attributes, too.
        saved: What of it a checkpoint holds.
        training: The `training` section of a config.
        parallel: Whether there are several ranks.
    """
    valid, save = training["valid_interval"], training["save_interval"]
    wants_best = training["monitor"] and training["keep_best"] and not training["save_every_epoch"]
    if wants_best and valid and save and valid % save:
        yield (
            f"training.monitor: validations come every {valid} iterations and checkpoints every "
            f"{save}, so the best one may have no checkpoint. With training.save_interval at "
            f"{valid} each has one."
        )
    updated = {id(p) for o in found.optimizers.values() for p in objects.parameters_of(o)}
    for name, layer in found.layers.items():
        trained = _trained(layer)
        if trained and not any(id(parameter) in updated for parameter in trained):
            yield f"self.{name} has trainable parameters, and no optimizer on self updates them."
    wrapped = {id(objects.unwrap(wrapper)) for wrapper in saved.parallel.values()}
    for name, layer in saved.layers.items() if parallel else ():
        if id(layer) not in wrapped and _trained(layer):
            yield (
                f"self.{name} has trainable parameters and is not in self.data_parallel(…): each "
                "rank trains its own."
            )


def _trained(layer: Any) -> list[Any]:
    return [parameter for parameter in layer.parameters() if not parameter.stop_gradient]
