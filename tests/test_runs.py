"""What this version does with the runs of earlier ones, in tests/runs: those of 1.0 and later open
with everything, of earlier ones the weights are loaded, and the rest is refused in one line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import forks
import pytest
from tiny import TESTS

from expbase.__main__ import main
from expbase.base.exit_codes import ExitCode
from expbase.record.visualizer import FILE_NAME
from expbase.tools.board import record_files, update
from expbase.tools.plot import curves

FOLDER = TESTS / "runs"
# Of the code as it was; where another paddle runs, that is said, and the bits are the same still.
_OF_MACHINE = re.compile("not exact: (paddle|threads): ")


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_runs", FOLDER / "write.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WRITE = _script()
CHANGELOG = (TESTS.parent / "CHANGELOG.md").read_text()
EXPECTED: dict[tuple[str, str], dict[str, Any]] = {
    (path.parent.name, name): of_run
    for path in sorted(FOLDER.glob(f"*/{WRITE.EXPECTED}"))
    for name, of_run in json.loads(path.read_text()).items()
}
OPEN = [pair for pair in EXPECTED if not pair[0].startswith("0.")]
REFUSED = [pair for pair in EXPECTED if pair not in OPEN]
Capture = pytest.CaptureFixture[str]
of_open = pytest.mark.parametrize(("version", "name"), OPEN)
# All are listed, shown and continued; what a start does beside that depends on no kind, and files
# as the newest version has them are what each other test reads.
of_one = pytest.mark.parametrize(
    ("version", "name"),
    [pytest.param(*pair, marks=[pytest.mark.long] * (pair != OPEN[0])) for pair in OPEN],
)
of_refused = pytest.mark.parametrize(("version", "name"), REFUSED)


@pytest.fixture(autouse=True)
def expected(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What is expected of the run; a copy of all runs of its version is the working directory."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "version" not in params:
        return {}
    folder = shutil.copytree(FOLDER / params["version"], tmp_path / "runs")
    monkeypatch.chdir(folder)
    return EXPECTED[params["version"], params["name"]]


def trained(expected: dict[str, Any], *words: str, code: int = 0) -> tuple[str, str]:
    """Gives the run's command other options; returns what it says on stdout and stderr."""
    command = [sys.executable, "train.py", "--device=cpu", *expected["words"], *words]
    result = forks.run(command, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def weights(said: Sequence[str]) -> str:
    """The weights with which a run has ended; it continued without a loss."""
    out, err = said
    lines = [line for line in err.splitlines() if "not exact" in line or "WARNING" in line]
    assert not [line for line in lines if not _OF_MACHINE.search(line)]
    return re.findall(r"^weights (\w+)$", out, re.MULTILINE)[0]


def listed(name: str, capsys: Capture) -> dict[str, Any]:
    """What `ls` says of a run."""
    assert main(["ls", "--json"]) == 0
    found = map(json.loads, capsys.readouterr().out.splitlines())
    return next(row for row in found if row["name"] == name)


# --- from 1.0 on -----------------------------------------------------------------------------


def test_each_version_from_1_0_on_has_its_runs() -> None:
    released = re.findall(r"^## (\d+\.\d+)\.\d+ \(\d", CHANGELOG, re.MULTILINE)
    assert {one for one in released if int(one.partition(".")[0])} <= {v for v, _ in EXPECTED}
    assert {name for version, name in OPEN if version == "1.0"} == {*WRITE.KINDS}
    assert REFUSED


@of_open
def test_ls_lists_it(version: str, name: str, expected: dict[str, Any], capsys: Capture) -> None:
    run = listed(name, capsys)
    assert run["state"] == "stopped"
    assert run["experiment"] == "Everything"
    assert run["iteration"] == expected["iteration"]
    assert run["best"] == expected["best"]["error"]
    assert run["best_iteration"] == expected["best"]["iteration"]
    assert {"train/loss", "train/lr", "valid/error"} <= {*run["metrics"]}
    assert run["config"]["training.max_iteration"] == run["max_iteration"] == 12
    assert run["note"] == ""
    assert main(["ls"]) == 0
    assert name in capsys.readouterr().out


@of_open
def test_show_tells_how_it_was_made(
    version: str, name: str, expected: dict[str, Any], capsys: Capture
) -> None:
    assert main(["show", name]) == 0
    said = capsys.readouterr().out
    assert f"state: stopped, {expected['iteration']} iterations of 12\n" in said
    assert "ended: it was asked for, exit code 0\n" in said
    assert f"command: python train.py --device cpu --output {name} " in said
    assert "damaged" not in said
    assert main(["show", f"{name}/best"]) == 0
    said = capsys.readouterr().out
    assert f"iteration: {expected['best']['iteration']}\n" in said
    assert f"versions: expbase {version}." in said
    assert "config.training.max_iteration: 12\n" in said


@of_one
def test_plot_draws_its_curves(version: str, name: str, expected: dict[str, Any]) -> None:
    assert main(["plot", name, "--output", "curves.png"]) == 0
    assert [*curves(Path(name))["train/loss"]] == [*range(1, expected["iteration"] + 1)]


@of_open
def test_the_board_reads_its_record(version: str, name: str, expected: dict[str, Any]) -> None:
    from visualdl import LogReader

    files = record_files(Path(name), Path("copies"))
    assert update(files, {})
    [copy] = files
    assert copy.read_bytes() == Path(name, FILE_NAME).read_bytes()
    records = LogReader(file_path=str(copy)).get_data("scalar", "train/loss")
    assert [record.id for record in records] == [*range(1, expected["iteration"] + 1)]


@of_one
def test_its_best_checkpoint_is_evaluated(
    version: str, name: str, expected: dict[str, Any]
) -> None:
    out, _ = trained(expected, "--output", name, "--evaluate", "best")
    assert json.loads(out) == expected["best"]


@of_one
def test_its_best_checkpoint_is_exported(version: str, name: str, expected: dict[str, Any]) -> None:
    shutil.rmtree(Path(name, "export"), ignore_errors=True)
    out, _ = trained(expected, "--output", name, "--export", "best")
    assert Path(f"{json.loads(out)['exported']}.pdiparams").is_file()


@of_open
def test_it_is_continued_to_the_same_bits(
    version: str, name: str, expected: dict[str, Any]
) -> None:
    said = trained(expected, "--output", name)
    assert f"CONTINUING the run in {name} from step-{expected['iteration']:08}" in said[1]
    assert weights(said) == expected["weights"]
    lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "train/loss" in line] == [*range(1, 13)]


