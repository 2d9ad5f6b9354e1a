"""What a run was, told to a person, and made again in a fresh clone."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import TESTS, Tiny, make, same_bits, trained

from expbase.__main__ import main
from expbase.tools import show

GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_NAME": "Nobody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "nobody@example.org" for who in ("AUTHOR", "COMMITTER")},
}
SCRIPT = """
from tiny import Tiny
from expbase import main


class Experiment(Tiny):
    batch_size = 4


if __name__ == "__main__":
    main(Experiment)
"""
CHANGED = SCRIPT.replace("= 4", "= other.size").replace("from tiny", "import other\nfrom tiny")


class Failing(Tiny):
    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 3:
            raise ArithmeticError("no such number")


def run_in(
    folder: Path, *command: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **GIT, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        command, cwd=folder, env=variables | (environment or {}), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def shown(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["show", str(run), *words]) == 0
    return capsys.readouterr().out


def refused(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["show", str(run), *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def rewrite(run: Path, *kept: dict[str, Any]) -> None:
    (run / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, and in it a run: begun with clean code, continued twice with other code."""
    folder = tmp_path_factory.mktemp("told") / "repository"
    (folder / "deep").mkdir(parents=True)
    script = folder / "deep/train.py"
    run_in(folder, "git", "init", "--quiet", "--initial-branch", "trunk")
    script.write_text(SCRIPT)
    run_in(folder, "git", "add", ".")
    run_in(folder, "git", "commit", "--quiet", "-m", "one")
    words = ["train.py", "--output", "runs/a b", "--device", "cpu", "training.valid_interval=1"]
    words += ["training.save_interval=1", "training.keep_last=0", "training.max_iteration="]
    for end in (2, 4, 6):
        command = [sys.executable, *words[:-1], f"{words[-1]}{end}"]
        run_in(script.parent, *command, environment={"FLAGS_benchmark": "0"} if end > 2 else None)
        script.write_text(CHANGED)
        (script.parent / "other.py").write_text("size = 5\n")
    return folder


@pytest.fixture
def told(repository: Path) -> Path:
    return repository / "deep/runs/a b"


def test_each_start_of_a_script_notes_its_code_and_a_state_is_saved_once(told: Path) -> None:
    codes = [record["git"] for record in records(told) if record["event"] == "start"]
    assert [code["dirty"] for code in codes] == [False, True, True]
    assert codes[0]["commit"] == codes[1]["commit"]
    assert codes[1] == codes[2]
    assert [path.name for path in (told / "sources").iterdir()] == [codes[1]["state"]]
    files = [path for path in (told / "sources").rglob("*") if path.is_file()]
    names = {str(path.relative_to(told / "sources" / codes[1]["state"])) for path in files}
    assert names == {"changes.diff", "untracked/deep/other.py"}


def test_the_story_of_a_run_is_told_at_80_columns(
    told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = records(told)[0]
    state = records(told)[2]["git"]["state"]
    text = shown(told, capsys)
    body = text.split("\n", 1)[1]
    assert max(map(len, body.splitlines())) <= 80
    plain = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, \d:\d\d:\d\d", "WHEN", body)
    commit = f"{start['git']['commit'][:7]} (trunk)"
    lines = plain.splitlines()
    assert lines[0] == "state       finished, 6 iterations of 6"
    assert lines[2].startswith("checkpoints step-00000004, step-00000005, step-00000006 and 3")
    sections = plain.split("\n\n")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "session 1 of 3: WHEN, iterations 0 to 2",
        "session 2 of 3: WHEN, iterations 2 to 4",
        "session 3 of 3: WHEN, iterations 4 to 6",
    ]
    assert f"code        {commit}\n" in sections[0]
    assert "command     python train.py --output 'runs/a b' --device cpu \\\n" in sections[0]
    assert "in          deep" in sections[0]
    assert "environment" not in sections[0]
    assert "resumed     step-00000002\n" in sections[1]
    assert f"code        {commit} with changes: sources/{state}\n" in sections[1]
    assert "config      training.max_iteration: 2 → 4\n" in sections[1]
    assert "environment FLAGS_benchmark: none → 0\n" in sections[1]
    assert "environment" not in sections[2]
    assert "packages" not in plain
    assert all("ended       finished\n" in section for section in sections)
    assert f"on          {start['host']}: 1 process, cpu" in sections[0]


