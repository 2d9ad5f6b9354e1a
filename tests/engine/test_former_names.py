"""Names that ExperimentBase had: an error says where each is now, and nothing takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, make, trained

from expbase.engine.former_names import FORMER, overrides_nobody_calls
from expbase.engine.internals import Internals


def test_a_name_that_left_says_where_it_is_now(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path)
    for name, where in FORMER.items():
        with pytest.raises(AttributeError) as caught:
            getattr(exp, name)
        assert str(caught.value) == f"'Tiny' object has no attribute {name!r}. {where}"
        if "internals" in where:
            assert hasattr(Internals, name)
    assert not hasattr(exp, "phase")


def test_a_name_that_left_is_free_for_the_user(tmp_path: Path) -> None:
    class Own(Tiny):
        phase = "warm"

        @property
        def stepping(self) -> Any:
            return self.forgotten  # type: ignore[attr-defined]

        def train_batch(self) -> None:
            self.share = self.iteration  # type: ignore[attr-defined]
            super().train_batch()

    exp: Any = trained(Own, tmp_path / "run", max_iteration=3)
    assert (exp.share, exp.phase, exp.internals.share) == (3, "warm", 0)
    with pytest.raises(AttributeError, match=r"'Own' object has no attribute 'forgotten'$"):
        _ = exp.stepping
    resumed: Any = make(Own, tmp_path / "run", max_iteration=3)
    resumed.setup()
    with resumed.internals.closing():
        resumed.resume_or_load()
        assert resumed.share == 3


def test_an_override_that_setup_does_not_call_any_more_is_an_error(tmp_path: Path) -> None:
    class Own(Tiny):
        def setup_device(self) -> None: ...

    with pytest.raises(TypeError, match=r"^Own\.setup_device: is no method .*expected --device, o"):
        make(Own, tmp_path)


def test_an_override_that_nothing_calls_any_more_is_told(tmp_path: Path) -> None:
    class Own(Tiny):
        def evaluating(self) -> Any:
            return self.internals.evaluating()

        def fire(self) -> None:
            """One of the user's, which he calls."""

        def on_train_batch_end(self) -> None:
            self.fire()

    trained(Own, tmp_path / "run", max_iteration=1)
    text = "WARNING: Own.evaluating: overrides nothing any more, and expbase does not call it."
    assert text in (tmp_path / "run/worker_0.log").read_text()
    assert len([*overrides_nobody_calls(Own)]) == 1
    assert not [*overrides_nobody_calls(Tiny)]
