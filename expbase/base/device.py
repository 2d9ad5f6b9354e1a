"""The device that paddle uses: the default one, flags of its kernels, the memory that was used.

paddle.set_flags(repeatable_flags())
peak_memory()                # {"memory_gb": 1.2}
"""

from __future__ import annotations

import paddle
from paddle.base import core

# Flags of paddle; not each version and build has all of them. They are in its file
# paddle/common/flags.cc. A search takes the fastest kernel, which may be another one each time.
_REPEATABLE = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_embedding_deterministic": 1,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_cublaslt_exhaustive_search_times": 0,
    "FLAGS_enable_blaslt_global_search": False,
    "FLAGS_use_autotune": False,
}


def repeatable_flags() -> dict[str, int]:
    """Returns the flags of this version of paddle that make kernels repeatable."""
    known = core.globals()
    return {name: value for name, value in _REPEATABLE.items() if known.is_public(name)}


def default_device() -> str:
    """Returns "gpu" if paddle has one, else "cpu"."""
    return "gpu" if paddle.device.cuda.device_count() else "cpu"


def peak_memory() -> dict[str, float]:
    """Returns the most memory this process has had, in GB: on the host, and on its device, if that
    is not the CPU.
    """
    import resource  # here: Windows has none, and is refused in words

    peak = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9}
    _, _, number = paddle.device.get_device().partition(":")
    if number.isdigit():
        # What paddle.device.max_memory_allocated asks, which paddle 3.0 has for GPUs alone.
        allocated = core.device_memory_stat_peak_value("Allocated", int(number))
        peak["device_memory_gb"] = allocated * 1e-9
    return peak
