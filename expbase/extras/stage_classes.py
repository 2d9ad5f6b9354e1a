"""Classes by their paths, and stage classes in front of an experiment class (seed 002).

    startup = load_class("fill.py", "startup_class_path", folder, default="Startup")
    experiment = with_stages(experiment, {"startup": startup}, "runner[0]")

A stage is a class that replaces one step of a run.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import paddle

from expbase.base.device import kind_of
from expbase.base.errors import KeyMistake, NotImplementedMistake
from expbase.config import ConfigError
from expbase.experiment import ExperimentBase

# By the name of the stage: its class in a file, its method there, and the method it replaces.
STAGES = {
    "instance": ("Instance", "instance", "prepare"),
    "network": ("Network", "build_network", "setup_model"),
    "startup": ("Startup", "startup", "startup"),
    "runner": ("Runner", "run", "train"),
    "terminal": ("Terminal", "terminal", "terminal"),
}
# What else of the experiment a stage may define.
_ALLOWED = {"setup_dataloader", *(method for _, method, _ in STAGES.values())}
# Methods of PaddleRec's base classes of stages, beside `save`, and what to use in their place.
_LEFT_OUT = {
    "load": "a runner's init_model_path is loaded by itself, right after startup; for other "
    "weights call self.load_model(path)",
    "_run": "expected `while self.going_on():` with self.train_batch() and self.end_iteration()",
}


class EngineMode(enum.IntEnum):
    """The values of `context["engine"]`; the numbers are PaddleRec's."""

    SINGLE = 1
    CLUSTER = 2  # several processes, on one machine or several


def load_class(text: str, place: str, folder: Path, default: str = "") -> type:
    """Imports the class that a text names.

    Args:
        text: `file.py:Class`, `file.py` if there is a default name, or `package.module:Class`.
        place: The YAML key of the text, for messages.
        folder: The folder to which the path of a file is relative.
        default: The name of the class if the text has none.

    Returns:
        The class.

    Raises:
        ConfigError: There is no such file, module or class, or it cannot be imported.
    """
    where, _, name = text.partition(":")
    name = name or default
    if not name:
        raise ConfigError(
            f"{place}: {text!r} names no class; expected file.py:Class or package.module:Class."
        )
    place = f"{place}: {where}"
    is_file = where.endswith(".py")
    module = _import_file((folder / where).resolve(), place) if is_file else _import(where, place)
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        raise ConfigError(f"{place} has no class {name!r}.")
    return found


