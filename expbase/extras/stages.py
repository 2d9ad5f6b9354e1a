"""Classes by their paths, and stage classes in front of an experiment class (seed 002).

    startup = load_class("fill.py", "startup_class_path", folder, default="Startup")
    experiment = with_stages(experiment, {"startup": startup}, "runner[0]")

A stage is a class that replaces one step of a run.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

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


def load_class(text: str, place: str, folder: Path, default: str = "") -> type:
    """The class that a text names.

    Args:
        text: `file.py:Class`, `file.py` if there is a default name, or `package.module:Class`.
        place: The YAML key of the text, for messages.
        folder: What the path of a file is relative to.
        default: The name of the class if the text has none.

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
        classes = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
        own = [n for n, v in classes.items() if v.__module__ == module.__name__]
        raise ConfigError(f"{place} has no class {name!r}; it has {', '.join(own) or 'none'}.")
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
    except Exception as error:
        # The user's own frames alone: those of this file and of importlib explain nothing.
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(
            [f for f in shown.stack if "importlib" not in f.filename and f.filename != __file__]
        )
        text = "".join(shown.format()).rstrip()
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("paddlerec"):
            text += "\nA stage needs no base class: leave out PaddleRec's, and its import."
        raise ConfigError(f"{place} cannot be imported:\n{text}") from error


# --- putting stages in front -----------------------------------------------------------------


def with_stages(experiment: type[ExperimentBase], stages: Mapping[str, type], place: str) -> Any:
    """A subclass of the experiment whose steps are those of the stage classes.

    Helper methods of these classes are there, too, and `super()` reaches the experiment's own step.

    Args:
        experiment: The class.
        stages: The classes, by the name of the stage in STAGES.
        place: The YAML key of the runner, for messages.

    Raises:
        ConfigError: A class lacks its method, or hides something.
    """
    if not stages:
        return experiment
    # These stay the experiment's own: a stage's `run` replaces `train`, its `__init__` nothing.
    methods: dict[str, Any] = {name: getattr(experiment, name) for name in ("__init__", "run")}
    methods["__module__"] = experiment.__module__
    for stage, cls in stages.items():
        _, method, replaced = STAGES[stage]
        _check(stage, cls, stages, place)
        label = f"stage {stage}: {cls.__name__}.{method}"
        if "__init__" in vars(cls):
            label += f" ({cls.__name__}.__init__ is not called; the experiment's own is)"
        methods[replaced] = _step(getattr(cls, method), label)
    bases = (*dict.fromkeys(stages.values()), experiment)
    return type(experiment.__name__, bases, methods)


def _check(stage: str, cls: type, stages: Mapping[str, type], place: str) -> None:
    method = STAGES[stage][1]
    place = f"{place}.{stage}_class_path"
    if not inspect.isfunction(getattr(cls, method, None)):
        raise ConfigError(
            f"{place}: {cls.__name__} has no method {method!r}; expected "
            f"`def {method}(self)` or `def {method}(self, context)`."
        )
    allowed = {STAGES[other][1] for other in stages if stages[other] is cls} | {"setup_dataloader"}
    for name in {name for name in dir(cls) if not name.startswith("__")} - allowed:
        if hasattr(ExperimentBase, name):
            raise ConfigError(
                f"{place}: {cls.__name__}.{name} would hide what the experiment has "
                "under that name. Choose another name."
            )
        for other, other_cls in stages.items():
            if other_cls is not cls and hasattr(other_cls, name):
                raise ConfigError(
                    f"{place}: {cls.__name__}.{name} and {other_cls.__name__}.{name} "
                    f"({other}_class_path) would hide each other. Rename one."
                )


def _step(method: Any, label: str) -> Any:
    """The method of a stage as a method of the experiment; the log says when it runs."""
    takes_context = len(inspect.signature(method).parameters) > 1

    def step(self: ExperimentBase) -> None:
        self.logger.info("%s", label)
        method(self, Context(self)) if takes_context else method(self)

    return step


class Context(MutableMapping[str, Any]):
    """The attributes of an experiment as a mapping: `context["model"]` is `self.model`."""

    def __init__(self, experiment: ExperimentBase) -> None:
        self._experiment = experiment

    def __getitem__(self, name: str) -> Any:
        if not hasattr(self._experiment, name):
            raise KeyError(name)
        return getattr(self._experiment, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._experiment, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._experiment, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._experiment))

    def __len__(self) -> int:
        return len(vars(self._experiment))