def test_json_holds_all_of_it(told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(shown(told, capsys, "--json"))
    assert facts["run"]["state"] == "finished"
    assert facts["run"]["commit"] == records(told)[0]["git"]["commit"]
    assert facts["config"]["training.max_iteration"] == 6
    assert facts["checkpoints"] == [f"step-{number:08d}" for number in range(1, 7)]
    assert [(s["start"], s["end"]) for s in facts["sessions"]] == [
        tuple(records(told)[place : place + 2]) for place in (0, 2, 4)
    ]


def clone_and_run(repository: Path, folder: Path, text: str) -> Path:
    """Runs a script in a fresh clone; a stand-in for python only notes what pip is asked for."""
    run_in(folder, "git", "clone", "--quiet", str(repository), "clone")
    (folder / "bin").mkdir()
    pip = f'[ "$1 $2" = "-m pip" ] && exec cat > {folder}/wanted\n'
    python = f'#!/bin/sh\n{pip}exec {shlex.quote(sys.executable)} "$@"\n'
    (folder / "bin/python").write_text(python)
    (folder / "bin/python").chmod(0o755)
    (folder / "again.sh").write_text(text)
    path = {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    run_in(folder / "clone", "sh", str(folder / "again.sh"), environment=path)
    return folder / "clone/deep/runs/a b-again"


def test_the_first_session_is_made_again_in_a_fresh_clone(
    repository: Path, told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(told, capsys, "--reproduce")
    assert "Session 2 continued it with another config, code, command, environment:" in text
    again = clone_and_run(repository, tmp_path, text)
    same_bits(told / "checkpoints/step-00000002", again / "checkpoints/step-00000002")
    packages = records(told)[0]["packages"]
    wanted = dict(line.split("==") for line in (tmp_path / "wanted").read_text().splitlines())
    assert wanted == {
        n: v for n, v in packages.items() if n not in records(told)[0]["local_packages"]
    }


def test_a_later_session_is_made_again_with_its_changes_from_its_checkpoint(
    repository: Path, told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(told, capsys, "--reproduce", "2")
    assert "export FLAGS_benchmark=0\n" in text
    again = clone_and_run(repository, tmp_path, text)
    same_bits(told / "checkpoints/step-00000004", again / "checkpoints/step-00000004")
    code, before = records(again)[0]["git"], records(told)[2]["git"]
    assert {**code, "branch": "trunk"} == before
    assert records(again)[0]["iteration"] == 2


def test_how_sessions_ended_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with pytest.raises(ArithmeticError):
        trained(Failing, run, monitor="accuracy", save_interval=3, valid_interval=1)
    start, end = records(run)
    orphan = {
        "event": "end",
        "time": end["time"],
        "iteration": 0,
        "reason": "rank 1",
        "exit_code": 1,
    }
    rewrite(run, start, end, start, start, {**end, "exit_code": 143, "reason": "SIGTERM"}, orphan)
    text = shown(run, capsys)
    assert "ended       ArithmeticError('no such number'), exit code 1\n" in text
    assert re.search(r"session 2 of 4: .*, from iteration 0, killed: it noted no end\n", text)
    assert "ended       SIGTERM, exit code 143\n" in text
    assert re.search(r"session 4 of 4: failed before it began, .*\nended       rank 1, exit", text)
    assert "session 4 failed before it began" in refused(run, capsys, "--reproduce", "4")


def test_what_differs_between_sessions_is_told_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, monitor="accuracy", save_interval=3)
    start, end = records(run)
    start["packages"] = {"Same": "1", "gone": "2", "numpy": "1.26"}
    start["environment"] = {"PADDLE_MASTER": "a:1"}
    other = {**start, "packages": {"Same": "1", "new": "3", "numpy": "2.0"}, "ranks": 2}
    other["environment"] = {"PADDLE_MASTER": "a:2", "NCCL_DEBUG": "INFO"}
    unknown = {**start, "packages": "not known: OSError", "device": "not known: OSError"}
    rewrite(run, start, end, other, end, unknown, end)
    text = shown(run, capsys)
    assert text.count("packages ") == text.count("packages    gone") == 1
    assert "gone: 2 → none; new: none → 3; numpy: 1.26 → 2.0\n" in text
    assert text.count("environment NCCL_DEBUG: none → INFO\n") == 1
    assert "PADDLE_MASTER" not in text
    assert ": 2 processes, cpu" in text
    assert "1 process, not known: OSError, python" in text
    assert "best        accuracy=" in text


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda path: None, "does not exist; expected the output directory of a run."),
        (lambda path: path.write_text("x"), "is a file; expected the output directory of a run."),
        (lambda path: path.mkdir(), "holds no run; expected the output directory of one."),
        (
            lambda path: trained(Tiny, path / "below", max_iteration=2),
            "there are runs below it: python -m expbase ls.",
        ),
    ],
)
def test_what_is_no_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_it: Any, message: str
) -> None:
    make_it(tmp_path / "run")
    assert message in refused(tmp_path / "run", capsys)


