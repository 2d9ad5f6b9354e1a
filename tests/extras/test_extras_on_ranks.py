"""Mixins, components and runs from YAML on two ranks: one start for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_yaml_runner import YAML, make_workspace, stage_lines
from tiny import run_ranks, same_bits

SCRIPT = """
import json
from pathlib import Path

from paddle.io import DataLoader
from test_components import Several
from test_mixins import scored, stopping, trained

from expbase.__main__ import main

folder = Path(__file__).parent




class Split(scored(1, 2, 2, 2)):
    def valid(self):
        results = super().valid()
        return results if self.rank == 0 else {"score": float(self.iteration)}  # ever better


class Predicting(Several):
    def on_train_end(self):
        reader = self.readers["one"].clone("predict")
        reader.register_with(self.unwrap(self.model))
        self.results = self.predict_head("one", DataLoader(reader, batch_size=5), self.output_dir)


if __name__ == "__main__":
    stopped = trained(Split, folder / "stopped", **{**stopping(), "max_iteration": 100000})
    options = {"valid_interval": 0, "save_interval": 6}
    whole = trained(Predicting, folder / "whole", max_iteration=12, **options)
    trained(Several, folder / "parts", max_iteration=6, **options)
    parts = trained(Several, folder / "parts", max_iteration=12, **options)
    found = {
        "stopped": [stopped.iteration, stopped.early_stopping["best"]],
        "drawn": [whole.drawn, parts.drawn],
        "predicted": len(whole.results),
    }
    (folder / f"rank_{stopped.rank}.json").write_text(json.dumps(found))
    assert main(["run", str(folder / "c.yaml")]) == 0
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script on two ranks."""
    folder = make_workspace(tmp_path_factory.mktemp("launched"))
    infer = "- {name: look, class: infer, init_model_path: runs/first}\n"
    (folder / "c.yaml").write_text(YAML + stage_lines("startup", "instance") + infer)
    (folder / "go.py").write_text(SCRIPT)
    for rank in run_ranks([[str(folder / "go.py")]] * 2):
        assert rank.returncode == 0, rank.stderr
    return folder


def found(launched: Path, name: str) -> list[object]:
    """What both ranks found."""
    texts = [(launched / f"rank_{rank}.json").read_text() for rank in (0, 1)]
    return [json.loads(text)[name] for text in texts]


@pytest.mark.long
def test_early_stopping_ends_all_ranks_at_the_same_iteration(launched: Path) -> None:
    one, two = found(launched, "stopped")
    assert one == two == [4, 2]


@pytest.mark.long
def test_the_ranks_draw_the_same_heads_and_are_continued(launched: Path) -> None:
    (whole, parts), others = found(launched, "drawn")
    assert [whole, parts] == others
    assert whole == parts
    assert set(whole) == {"one", "other"}
    same_bits(*(launched / f / "checkpoints/step-00000012" for f in ("whole", "parts")))
    assert "differ between the ranks" not in (launched / "whole/worker_0.log").read_text()


@pytest.mark.long
def test_the_results_of_predict_head_are_those_of_all_ranks(launched: Path) -> None:
    assert found(launched, "predicted") == [24, 24]
    assert len((launched / "whole/one.predict.jsonl").read_text().splitlines()) == 24


@pytest.mark.long
def test_runs_from_yaml_run_on_ranks_that_others_have_started(launched: Path) -> None:
    log = (launched / "runs/first/worker_1.log").read_text()
    assert log.count("stage startup: ") == log.count("[4] FINISHED") == 1
    (line,) = (launched / "runs/look/results.jsonl").read_text().splitlines()
    assert json.loads(line)["iteration"] == 4
