"""The device of this process: which one it trains on, its flags, and how much memory it has used.

set_device("gpu", deterministic=True)
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle.base import core

from expbase.config import ConfigError

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


def set_device(device: str | None, *, deterministic: bool) -> None:
    """Makes paddle use a device.

    Args:
        device: "cpu", "gpu", "gpu:1" or another one of paddle's; None: the GPU if there is one.
        deterministic: Also set the flags that make its kernels repeatable.

    Raises:
        ConfigError: There is no such device, or the processes would share one.
    """
    device = device or default_device()
    if dist.get_world_size() > 1 and ":" in device:
        raise ConfigError(
            f"--device: {device!r} given with {dist.get_world_size()} processes; expected "
            f"{device.partition(':')[0]!r}: each process takes its own."
        )
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--device: {device!r} given; expected cpu, gpu, gpu:0 or another device that "
            f"this machine has and this paddle was built for. ({error})"
        ) from error
    if deterministic:
        paddle.set_flags(repeatable_flags())


def repeatable_flags() -> dict[str, int]:
    """Returns the flags that make kernels repeatable, of those that this paddle has."""
    known = core.globals()
    return {name: value for name, value in _REPEATABLE.items() if known.is_public(name)}


def default_device() -> str:
    """Returns "gpu" if paddle has one, else "cpu"."""
    return "gpu" if paddle.device.cuda.device_count() else "cpu"


def peak_memory() -> dict[str, float]:
    """Returns the most memory that this process has had, in GB: on the host, and on its GPU."""
    import resource  # here: Windows has none, and is refused in words

    peak = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9}
    if paddle.device.get_device().startswith("gpu"):
        peak["gpu_memory_gb"] = paddle.device.cuda.max_memory_allocated() * 1e-9
    return peak