def test_a_run_that_never_began_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    exp.close()
    text = shown(tmp_path / "run", capsys)
    assert "state       new, 0 iterations of 6\n" in text
    assert "checkpoints none\n" in text
    assert "note        it was set up and never began\n" in text
    error = refused(tmp_path / "run", capsys, "--reproduce")
    assert "session 1 given; there are none: the run never began." in error


def test_a_run_that_is_running_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Looking(Tiny):
        def on_train_begin(self) -> None:
            story = show.look(self.output_dir)
            story.run.state = "running"  # what its lock tells every other process
            self.lines = list(show.told(story))

    exp = trained(Looking, tmp_path / "run", max_iteration=1)
    assert any(re.match(r"session 1 of 1: .*, from iteration 0, is running", x) for x in exp.lines)


def test_what_is_damaged_is_noted_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=2)
    ledger = (run / "ledger.jsonl").read_text()
    start = records(run)[0]
    (run / "ledger.jsonl").write_text('{"event": "start", "ti\n\n' + ledger + "[1]\n")
    (run / "config.yaml").write_text("a: [")
    text = shown(run, capsys)
    assert "lines of ledger.jsonl that cannot be read: 2\n" in text
    assert "not YAML" in text
    assert "session 1 of 1: " in text
    rewrite(run, {"event": "start"}, {"event": "end"}, {**start, "time": "x", "git": {}})
    assert "session 2 of 2: at no known time, " in shown(run, capsys)


def test_a_run_of_an_earlier_expbase_is_told_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=2)
    start, end = records(run)
    old = {key: start[key] for key in ("event", "time", "iteration", "ranks", "resumed")}
    rewrite(run, old, end, start, end)
    text = shown(run, capsys)
    assert "written by an earlier expbase, which noted no more" in text
    assert "environment" not in text
    assert "did not note how it was started" in refused(run, capsys, "--reproduce")
    assert json.loads(shown(run, capsys, "--json"))["sessions"][0]["start"] == old


def reproduced(run: Path, capsys: pytest.CaptureFixture[str], *words: str, **facts: Any) -> str:
    """The script for a run whose first start noted these facts."""
    trained(Tiny, run, max_iteration=2)
    start, end = records(run)
    known = {"command": ["train.py", "--output", "a"], "directory": ".", "environment": {}}
    known["git"] = {"commit": "b2e08ebe439b", "branch": None, "dirty": False, "state": None}
    start |= {
        **known,
        "packages": {"numpy": "2.0", "mine": "1"},
        "local_packages": ["mine"],
        **facts,
    }
    rewrite(run, start, end)
    return shown(run, capsys, "--reproduce", *words)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["t.py", "--output", "runs/a/"], "python t.py --output runs/a-again"),
        (["t.py", "--output=runs/{x y}", "k=1"], "python t.py '--output=runs/{x y}-again' k=1"),
        (["t.py", "--out", "$(rm a)"], "python t.py --out '$(rm a)-again'"),
        (["-W", "ignore", "-m", "expbase", "run", "p.yaml"],
         "python -W ignore -m expbase run p.yaml --output some-again"),
        (["t.py", "--opts", "a", "1"], "# python t.py --opts a 1"),
        (["t.py", "--opts", "a\nrm", "--output"], "# python t.py --opts 'a rm' --output"),
    ],
)  # fmt: skip
def test_the_command_is_given_another_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], expected: str
) -> None:
    text = reproduced(tmp_path / "some/run", capsys, command=command)
    assert text.splitlines()[-1] == expected
    assert ("names no --output" in text) == expected.startswith("#")


