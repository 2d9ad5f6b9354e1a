"""expbase: the experiment template for PaddlePaddle. Start at expbase/experiment.py."""

import warnings

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # of use to who compiles paddle's ops
        import paddle  # noqa: F401  # asked for first, so that its absence has a plain answer
except ModuleNotFoundError as error:
    if error.name != "paddle":  # paddle before 3.3 needs setuptools, and does not say so
        raise
    raise ModuleNotFoundError(
        "expbase needs PaddlePaddle: pip install paddlepaddle-gpu, or paddlepaddle for the CPU."
    ) from None

from expbase._version import __version__ as __version__
from expbase.cli import default_argument_parser, main
from expbase.config import Config, ConfigError, get_default_training_config
from expbase.events import on
from expbase.experiment import ExperimentBase
from expbase.ranks.world import rank_zero_only

__all__ = [
    "Config",
    "ConfigError",
    "ExperimentBase",
    "default_argument_parser",
    "get_default_training_config",
    "main",
    "on",
    "rank_zero_only",
]