def _import_file(file: Path, place: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{place} does not exist ({file}).")
    # It stays there: the file may import from its folder while it runs, as a script does.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = _import(file.stem, place)
    imported = getattr(module, "__file__", None)
    if imported is None or Path(imported).resolve() != file:
        raise ConfigError(
            f"{place} has the name of a module that is imported already "
            f"({imported or 'of Python'}). Rename the file."
        )
    return module


def _import(module: str, place: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ImportError as error:  # any other error in the file shows its traceback
        raise ConfigError(f"{place} cannot be imported: {error}") from error


# --- putting stages in front -----------------------------------------------------------------


def with_stages(
    experiment: type[ExperimentBase], stages: Mapping[str, type], place: str, **facts: Any
) -> Any:
    """Derives from the experiment and the stage classes, whose methods take the place of its steps.

    Helper methods of these classes are there, too, and `super()` reaches the step that is replaced.

    Args:
        experiment: The class.
        stages: The classes, by the name of the stage in STAGES.
        place: The runner, for messages.
        **facts: Values of `context` beside the experiment's attributes, such as runner_name.

    Returns:
        The subclass; without stages the experiment itself.

    Raises:
        ConfigError: A class lacks its method, or hides an attribute of another class.
    """
    if not stages:
        return experiment
    # These stay the experiment's own: a stage's `run` replaces `train`, its `__init__` nothing.
    methods: dict[str, Any] = {name: getattr(experiment, name) for name in ("__init__", "run")}
    methods["__module__"] = experiment.__module__
    methods["save"] = _save(experiment)
    for name, instead in _LEFT_OUT.items():
        if not any(hasattr(cls, name) for cls in (experiment, *stages.values())):
            methods[name] = _refusal(name, instead)
    owners: dict[str, type] = {}
    for stage, cls in stages.items():
        for name in vars(cls):
            if not name.startswith("__") and owners.setdefault(name, cls) is not cls:
                raise ConfigError(
                    f"{place}: {owners[name].__name__}.{name} and {cls.__name__}.{name} would hide "
                    "each other. Rename one."
                )
        _, method, replaced = STAGES[stage]
        _check(cls, method, f"{place}: {stage}_class_path")
        label = f"stage {stage}: {cls.__name__}.{method}"
        methods[replaced] = _step(getattr(cls, method), label, facts)
    bases = (*dict.fromkeys(stages.values()), experiment)
    return type(experiment.__name__, bases, methods)


def _check(cls: type, method: str, place: str) -> None:
    if not inspect.isfunction(getattr(cls, method, None)):
        raise ConfigError(
            f"{place}: {cls.__name__} has no method {method!r}; expected "
            f"`def {method}(self)` or `def {method}(self, context)`."
        )
    for name in {name for name in dir(cls) if not name.startswith("__")} - _ALLOWED:
        if hasattr(ExperimentBase, name) or name in ExperimentBase.__annotations__:
            raise ConfigError(
                f"{place}: {cls.__name__}.{name} would hide what the experiment has "
                "under that name. Choose another name."
            )


def _save(experiment: type[ExperimentBase]) -> Any:
    def save(self: ExperimentBase, *_: Any) -> None:
        """Writes a checkpoint; PaddleRec's runners hand over epoch, context and is_fleet."""
        experiment.save(self)

    return save


def _refusal(name: str, instead: str) -> Any:
    def refuse(self: ExperimentBase, *_: Any, **__: Any) -> None:
        raise NotImplementedMistake(f"{name}: PaddleRec's stages had it; {instead}.")

    return refuse


def _step(method: Any, label: str, facts: Mapping[str, Any]) -> Any:
    """Returns a stage's method as a method of the experiment; the log says when it runs."""
    takes_context = len(inspect.signature(method).parameters) > 1

    def step(self: ExperimentBase) -> None:
        self.logger.info("%s", label)
        method(self, Context(self, facts)) if takes_context else method(self)

    return step


class Context:
    """The attributes of an experiment by their names: `context["model"]` is `self.model`.

    Beside them it has PaddleRec's `engine` (an EngineMode), `is_fleet`, `device`, `runner_name` and
    `is_infer`.
    """

    def __init__(self, experiment: ExperimentBase, facts: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._facts = facts

    def __getitem__(self, name: str) -> Any:
        if hasattr(self._experiment, name):
            return getattr(self._experiment, name)
        parallel = self._experiment.parallel
        facts = {
            "engine": EngineMode.CLUSTER if parallel else EngineMode.SINGLE,
            "is_fleet": parallel,
            "device": kind_of(paddle.device.get_device()).upper(),
            **self._facts,
        }
        if name not in facts:
            raise KeyMistake(
                f"context[{name!r}]: no attribute of the experiment, and none of "
                f"{', '.join(facts)}. What belongs to static graphs and the parameter server (exe, "
                "place, fleet, programs and scopes) is not there; what the YAML file says is in "
                "self.config."
            )
        return facts[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._experiment, name, value)

    def __contains__(self, name: str) -> bool:
        return self.get(name, self) is not self  # self: a default that no attribute is

    def get(self, name: str, default: Any = None) -> Any:
        """Looks for a value, as `context[name]` does.

        Args:
            name: Of an attribute of the experiment, or of what else the context has.
            default: What to return if there is none of that name.

        Returns:
            The value, or the default.
        """
        try:
            return self[name]
        except KeyError:
            return default
