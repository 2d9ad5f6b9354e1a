"""The proofs of tests/proofs in short; by themselves they take minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pretend
import pytest
from forks import LONG_SECONDS
from tiny import TESTS, run_script, same_bits

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "proofs"))


def test_a_run_that_was_killed_over_and_over_ends_like_one_that_was_not(tmp_path: Path) -> None:
    from chaos import SETUPS, chaos

    kinds = ["saving", "validating", "starting"]
    report = chaos(tmp_path, kinds=kinds, seed=0, iterations=60, setups=SETUPS[:1])
    assert report.failures == []
    assert report.survived == len(kinds)
    assert report.exact == report.finished > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_stopped_anywhere_ends_like_one_that_was_not(
    tmp_path: Path, workers: int
) -> None:
    from positions import prove

    prove(tmp_path, workers, positions=[1, 20, 21])
    assert (tmp_path / "verdicts").read_text() == "+++"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("workers", "exact"), ("another schedule", "refused"), ("not shuffled any more", "refused")],
)
def test_a_change_between_two_starts_is_exact_refused_or_told(
    tmp_path: Path, name: str, expected: str
) -> None:
    from matrix import CASES, outcome

    first, second, table = CASES[name]
    assert outcome(first, second, tmp_path)[0] == table == expected


def test_of_an_epoch_that_is_changed_in_its_middle_each_sample_is_seen_once() -> None:
    from samples import prove

    assert prove(150, seed=0) == 150


def test_the_first_process_of_a_container_is_stopped_in_setup_and_in_training_and_goes_on(
    tmp_path: Path,
) -> None:
    from clusters import Proof, python, sigterm_while_it_starts, terminated
    from players import namespaces

    if not namespaces():
        pytest.skip("no pid namespace may be made here")
    proof = Proof(tmp_path, rounds=1, iterations=60)
    sigterm_while_it_starts(proof, ranks=1)
    terminated(proof, 1, 0, python(), 143)


def test_two_machines_with_disks_of_their_own_train_to_the_bits_of_one(
    tmp_path: Path, forked: None
) -> None:
    from nodes import exact, may_make_nodes, two_nodes

    if not may_make_nodes():
        pytest.skip("network namespaces may not be made here")
    with two_nodes(tmp_path) as nodes:
        assert exact(tmp_path, nodes, parts=[20]) == []


def test_damaged_and_foreign_files_are_refused_in_a_line(forked: None) -> None:
    result = run_script(TESTS / "proofs/damages.py", "--count", "4", "--seed", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    formats = re.findall(r"(\w+): 4 of 4: ", result.stdout)
    of_a_run = ["checkpoint", "shown", "started", "listed"]
    assert formats == ["pdparams", "safetensors", *of_a_run, "index"]


@pytest.mark.parametrize("device", ["cpu", pretend.NAME])
def test_what_is_run_by_whoever_has_a_gpu_holds_here(device: str) -> None:
    if device == pretend.NAME and pretend.folder() is None:
        pytest.skip("no g++")
    result = run_script(TESTS / "proofs/device.py", device, "--short")
    assert result.returncode == 0, result.stdout + result.stderr
    not_here = re.findall(r"^(\w+) +not here", result.stdout, re.MULTILINE)
    assert not_here == (["amp", "waits"] if device == "cpu" else [])
    assert result.stdout.endswith(f"{11 - len(not_here)} ok, 0 FAILED, {len(not_here)} not here\n")


def test_the_calls_of_cuda_that_wait_are_counted_in_a_trace_of_paddle_s_profiler() -> None:
    from on_device import gpu_waits

    calls = ["cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "cudaMemcpyAsync_v3020"]
    calls += ["cudaMemcpy_v3020", "cudaDeviceSynchronize_v3020"]
    assert gpu_waits("".join(f'"name": "{call}[0.010 ms]", "pid": 1\n' for call in calls)) == 3


def test_a_script_as_other_people_write_them_continues_without_a_warning(forked: None) -> None:
    result = run_script(TESTS / "proofs/manners.py", "--only", "tracked")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(pretend.folder() is None, reason="no g++")
def test_fleets_tensor_parallel_continues_to_the_same_bits(tmp_path: Path) -> None:
    def train(run: Path) -> str:
        words = ["--device", pretend.NAME, "--nprocs", "2", "--output", str(run)]
        training = {"max_iteration": 6, "save_interval": 2, "log_interval": 1}
        words += [f"training.{key}={value}" for key, value in training.items()]
        command = [sys.executable, str(TESTS / "proofs/tensor_parallel.py"), *words]
        environment = {**os.environ, **pretend.environment(), "PYTHONWARNINGS": "ignore"}
        how = {"env": environment, "timeout": LONG_SECONDS, "capture_output": True}
        result = subprocess.run(command, text=True, **how)
        assert result.returncode == 0, result.stderr
        return result.stderr

    text = train(tmp_path / "whole")
    assert "differs between the ranks" not in text  # what all have whole
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for iteration in (4, 6):
        shutil.rmtree(tmp_path / f"parts/checkpoints/step-{iteration:08}")
    text = train(tmp_path / "parts")
    assert "from step-00000002" in text
    assert "not exact" not in text
    same_bits(*(tmp_path / run / "checkpoints/step-00000006" for run in ("whole", "parts")))


@pytest.mark.usefixtures("forked")
def test_of_each_kind_of_fraud_among_runs_one_is_named_and_no_honest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from judged import KINDS, prove

    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    named, honest, _ = prove(tmp_path / "task", len(KINDS) + 2, len(KINDS), seed=0)
    assert (named, honest) == (len(KINDS), 0)
