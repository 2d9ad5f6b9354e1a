"""Which device this process trains on.

set_device("gpu", deterministic=True)
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist

from expbase.base.device import default_device, repeatable_flags
from expbase.config import ConfigError


def set_device(device: str | None, *, deterministic: bool) -> None:
    """Makes paddle use a device.

    Args:
        device: "cpu", "gpu", "gpu:1" or another one of paddle's; None: the one that paddle
            takes by itself.
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
