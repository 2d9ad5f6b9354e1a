"""The first import of paddle: without its advice about ccache; a plain answer if it is missing."""

import warnings

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # of use to who compiles paddle's ops
        import paddle as paddle
except ModuleNotFoundError as error:
    if error.name != "paddle":  # paddle before 3.3 needs setuptools, and does not say so
        raise
    raise ModuleNotFoundError(
        "expbase needs PaddlePaddle: pip install paddlepaddle-gpu, or paddlepaddle for the CPU."
    ) from None
