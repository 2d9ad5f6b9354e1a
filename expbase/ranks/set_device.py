"""Checks the device that this process is to train on, and sets it.

set_device("gpu", deterministic=True)
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle.base import core

from expbase.base.device import (
    default_device,
    is_custom,
    kind_of,
    number_of_devices,
    repeatable_flags,
)
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
            f"{kind_of(device)!r}: each process takes its own."
        )
    if _is_missing(device):
        raise ConfigError(_expected(device))
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{_expected(device)} ({str(error).strip()})") from error
    if deterministic:
        paddle.set_flags(repeatable_flags())


def _is_missing(device: str) -> bool:
    """Returns whether paddle knows this kind of device, and does not find this one."""
    # Asked for it, paddle 3.0 ends the process (paddle/fluid/pybind/place.cc, std::exit).
    kind, _, number = device.partition(":")
    is_built_for = {
        "gpu": paddle.device.is_compiled_with_cuda, "xpu": paddle.device.is_compiled_with_xpu,
    }.get(kind, lambda: is_custom(kind))  # fmt: skip
    is_one = not number or number.isdigit()
    return is_built_for() and is_one and int(number or 0) >= number_of_devices(kind)


def _expected(device: str) -> str:
    """Returns that there is no such device, and what --device may be."""
    kinds = ("gpu", "xpu", *core.get_all_custom_device_type())
    found = [f"{kind}:{n}" for kind in kinds for n in range(number_of_devices(kind))]
    names = ", ".join(["cpu", *found])
    return f"--device: {device!r} given; expected {names}: what this paddle finds here."
