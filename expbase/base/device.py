"""The device that paddle uses: the default one, flags of its kernels, the memory that was used.

paddle.set_flags(repeatable_flags())
peak_memory()                # {"memory_gb": 1.2}
"""

from __future__ import annotations

import os
from typing import Any

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
    """Returns the kind of device that paddle takes by itself: gpu, xpu, a custom one, else cpu."""
    # As _current_expected_place_ of paddle/base/framework.py, and not by asking for the device of
    # now: that may be what an earlier run of this process was given.
    kinds = ["gpu", "xpu", *core.get_all_custom_device_type()[:1]]
    return next((kind for kind in kinds if number_of_devices(kind)), "cpu")


def kind_of(device: str) -> str:
    """Returns the kind of a device: "gpu" of "gpu:1"."""
    return device.partition(":")[0]


def is_custom(kind: str) -> bool:
    """Returns whether devices of this kind come with a plug-in of paddle's: an npu, say."""
    return kind in core.get_all_custom_device_type()


def number_of_devices(kind: str) -> int:
    """Returns how many devices of a kind this process may use; of the CPU the cores."""
    if kind == "cpu":
        return len(os.sched_getaffinity(0))
    if is_custom(kind):
        return int(core.get_custom_device_count(kind))
    of_paddle = paddle.device.xpu if kind == "xpu" else paddle.device.cuda
    return int(of_paddle.device_count())


def as_place(place: Any) -> Any:
    """Returns a place of any class of paddle's as a core.Place, which can be asked what it is."""
    if isinstance(place, core.Place):
        return place
    # In paddle 3.0 the classes of places, such as core.CUDAPlace, lack is_gpu_place and the like
    # (paddle/fluid/pybind/place.cc).
    whole = core.Place()
    whole.set_place(place)
    return whole


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
