"""expbase: the experiment template for PaddlePaddle. Start at expbase/experiment.py.

A name is imported, and paddle with it, when it is first asked for: a tool that only reads needs no
paddle. What type checkers and editors read is __init__.pyi.
"""

import importlib
from typing import Any

from expbase._version import __version__ as __version__

_FILES = {
    "Config": "config",
    "ConfigError": "base.errors",
    "ExperimentBase": "experiment",
    "default_argument_parser": "cli",
    "get_default_training_config": "config",
    "main": "cli",
    "on": "events",
    "rank_zero_only": "ranks.collectives",
}
__all__ = [*_FILES]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        from expbase.base.errors import AttributeMistake  # here: a name that is there needs none

        raise AttributeMistake(f"module 'expbase' has no attribute {name!r}")
    # First, so that its absence has a plain answer.
    importlib.import_module("expbase.base.import_paddle")
    value = getattr(importlib.import_module(f"expbase.{_FILES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
