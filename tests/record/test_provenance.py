"""What a start notes: the command, the code's place, the packages, the machine."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from repository import GIT, commit, git, new_repository
from tiny import DEVICE, TESTS, Tiny

import expbase.__main__
from expbase.record import provenance
from expbase.record.sources import Code

# Writes down what it would note.
SCRIPT = """
import json, pathlib
from tiny import Tiny
from expbase import default_argument_parser, main
from expbase.record import provenance
from expbase.record.sources import Code

def gathered(output, experiment):
    work_tree = provenance.look(experiment, Code.of(experiment)).keep(output)
    return provenance.gather(work_tree.facts, experiment, pathlib.Path.cwd())

class Noting(Tiny):
    def setup(self):
        facts = gathered(self.output_dir, type(self))
        pathlib.Path(f"facts_{self.rank}.json").write_text(json.dumps(facts))
    def run(self):
        pass
if __name__ == "__main__":
    main(Noting)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with deep/train.py, which this process looks like it runs."""
    folder = new_repository(tmp_path / "repository")
    (folder / "deep").mkdir()
    (folder / "deep/train.py").write_text(SCRIPT)
    (folder / ".gitignore").write_text("facts_*.json\n")
    commit(folder, "two")
    for name, value in GIT.items():
        monkeypatch.setenv(name, value)
    started(monkeypatch, folder, "deep/train.py")
    return folder


def started(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, script: str = "deep/train.py"
) -> None:
    """This process looks as if these words had been typed in a folder."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", os.path.join(folder, script), raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.chdir(folder)


OfScript = type("OfScript", (Tiny,), {"__module__": "__main__"})


def gathered(output: Path, experiment: type = OfScript) -> dict[str, Any]:
    """The facts, after a way through the ledger."""
    work_tree = provenance.look(experiment, Code.of(experiment)).keep(output)
    facts = provenance.gather(work_tree.facts, experiment, Path.cwd())
    return json.loads(json.dumps(facts))


# --- the command -------------------------------------------------------------------------------


def test_the_words_are_those_that_were_typed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-u", "deep/train.py", "--output", "runs/a b", "training.seed=1", "--opts", "a=/b"]
    started(monkeypatch, repository, *words)
    facts = gathered(repository.parent / "run")
    assert facts["command"] == words
    assert facts["git"]["commit"] == git(repository, "rev-parse", "HEAD")
    words = ["-m", "deep.train", "--output", "a"]
    started(monkeypatch, repository, *words)
    assert gathered(repository.parent / "run")["command"] == words


def test_without_a_repository_the_words_stay_as_they_are(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    words = [f"{tmp_path}/elsewhere/train.py", "--output", "a"]
    started(monkeypatch, tmp_path / "elsewhere", *words, script="train.py")
    facts = gathered(tmp_path / "run")
    assert facts["command"] == words
    assert facts["git"] == {"note": "not in a git repository"}


def test_without_a_script_there_is_no_command(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert gathered(tmp_path / "run")["command"] is None


def test_a_runner_notes_the_repository_of_its_experiment(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Tiny):
        pass

    Own.__module__ = "of_the_user"
    own = SimpleNamespace(__file__=str(repository / "deep/train.py"))
    monkeypatch.setitem(sys.modules, "of_the_user", own)  # type: ignore[arg-type]
    words = ["-m", "expbase", "run", f"{repository}/plan.yaml", "--output", "a"]
    started(monkeypatch, tmp_path, *words, script=expbase.__main__.__file__)
    facts = gathered(tmp_path / "run", Own)
    assert facts["command"] == words
    assert facts["git"]["branch"] == "trunk"


def noted(folder: Path, *command: str) -> dict[str, Any]:
    """What rank 0 notes when this command is given in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "FLAGS_benchmark": "0"}
    words = [sys.executable, "-W", "ignore", *command]
    # Not a fork, whose words in /proc would be pytest's.
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "facts_0.json").read_text())


@pytest.mark.long
def test_under_paddles_launcher_they_are_those_of_the_launcher(repository: Path) -> None:
    words = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    words += ["--log_dir", str(repository / "deep/logs"), "train.py", "--output", "a"]
    facts = noted(repository / "deep", *words)
    assert facts["command"] == ["-W", "ignore", *words]
    assert facts["environment"]["FLAGS_benchmark"] == "0"
    assert not [name for name in facts["environment"] if name.startswith(("PADDLE", "FLAGS_sel"))]
    assert (repository / "deep/logs/backup_env.0.json").exists()  # paddle writes all of it there
    assert (facts["git"]["dirty"], facts["git"]["state"]) == (False, None)


def test_in_a_rank_they_are_those_of_the_script_or_the_module(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, options = sys.modules["__main__"], ["--output", "a", "--nprocs", "2"]
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    monkeypatch.setattr(rank, "__spec__", None)
    assert gathered(repository.parent / "run")["command"] == ["train.py", *options]
    monkeypatch.setattr(rank, "__spec__", SimpleNamespace(name="deep.train"))
    assert gathered(repository.parent / "run")["command"] == ["-m", "deep.train", *options]


@pytest.mark.long
def test_with_nprocs_they_are_the_script_and_its_options(repository: Path) -> None:
    words = ["train.py", "--output", "a", "--device", "cpu", "--nprocs", "2"]
    assert noted(repository / "deep", *words)["command"] == words


@pytest.mark.long
def test_with_nprocs_a_module_stays_one(repository: Path) -> None:
    (repository / "deep/facts.py").write_text("from . import train\ntrain.main(train.Noting)\n")
    words = ["-m", "deep.facts", "--output", "a", "--device", "cpu", "--nprocs", "2"]
    facts = noted(repository, *words)
    assert (facts["command"], facts["script"]) == (words, 1)


def test_of_the_environment_only_what_steers_training_is_noted(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "known to nobody")
    monkeypatch.setenv("FLAGS_selected_gpus", "1")  # paddle's launcher: another one for each rank
    wanted = {"FLAGS_check_nan_inf": "0", "NCCL_DEBUG": "INFO"}
    wanted |= {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    facts = gathered(tmp_path / "run")
    assert wanted.items() <= facts["environment"].items()
    assert all(name in wanted or name.startswith("FLAGS_") for name in facts["environment"])
    assert "FLAGS_selected_gpus" not in facts["environment"]
    assert "known to nobody" not in json.dumps(facts)


def test_each_package_is_noted_with_its_version() -> None:
    def key(name: str) -> str:
        return re.sub("[-_.]+", "-", name).lower()

    noted = {key(name): version for name, version in provenance.packages().items()}
    installed = [*importlib.metadata.distributions()]
    assert any("_" in str(distribution._path) for distribution in installed)
    assert noted.keys() == {key(distribution.metadata["Name"]) for distribution in installed}
    for name, version in noted.items():
        assert version == importlib.metadata.version(name), name


def test_packages_and_versions_are_noted(repository: Path, tmp_path: Path) -> None:
    facts = gathered(tmp_path / "run")
    assert facts["packages"]["numpy"] == importlib.metadata.version("numpy")
    assert any(name.startswith("paddlepaddle") for name in facts["packages"])
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["device"].startswith(DEVICE)
    assert facts["pid"] == os.getpid()


def test_a_gpu_is_noted_with_its_model(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is none here: what paddle says is in its documentation.
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:1")
    monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda device: f"Name of {device}")
    assert gathered(tmp_path / "run")["device"] == "gpu:1 (Name of gpu:1)"
