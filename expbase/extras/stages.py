"""Classes by their paths, and stage classes put in front of an experiment class (seed 002).

A stage is a class in a file that replaces one step of a run. Its method gets the name that the
step has here: instance is prepare, build_network is setup_model, startup is startup, run is train,
terminal is terminal. Helper methods of the class are there, too, and `super()` reaches the
experiment's own step.

    loader = ClassLoader()
    cls = loader.load("models/train.py:Experiment", place="experiment")
    cls = with_stages(cls, {"startup": loader.load("fill.py:Startup", place="runner[0]…")})
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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


class ClassLoader:
    """Loads classes from files and packages; each file once."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}
        self._imported: dict[Path, dict[str, ModuleType]] = {}  # by folder, by name

    def load(self, path: str, place: str, default: str = "") -> type:
        """The class that a path names.

        Args:
            path: `file.py:Class`, `file.py` if there is a default name, or `package.module:Class`.
            place: The YAML key of the path, for messages.
            default: The name of the class if the path has none.

        Raises:
            ConfigError: There is no such file, module or class, or it cannot be imported.
        """
        where, colon, name = path.rpartition(":")
        if not colon or "/" in name or name.endswith(".py"):
            where, name = path, default
        if not name:
            raise ConfigError(f"{place}: {path!r} names no class; expected {path}:ClassName.")
        module = self._load_module(where, place)
        found = getattr(module, name, None)
        if not inspect.isclass(found):
            classes = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
            own = [n for n, v in classes.items() if v.__module__ == module.__name__]
            raise ConfigError(
                f"{place}: {where} has no class {name!r}; it has {', '.join(own) or 'none'}."
            )
        return found

    def _load_module(self, where: str, place: str) -> ModuleType:
        file = Path(where)
        if file.suffix != ".py":
            return _import(lambda: importlib.import_module(where), where, place)
        file = file.resolve()
        if not file.is_file():
            raise ConfigError(f"{place}: {where} does not exist.")
        if file not in self._modules:
            with self.imports_from(file.parent):
                self._modules[file] = _import(lambda: _execute(file), where, place)
        return self._modules[file]

    @contextlib.contextmanager
    def imports_from(self, folder: Path) -> Iterator[None]:
        """Makes a block import from a folder first, as a script in that folder would.

        What it imported from there leaves `sys.modules` afterwards and is there again in the next
        block for the folder: files of one name in two folders do not take each other's place.
        """
        names = {path.stem for path in folder.glob("*.py")}
        names |= {path.parent.name for path in folder.glob("*/__init__.py")}
        imported = self._imported.setdefault(folder, {})
        hidden = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in names and not _lies_in(module, folder)
        }
        for name in hidden:
            del sys.modules[name]
        before = set(sys.modules)  # of them the folder's own stay: the working folder's, say
        sys.modules.update(imported)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            for name in set(sys.modules) - before:
                if name.partition(".")[0] in names:
                    imported[name] = sys.modules.pop(name)
            sys.modules.update(hidden)


def _lies_in(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).resolve().parents


def _execute(file: Path) -> ModuleType:
    name = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"  # two folders may have one name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle looks classes up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(load: Callable[[], ModuleType], where: str, place: str) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise ConfigError(f"{place}: there is no module {where!r}.") from error
        raise ConfigError(f"{place}: {where} cannot be imported: {error}.") from error
    except Exception as error:
        # The user's own frames alone: those of this file and of importlib explain nothing.
        frames = traceback.TracebackException.from_exception(error)
        frames.stack = traceback.StackSummary.from_list(
            [f for f in frames.stack if "importlib" not in f.filename and f.filename != __file__]
        )
        text = "".join(frames.format()).rstrip()
        raise ConfigError(f"{place}: {where} cannot be imported:\n{text}") from error


# --- putting stages in front -----------------------------------------------------------------


def with_stages(experiment: type[ExperimentBase], stages: Mapping[str, type]) -> Any:
    """A subclass of the experiment whose steps are those of the stage classes.

    Args:
        experiment: The class.
        stages: Stage classes by the name of the stage.

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
        _check(stage, cls, stages)
        label = f"stage {stage}: {cls.__name__}.{method}"
        if "__init__" in vars(cls):
            label += f" ({cls.__name__}.__init__ is not called; the experiment's own is)"
        methods[replaced] = _step(getattr(cls, method), replaced, label)
    bases = (*dict.fromkeys(stages.values()), experiment)
    return type(experiment.__name__, bases, methods)


def _check(stage: str, cls: type, stages: Mapping[str, type]) -> None:
    _, method, _ = STAGES[stage]
    if not inspect.isfunction(getattr(cls, method, None)):
        raise ConfigError(
            f"{stage}_class_path: {cls.__name__} has no method {method!r}; expected "
            f"`def {method}(self)` or `def {method}(self, context)`."
        )
    allowed = {STAGES[other][1] for other in stages if stages[other] is cls} | {"setup_dataloader"}
    for name in _names_of(cls) - allowed:
        if inspect.isfunction(getattr(ExperimentBase, name, None)):
            raise ConfigError(
                f"{stage}_class_path: {cls.__name__}.{name} would hide the experiment's method of "
                "that name. Choose another name."
            )
        for other, other_cls in stages.items():
            if other_cls is not cls and name in _names_of(other_cls):
                raise ConfigError(
                    f"{stage}_class_path: {cls.__name__}.{name} and {other_cls.__name__}.{name} "
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
