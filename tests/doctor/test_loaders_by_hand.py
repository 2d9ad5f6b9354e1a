"""A loader that is read by hand is named at its first batch, once; what we read is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle.nn.functional as F
import pytest
from paddle.io import DataLoader
from tiny import Points, Tiny, trained


class TwoLoaders(Tiny):
    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.second = DataLoader(Points(400), batch_size=4, shuffle=True)

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        self.backward(F.cross_entropy(self.model(points + self.others()), labels))
        self.step_optimizers()
        self.optimizer._learning_rate.step()
        self.log(nothing=0.0)

    def others(self) -> Any:
        return 0.0


class Kept(TwoLoaders):
    def on_train_begin(self) -> None:
        self.it = iter(self.second)

    def others(self) -> Any:
        return next(self.it)[0]


class Late(Kept):
    def on_train_begin(self) -> None:
        pass

    def others(self) -> Any:
        if self.iteration == 3:
            self.it = iter(self.second)
        return super().others() if self.iteration >= 3 else 0.0


class Zipped(Kept):
    def on_train_begin(self) -> None:
        self.it: Any = zip([*self.second], self.second, strict=True)

    def others(self) -> Any:
        return next(self.it)[1][0]


class Anew(TwoLoaders):
    def others(self) -> Any:
        return next(iter(self.second))[0]


class Shown(TwoLoaders):
    """Has read a batch before training, for a picture."""

    def setup_model(self) -> None:
        super().setup_model()
        self.shown = next(iter(self.second))


class OfItsOwn(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Wrapped(TwoLoaders):
    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.train_loader = OfItsOwn(Points(400), batch_size=4)


class WithWorkers(TwoLoaders):
    loader_options = {"num_workers": 1}  # noqa: RUF012


@pytest.mark.parametrize(
    ("experiment", "at", "name"),
    [(Kept, 1, "self.it"), (Late, 3, "self.it"), (Zipped, 1, "self.it"), (Anew, 1, "self.second"),
     (Shown, 0, ""), (Wrapped, 0, ""), (WithWorkers, 0, "")],
)  # fmt: skip
def test_a_loader_that_is_read_by_hand_is_named_at_its_first_batch(
    tmp_path: Path, experiment: Any, at: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(experiment, tmp_path, valid_interval=0, save_interval=0)
    err = capsys.readouterr().err
    assert err.count("is read by hand") == bool(name)
    if name:
        assert f"WARNING: [{at}] {name} is read by hand: paddle's thread makes its batches" in err
