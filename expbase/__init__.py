"""expbase: the experiment template for PaddlePaddle. Start at expbase/experiment.py.

A name is imported, and paddle with it, when it is first asked for: a tool that only reads needs no
paddle. What type checkers and editors read is __init__.pyi.
"""

import importlib
import sys
from typing import Any

from expbase._version import __version__ as __version__

_FILES = {
    "Config": "config",
    "ConfigError": "config",
    "ExperimentBase": "experiment",
    "default_argument_parser": "cli",
    "get_default_training_config": "defaults",
    "main": "cli",
    "on": "events",
    "rank_zero_only": "ranks.collectives",
}
__all__ = [*_FILES]
# Modules that a page has named, and where what they had is now.
_MOVED = {
    "ranks.processes": "expbase.base.processes",
    "ranks.stopping": "expbase.engine.stop",
    "ranks.world": "expbase.ranks.collectives, expbase.ranks.device",
    "run": "expbase.engine.run",
    "state.pdparams": "expbase.checkpoint.pdparams",
    "state.weights": "expbase.checkpoint.model_files",
    "tools.parakeet": "the lines on docs/moving/parakeet.md",
}


class _Moved:
    """Asked for a module that nobody finds: names the place to which it has moved."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raises a ModuleNotFoundError for one that has moved."""
        package, _, module = name.partition(".")
        if package == __name__ and module in _MOVED:
            raise ModuleNotFoundError(f"{name}: has moved; expected {_MOVED[module]}.", name=name)


sys.meta_path.append(_Moved)  # the last one, so it costs nothing


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'expbase' has no attribute {name!r}")
    # First, so that its absence has a plain answer.
    importlib.import_module("expbase.base.import_paddle")
    value = getattr(importlib.import_module(f"expbase.{_FILES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
