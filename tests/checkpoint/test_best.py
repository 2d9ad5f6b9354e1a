"""validations.jsonl and the best checkpoint: what counts, what is kept, and what never wins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, make, run_of, saved, trained, validations

from expbase import ConfigError
from expbase.checkpoint import layout, storage
from expbase.checkpoint.best import best_of
from expbase.checkpoint.named import find_in_run
from expbase.tools.runs import read_run


def test_a_run_of_infinite_scores_has_no_best_one_and_goes_on(tmp_path: Path) -> None:
    class Unbounded(Tiny):
        def valid(self) -> dict[str, float]:
            return {"perplexity": float("inf")}

    trained(Unbounded, tmp_path / "run", monitor="perplexity", max_iteration=3)
    trained(Unbounded, tmp_path / "run", monitor="perplexity", max_iteration=6)
    assert best_of(tmp_path / "run") == []


def test_the_best_checkpoints_are_kept_and_what_is_not_finite_never_wins(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.9, 3: float("nan"), 4: float("inf"), 5: 0.9, 6: 0.2}

    class Scored(Tiny):
        def valid(self) -> dict[str, float]:
            return {"f1": scores[self.iteration]}

    options = {"valid_interval": 1, "save_interval": 1, "keep_last": 1, "monitor": "f1"}
    trained(Scored, tmp_path / "max", **options)
    assert saved(tmp_path / "max") == [2, 6]
    assert best_of(tmp_path / "max") == [(2, 0.9), (6, 0.2)]
    trained(Scored, tmp_path / "min", **options, monitor_mode="min", keep_best=2, keep_every=4)
    assert saved(tmp_path / "min") == [1, 4, 6]


def test_a_save_lists_the_checkpoints_once_however_many_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scored(Tiny):
        def valid(self) -> dict[str, float]:
            return {"rising": self.iteration, "falling": -self.iteration}

    counts: list[str] = []
    listdir = os.listdir

    def counted(path: Any) -> list[str]:
        counts.extend(["listed"] * str(path).endswith("checkpoints"))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    for monitor in ("rising", "falling"):
        options = {"valid_interval": 1, "save_interval": 1, "keep_every": 1, "monitor": monitor}
        had = []
        for number in (2, 5):
            counts.clear()
            trained(Scored, tmp_path / f"{monitor}{number}", max_iteration=number, **options)
            had.append(len(counts))
            assert saved(tmp_path / f"{monitor}{number}") == [*range(1, number + 1)]
        assert had[1] - had[0] == 3, monitor


@pytest.mark.parametrize("how", ["stop", "epoch", "save"])
def test_every_checkpoint_that_is_asked_for_may_be_the_best_one(tmp_path: Path, how: str) -> None:
    class Rising(Tiny):
        def valid(self) -> dict[str, float]:
            if how == "save":
                self.save()
            if how == "stop" and self.iteration == 3:
                self.stop()
            return {"accuracy": -abs(self.iteration - 3)}

    options: dict[str, Any] = {"valid_interval": 1, "save_interval": 0, "monitor": "accuracy"}
    if how == "epoch":
        Rising.size, options["save_every_epoch"] = 12, 1
    if how == "stop":
        options["save_interval"] = 100
    exp = trained(Rising, tmp_path, **options)
    assert run_of(exp).checkpointer.validations.best[0] == (3, 0)


def test_a_monitor_that_valid_does_not_give_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.monitor: 'acc' given; .* accuracy"):
        trained(Tiny, tmp_path / "run", monitor="acc", valid_interval=2)
    assert saved(tmp_path / "run") == [2]  # the checkpoint stands before the validation


def test_what_an_overridden_evaluate_returns_counts(tmp_path: Path) -> None:
    class Own(Tiny):
        def evaluate(self) -> dict[str, float]:
            return {**super().evaluate(), "fid": -float(self.iteration)}

    options = {"monitor": "fid", "valid_interval": 1, "save_interval": 1, "keep_last": 1}
    trained(Own, tmp_path / "run", **options)
    assert saved(tmp_path / "run") == [1, 6]


def test_scores_of_another_metric_do_not_count_and_both_names_of_one_do(tmp_path: Path) -> None:
    class Two(Tiny):
        def valid(self) -> dict[str, float]:
            return {"high": 100.0 - self.iteration, "low": float(self.iteration)}

    options = {"valid_interval": 2, "save_interval": 2}
    trained(Two, tmp_path, monitor="valid/high", max_iteration=2, **options)
    trained(Two, tmp_path, monitor="high", max_iteration=4, **options)
    assert best_of(tmp_path) == [(2, 98.0), (4, 96.0)]
    older, *newer = validations(tmp_path)
    (tmp_path / "validations.jsonl").write_text(
        "".join(
            f"{json.dumps(line)}\n" for line in ({**older, "monitor": "max valid/high"}, *newer)
        )
    )
    assert best_of(tmp_path) == [(2, 98.0), (4, 96.0)]
    trained(Two, tmp_path, monitor="low", max_iteration=6, **options)
    assert best_of(tmp_path) == [(6, 6.0), (4, 4.0)]


class Falling(Tiny):
    """The later the better: 2 to 8 are validated, and saved if there is room."""

    def valid(self) -> dict[str, float]:
        return {"score": float(self.iteration)}


EVERY_SECOND = {
    "save_interval": 2, "valid_interval": 2, "monitor": "score", "keep_last": 1, "max_iteration": 8
}  # fmt: skip


def test_what_could_not_be_written_is_not_the_best_and_the_best_that_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = storage.write_flushed

    class Full(Falling):
        def valid(self) -> dict[str, float]:
            return {"score": {2: 0.5, 4: 0.9, 6: 0.2, 8: 0.1}[self.iteration]}

    def full(path: Path, parts: Any) -> Any:
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, parts)

    monkeypatch.setattr(storage, "write_flushed", full)
    trained(Full, tmp_path / "run", **EVERY_SECOND)
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "[4] NO CHECKPOINT: " in log
    assert "No space left on device" in log
    assert "The newest good one is step-00000002, and training goes on." in log
    assert "run the same command" not in log
    assert "best        score=0.5 at iteration 2" in log
    names = [path.name for path in layout.listed(tmp_path / "run/checkpoints")]
    assert names == ["step-00000002", "step-00000008"]
    assert best_of(tmp_path / "run") == [(2, 0.5), (8, 0.1)]
    assert read_run(tmp_path / "run", "run").best_iteration == 2
    assert find_in_run(tmp_path / "run", "best").name == "step-00000002"
    exp = make(Full, tmp_path / "run", {"evaluate": "best"}, **EVERY_SECOND)
    exp.setup()
    exp.load_checkpoint("best")
    assert exp.iteration == 2
    exp.close()


def test_an_iteration_of_another_run_is_not_the_best_of_the_run_that_goes_on_from_it(
    tmp_path: Path,
) -> None:
    class Rising(Falling):
        def valid(self) -> dict[str, float]:
            return {"score": -float(self.iteration)}

    options = {**EVERY_SECOND, "keep_last": 0}
    trained(Rising, tmp_path / "one", **options)
    given = {"checkpoint_path": str(tmp_path / "one/4")}
    trained(Rising, tmp_path / "two", given, **options)
    # Iteration 4 is validated here, too, and saved here.
    assert [line["iteration"] for line in validations(tmp_path / "two")] == [4, 6, 8, 8]
    assert best_of(tmp_path / "two") == [(4, -4.0), (6, -6.0), (8, -8.0)]
    log = (tmp_path / "two/worker_0.log").read_text()
    assert "best        score=-4 at iteration 4" in log
