"""What is added to an error before it is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import Tiny, trained

from expbase.checkpoint.layout import NonFiniteError


def made(kind: str, sparse: bool, grouped: bool, **options: Any) -> type[Tiny]:
    class Embedded(Tiny):
        """Has a table beside its model, and a loss that is not finite in iteration 2."""

        def setup_model(self) -> None:
            super().setup_model()
            self.net = paddle.nn.LayerDict({"table": paddle.nn.Embedding(5, 2, sparse=sparse)})
            given: Any = self.net.parameters()
            given = [{"params": given}] if grouped else given
            self.second = getattr(paddle.optimizer, kind)(0.1, parameters=given, **options)

        def train_batch(self) -> None:
            super().train_batch()
            self.net["table"](paddle.to_tensor([1, 2])).sum().backward()
            self.second.clear_grad()
            if self.iteration == 2:
                self.log(loss=float("nan"))

    return Embedded


@pytest.mark.parametrize(
    ("kind", "options", "is_told"),
    [
        ("Adam", {}, True),
        ("Adam", {"grouped": True}, True),
        ("Adam", {"lazy_mode": True}, False),
        ("Adam", {"sparse": False}, False),
        ("SGD", {}, False),
    ],
)
def test_a_sparse_embedding_under_adam_on_the_cpu_is_named_as_a_cause(
    tmp_path: Path, kind: str, options: dict[str, Any], is_told: bool
) -> None:
    """Bare paddle makes moments of 3e28 of it, at any rate."""
    kept = {"sparse": True, "grouped": False, **options}
    with pytest.raises(NonFiniteError):
        trained(made(kind, **kept), tmp_path)
    text = "self.net.table is an Embedding(sparse=True) that Adam steps on the CPU"
    assert (text in (tmp_path / "worker_0.log").read_text()) == is_told
