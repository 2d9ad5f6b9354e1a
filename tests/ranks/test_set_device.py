"""The device of a process: one that is not there is refused in words; flags of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import paddle
import pretend
import pytest
from paddle.base import core
from tiny import DEVICE

from expbase.config import ConfigError
from expbase.ranks.set_device import set_device


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


# Of a build for GPUs; one for the CPU has two of them.
FLAGS = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_embedding_deterministic": 1,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_cublaslt_exhaustive_search_times": 0,
    "FLAGS_enable_blaslt_global_search": False,
    "FLAGS_use_autotune": False,
}


@pytest.fixture
def others() -> Iterator[dict[str, Any]]:
    """The flags that this build has, set to another value than deterministic kernels need."""
    there = [name for name in FLAGS if core.globals().is_public(name)]
    before = paddle.get_flags(there)
    changed = {name: type(before[name])(not FLAGS[name]) for name in there}
    paddle.set_flags(changed)
    yield changed
    paddle.set_flags(before)


def test_deterministic_sets_each_flag_that_this_paddle_has(
    others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(others) >= 2
    set_device(DEVICE, deterministic=False)
    assert paddle.get_flags([*others]) == others
    set_device(DEVICE, deterministic=True)
    assert paddle.get_flags([*others]) == {name: FLAGS[name] for name in others}
    asked: list[Any] = []
    monkeypatch.setattr(paddle, "set_flags", asked.append)
    monkeypatch.setattr(core, "globals", lambda: SimpleNamespace(is_public=FLAGS.__contains__))
    for deterministic in (False, True):
        set_device(DEVICE, deterministic=deterministic)
    assert asked == [FLAGS]