@of_one
def test_another_run_continues_an_earlier_checkpoint_to_the_same_bits(
    version: str, name: str, expected: dict[str, Any]
) -> None:
    assert expected["best"]["iteration"] < expected["iteration"]
    words = ["--output", "other", "--checkpoint_path", f"{name}/best"]
    assert weights(trained(expected, *words)) == expected["weights"]


@of_one
def test_another_run_begins_with_its_weights(
    version: str, name: str, expected: dict[str, Any]
) -> None:
    words = ["--output", "other", "training.max_iteration=1"]
    _, err = trained(expected, *words, "--init_model_path", f"{name}/best")
    checkpoint = f"{name}/checkpoints/step-{expected['best']['iteration']:08}"
    assert re.search(f"loaded model from .*{checkpoint}: 4 fitted\n", err)


@of_one
def test_it_is_reproduced_by_its_own_code(
    version: str, name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    forked: None, capfd: Capture,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    words, parts = [], f"1 to {expected['iteration']} in "
    if version == "1.0":  # whose averages of the weights do not warm up; when continued, they go on
        assert main(["reproduce", name, "--from", "0", "--to", "3"]) == 1
        assert "valid/error at iteration 3 differs" in capfd.readouterr().out
        words, parts = ["--from", "3"], f"4 to {expected['iteration']} of "
    code = main(["reproduce", name, *words])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    last = out.splitlines()[-1]
    assert last.startswith(f"reproduced: iterations {parts}")
    assert "the same bits" in last


# --- before 1.0 ------------------------------------------------------------------------------


@of_refused
def test_ls_lists_an_older_one_as_what_it_was(
    version: str, name: str, expected: dict[str, Any], capsys: Capture
) -> None:
    test_ls_lists_it(version, name, expected, capsys)


@of_refused
def test_another_run_begins_with_the_weights_of_an_older_one(
    version: str, name: str, expected: dict[str, Any]
) -> None:
    test_another_run_begins_with_its_weights(version, name, expected)


@of_refused
@pytest.mark.parametrize(
    "words",
    [
        ("--output", "one"),
        ("--output", "other", "--checkpoint_path", "one/last"),
        ("--output", "one", "--evaluate", "best"),
        ("--output", "one", "--export", "best"),
    ],
    ids=["resume", "checkpoint_path", "evaluate", "export"],
)
def test_an_older_one_is_refused_in_a_line_that_says_what_to_do(
    version: str, name: str, expected: dict[str, Any], words: Sequence[str]
) -> None:
    files = [path for path in Path(name).rglob("*") if path.is_file() and path.suffix != ".log"]
    before = [path.read_bytes() for path in files]
    _, err = trained(expected, *words, code=ExitCode.MISTAKE)
    lines = [line for line in err.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert re.search(
        rf"step-\d+: has format 14, and this version reads \d+: finish the run with expbase "
        rf"{re.escape(version)}\.0, or begin another one from its weights: --init_model_path\.$",
        lines[0],
    )
    assert "Traceback" not in err
    assert [path.read_bytes() for path in files] == before


@of_refused
def test_an_older_one_is_not_reproduced_and_shown_as_what_it_was(
    version: str, name: str, expected: dict[str, Any], capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["reproduce", name])
    assert end.value.code == ExitCode.MISTAKE
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(r"reproduce: error: .*/step-\d+: has format 14, and this version ", line)
    assert main(["show", name]) == 0
    assert "state: stopped, 5 iterations of 12\n" in capsys.readouterr().out


# --- the script that writes them -------------------------------------------------------------


def test_no_run_names_the_machine_that_made_it_or_is_large() -> None:
    for version in sorted({version for version, _ in EXPECTED}):
        assert WRITE.problems(FOLDER / version, ["/tmp", "/home", "/root", "/Users"]) == []


def test_a_machines_name_is_found_as_a_word(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("on vm: 3")
    (tmp_path / "b.log").write_text("svm, /datasets")
    assert WRITE.problems(tmp_path, ["vm", "/data"]) == [f"{tmp_path}/a.log: holds 'vm'"]


def test_runs_of_a_released_version_are_not_written_again() -> None:
    changelog = "## 1.1.1 (unreleased)\n## 1.1.0\n## 1.0.0 (unreleased)\n"
    assert WRITE.is_released("1.1", changelog)
    assert not WRITE.is_released("1.0", changelog)
    assert not WRITE.is_released("1.2", changelog)


@pytest.mark.long
def test_the_runs_of_this_version_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    WRITE.write(folder, TESTS.parent, WRITE.KINDS)
    assert {path.name for path in folder.iterdir()} == {"train.py", WRITE.EXPECTED, *WRITE.KINDS}
    packages = json.loads((folder / "one/ledger.jsonl").read_text().splitlines()[0])["packages"]
    assert "pytest" not in packages
