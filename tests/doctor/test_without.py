"""With its folder taken away all trains, saves, continues and validates to the same bits."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small import ROOT, SMALL, given_to, make_library

# Python imports this file at each start, from the PYTHONPATH.
_WITHOUT = """
import sys
import sysconfig

sysconfig.get_path = lambda name, *args, _get=sysconfig.get_path: (
    {library!r} if name == "stdlib" else _get(name, *args)
)
if {is_refused}:

    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".doctor")[0] == "expbase" and ".doctor" in name:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Refusing())
"""


class Job:
    """An experiment in short, with the doctor or without."""

    def __init__(self, name: str, folder: Path, *, with_doctor: bool) -> None:
        self.run = folder / ("with" if with_doctor else "without")
        hook = folder / f"hook_{with_doctor}"
        hook.mkdir()
        text = _WITHOUT.format(library=str(folder / "library"), is_refused=not with_doctor)
        (hook / "sitecustomize.py").write_text(text)
        script = ROOT / "experiments" / name / "train.py"
        words = [*given_to(name, folder / "data"), "training.max_iteration=8"]
        self._command = [sys.executable, str(script), "--output", str(self.run), *words]
        self._env = {**os.environ, "PYTHONPATH": str(hook)}

    def train(self) -> str:
        """Runs it to its end; what it has said."""
        done = subprocess.run(
            self._command, env=self._env, stderr=subprocess.PIPE, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def train_and_kill(self) -> None:
        """Runs it, and kills it when it has saved its first checkpoint."""
        process = subprocess.Popen(
            self._command, env=self._env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "saved step-00000004" in line:
                os.killpg(process.pid, signal.SIGKILL)
                break
        process.communicate(timeout=60)

    def files(self) -> dict[str, object]:
        """The checksums of what the last checkpoint holds, and the results of validations."""
        manifest = json.loads((self.run / "checkpoints/step-00000008/manifest.json").read_text())
        lines = (self.run / "validations.jsonl").read_text().splitlines()
        results = [{**json.loads(line), "time": 0} for line in lines]
        return {"files": manifest["files"], "results": results}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_without_its_folder_an_experiment_goes_on_to_the_same_bits(
    tmp_path: Path, name: str
) -> None:
    if name == "cartpole":
        pytest.importorskip("gymnasium", "1.1", reason="it needs the extra `cartpole`")
    make_library(tmp_path / "library")
    (tmp_path / "data").mkdir()
    if name == "cifar":
        draw = runpy.run_path(str(ROOT / "experiments/cifar/shapes.py"))["write_archive"]
        draw(tmp_path / "data/shapes.tar.gz", 120)
    seen, alone = (Job(name, tmp_path, with_doctor=is_there) for is_there in (True, False))
    seen.train()
    assert (seen.run / "doctor.json").exists()
    alone.train_and_kill()
    assert "CONTINUING" in alone.train()
    assert not (alone.run / "doctor.json").exists()
    assert alone.files() == seen.files()
