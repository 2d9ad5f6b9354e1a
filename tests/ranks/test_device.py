"""The device of a process: one that is not there is refused in words."""

from __future__ import annotations

from typing import Any

import paddle
import pretend
import pytest

from expbase.config import ConfigError
from expbase.ranks.device import set_device


def test_a_gpu_that_is_not_there_is_refused_before_paddle_is_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(device: Any) -> None:
        raise SystemExit(255)  # as paddle 3.0 does

    monkeypatch.setattr(paddle, "set_device", ended)
    monkeypatch.setattr(paddle.device, "is_compiled_with_cuda", lambda: True)
    with pytest.raises(ConfigError, match=r"'gpu:1' given; expected cpu\b.*finds here\.$"):
        set_device("gpu:1", deterministic=False)


@pytest.mark.pretend
def test_what_is_expected_names_each_device_that_is_there() -> None:
    names = ", ".join(f"{pretend.NAME}:{number}" for number in range(4))
    text = f"--device: '{pretend.NAME}:4' given; expected cpu, {names}: what this paddle finds here"
    with pytest.raises(ConfigError) as caught:
        set_device(f"{pretend.NAME}:4", deterministic=False)
    assert str(caught.value) == f"{text}."
    with pytest.raises(ConfigError, match="invalid literal"):
        set_device(f"{pretend.NAME}:x", deterministic=False)
