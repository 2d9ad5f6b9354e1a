"""Imports paddle first: hides its advice about ccache, and says in plain words if it is missing."""

import warnings

try:
    with warnings.catch_warnings():
        # This advice is for users who compile operators:
        # paddle/utils/cpp_extension/extension_utils.py, find_ccache_home.
        warnings.filterwarnings("ignore", "No ccache found")
        import paddle as paddle
except ModuleNotFoundError as error:
    if error.name != "paddle":  # paddle before 3.3 needs setuptools, and does not say so
        raise
    raise ModuleNotFoundError(
        "expbase needs PaddlePaddle: pip install paddlepaddle-gpu, or paddlepaddle for the CPU."
    ) from None
