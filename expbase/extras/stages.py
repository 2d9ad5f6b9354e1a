"""Classes by their paths, and stage classes put in front of an experiment class (seed 002).

A stage is a class in a file that replaces one step of a run. Its method gets the name that the
step has here: instance is prepare, build_network is setup_model, startup is startup, run is train,
terminal is terminal. Helper methods of the class are there, too, and `super()` reaches the
experiment's own step.

    experiment = load_class("train.py:Experiment", "experiment", folder)
    startup = load_class("fill.py", "startup_class_path", folder, default="Startup")
    experiment = with_stages(experiment, {"startup": startup}, "runner[0]")
"""

from __future__ import annotations

import contextlib
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


_loaded: dict[Path, dict[str, ModuleType]] = {}  # modules by folder, by name


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
    where, _, name = text.rpartition(":")
    if not where or "/" in name or name.endswith(".py"):
        where, name = text, default
    if not name:
        raise ConfigError(f"{place}: {text!r} names no class; expected {text}:ClassName.")
    if where.endswith(".py") or "/" in where:
        file = (folder / where).resolve()
        if not file.is_file():
            raise ConfigError(f"{place}: {file} does not exist.")
        with imports_from(file.parent):
            module = _import(file.stem, place)
    else:
        module = _import(where, place)
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        classes = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
        own = [n for n, v in classes.items() if v.__module__ == module.__name__]
        raise ConfigError(
            f"{place}: {where} has no class {name!r}; it has {', '.join(own) or 'none'}."
        )
    return found


@contextlib.contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """Makes a block import from a folder first, as a script in that folder would.

    Modules of the folder leave `sys.modules` after the block, and return in the next block for
    it: so files of one name in two folders do not take each other's place, and each file is
    executed once.
    """
    names = {path.stem for path in folder.glob("*.py")}
    names |= {path.parent.name for path in folder.glob("*/__init__.py")}
    # Those that were imported before, from the folder itself (the working folder, say), stay.
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in names and not _lies_in(module, folder)
    }
    for name in hidden:
        del sys.modules[name]
    before = set(sys.modules)
    loaded = _loaded.setdefault(folder, {})
    sys.modules.update(loaded)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in names:
                loaded[name] = sys.modules.pop(name)
        sys.modules.update(hidden)


def _lies_in(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).resolve().parents


def _import(module: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(f"{place}: there is no module {module!r}.") from error
        raise ConfigError(f"{place}: {module} cannot be imported: {error}.") from error
    except Exception as error:
        # The user's own frames alone: those of this file and of importlib explain nothing.
        frames = traceback.TracebackException.from_exception(error)
        frames.stack = traceback.StackSummary.from_list(
            [f for f in frames.stack if "importlib" not in f.filename and f.filename != __file__]
        )
        text = "".join(frames.format()).rstrip()
        raise ConfigError(f"{place}: {module} cannot be imported:\n{text}") from error


# --- putting stages in front -----------------------------------------------------------------


def with_stages(experiment: type[ExperimentBase], stages: Mapping[str, type], place: str) -> Any:
    """A subclass of the experiment whose steps are those of the stage classes.

    Args:
        experiment: The class.
        stages: Stage classes by the name of the stage.
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
        methods[replaced] = _step(getattr(cls, method), replaced, label)
    bases = (*dict.fromkeys(stages.values()), experiment)
    return type(experiment.__name__, bases, methods)


def _check(stage: str, cls: type, stages: Mapping[str, type], place: str) -> None:
    method, place = STAGES[stage][1], f"{place}.{stage}_class_path"
    if not inspect.isfunction(getattr(cls, method, None)):
        raise ConfigError(
            f"{place}: {cls.__name__} has no method {method!r}; expected "
            f"`def {method}(self)` or `def {method}(self, context)`."
        )
    allowed = {STAGES[other][1] for other in stages if stages[other] is cls} | {"setup_dataloader"}
    for name in _names_of(cls) - allowed:
        if hasattr(ExperimentBase, name):
            raise ConfigError(
                f"{place}: {cls.__name__}.{name} would hide what the experiment has "
                "under that name. Choose another name."
            )
        for other, other_cls in stages.items():
            if other_cls is not cls and name in _names_of(other_cls):
                raise ConfigError(
                    f"{place}: {cls.__name__}.{name} and {other_cls.__name__}.{name} "
                    f"({other}_class_path) would hide each other. Rename one."
                )


def _names_of(cls: type) -> set[str]:
    classes = [base for base in cls.__mro__ if base is not object]
    return {name for base in classes for name in vars(base) if not name.startswith("__")}


def _step(method: Any, name: str, label: str) -> Any:
    """The method of a stage as a method of the experiment; the log says when it runs."""
    takes_context = len(inspect.signature(method).parameters) > 1

    def step(self: ExperimentBase) -> None:
        self.logger.info("%s", label)
        method(self, Context(self)) if takes_context else method(self)

    step.__name__ = name
    step.__doc__ = method.__doc__
    return step


class Context(MutableMapping[str, Any]):
    """The experiment as the mapping that a stage of the seed gets: its attributes by name."""

    def __init__(self, experiment: ExperimentBase) -> None:
        self._exp = experiment

    def __getitem__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._exp, name):
            raise KeyError(f"context[{name!r}]: not set; there are {', '.join(self)}.")
        return getattr(self._exp, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._exp, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._exp, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in vars(self._exp) if not name.startswith("_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
