"""The device that paddle takes by itself, and how many there are."""

from __future__ import annotations

import os

import paddle
import pytest
from paddle.base import core
from tiny import DEVICE

from expbase.base import device


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"gpu": 2, "xpu": 0, "npu": 8}, "gpu"),
        ({"gpu": 0, "xpu": 1, "npu": 0}, "xpu"),
        ({"gpu": 0, "xpu": 0, "npu": 8, "other": 8}, "npu"),
        ({"gpu": 0, "xpu": 0, "npu": 0}, "cpu"),  # a plug-in without a device
        ({"gpu": 0, "xpu": 0}, "cpu"),
    ],
)
def test_the_default_device_is_the_one_that_paddle_takes(
    there: dict[str, int], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_ins = [kind for kind in there if kind not in ("gpu", "xpu")]
    monkeypatch.setattr(core, "get_all_custom_device_type", lambda: plug_ins)
    monkeypatch.setattr(core, "get_custom_device_count", there.__getitem__)
    monkeypatch.setattr(paddle.device.xpu, "device_count", lambda: there["xpu"])
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: there["gpu"])
    assert device.default_device() == taken


@pytest.mark.pretend
def test_of_a_custom_device_there_are_as_many_as_its_plug_in_says() -> None:
    assert device.default_device() == DEVICE
    assert device.number_of_devices(DEVICE) == int(os.environ.get("PRETEND_DEVICES", "4"))