def test_the_script_quotes_what_it_is_given_and_leaves_out_what_the_launcher_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"FLAGS_a": "$(touch no); 'b'", "FLAGS_x;rm": "1", "PADDLE_TRAINER_ID": "0"}
    environment |= {"PADDLE_NNODES": "2", "FLAGS_selected_gpus": "0"}
    text = reproduced(
        tmp_path / "it's}",
        capsys,
        environment=environment,
        directory="a b; c",
        command=["t.py", "$X"],
    )
    exports = [line for line in text.splitlines() if line.startswith("export")]
    assert exports == ["export FLAGS_a=" + shlex.quote("$(touch no); 'b'")]
    assert "cd 'a b; c'\n" in text
    assert "It ran on 2 nodes: this is the command of the first one." in text
    assert "From no index, so install them yourself: mine 1." in text
    assert "numpy==2.0\n" in text
    assert "mine==" not in text
    checked = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    line = next(line for line in text.splitlines() if line.startswith("run="))
    for words, expected in (([], str(tmp_path / "it's}")), (["moved"], "moved")):
        command = ["sh", "-c", f'{line}; printf %s "$run"', "sh", *words]
        assert (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout == expected
        )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ({"note": "not in a git repository"}, "# Which code it was is not known: not in a git"),
        ({"commit": "; rm -rf x"}, "# Which code it was is not known: not noted."),
        ({"commit": "b2e08eb", "dirty": True, "state": None}, "They are lost."),
        ({"commit": "b2e08eb", "dirty": True, "state": "0123456789ab"}, "0123456789ab is gone."),
        (
            {"commit": "b2e08eb", "left_out": {"count": 9, "first": ["x\n.bin", "y"]}},
            "not in git: 9 files: x\\n.bin, y, …",
        ),
    ],
)
def test_what_of_the_code_cannot_be_made_again_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: dict[str, Any], expected: str
) -> None:
    text = reproduced(tmp_path / "run", capsys, git=code, command=["t.py", "--output", "a"])
    joined = text.replace("\n# ", " ").replace("#!/bin/sh ", "")
    assert expected.removeprefix("# ") in joined
    assert "rm -rf" not in text


def test_without_a_script_there_is_no_command_to_give_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=2)
    start, end = records(run)
    rewrite(run, {**start, "command": None}, end)
    assert "was not started by a script" in refused(run, capsys, "--reproduce")
    assert "command     no script" in shown(run, capsys)
    assert "session 7 given; there are 1 to 1." in refused(run, capsys, "--reproduce", "7")


def test_names_that_are_no_utf_8_go_out_as_they_are_or_escaped(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=2)
    start, end = records(run)
    command = ["a\nb.py", os.fsdecode(b"\xff"), "--output", "a"]
    rewrite(run, {**start, "command": command, "git": {"commit": "b2e08eb"}}, end)
    capsysbinary.readouterr()
    assert main(["show", str(run), "--reproduce"]) == 0
    assert capsysbinary.readouterr().out.endswith(b"python 'a\nb.py' '\xff' --output a-again\n")
    assert main(["show", str(run)]) == 0
    assert rb"python 'a\nb.py' '\udcff' --output a" in capsysbinary.readouterr().out


def test_looking_changes_nothing_and_works_on_what_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run")
    files = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    os.chmod(tmp_path / "run", 0o555)
    try:
        assert "finished" in shown(tmp_path / "run", capsys)
    finally:
        os.chmod(tmp_path / "run", 0o755)
    assert files == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
