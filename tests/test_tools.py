"""Every command on every kind of thing: a clear line, a fitting exit code, nothing changed.

What a command gives for a run in good order is pinned in its own test file.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import Tiny, make, trained

import expbase
from expbase import default_argument_parser
from expbase.__main__ import main
from expbase.tools import board, plot, replay, verify
from expbase.tools import process as ending

DRAW = plot.draw
ERROR = "ArithmeticError: no such number: µ"
CHECKPOINT = "checkpoints/step-00000002"
CRASH = "crash/iteration-3/crash_0.json"
FILES = {
    "config": "config.yaml",
    "metrics": "metrics.jsonl",
    "ledger": "ledger.jsonl",
    "records": "vdlrecords.run.log",
    "manifest": f"{CHECKPOINT}/manifest.json",
    "state": f"{CHECKPOINT}/state.json",
    "crash": CRASH,
    "lock": ".lock-0",
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),  # as some file systems leave them after a power cut
    "binary": lambda data: bytes(range(256)) * 8,
    "list": lambda data: b"[1, 2]\n",
    "number": lambda data: b"7\n",
    "null": lambda data: b"null\n",
    "object": lambda data: b"{}\n",
}
DAMAGED = [f"{file}-{how}" for file in FILES for how in [*DAMAGE, "gone", "directory"]]
RUNS = ["crashed", "finished", "stopped", "lost", "running", "new", "odd"]
OTHERS = ["missing", "empty", "file", "binary", "others", "link", "runs"]
WRONG: list[Any] = [None, 7, True, "x", [1], {"a": 1}, [[1]], 1e999, 10**400]


class Failing(Tiny):
    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 3:
            raise ArithmeticError("no such number: µ")


class Repeated:
    """Stands in for the process of a replay: the same error comes again."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        spec = json.loads(Path(words[2]).read_bytes())
        Path(f"{spec['result']}_0").write_text(ERROR, encoding="utf-8")

    def wait(self) -> int:
        return 1

    poll = wait


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed; with more in its ledger than there is outside of a repository."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "train.py").write_text("")
    with pytest.raises(ArithmeticError):
        trained(Failing, folder / "run", monitor="accuracy", valid_interval=2)
    start, end = lines(folder / "run/ledger.jsonl")
    start |= {"command": [str(folder / "train.py"), "--output", "run"], "directory": "."}
    start |= {"environment": {"OMP_NUM_THREADS": "1"}, "config_changes": {"training.seed": [1, 0]}}
    start["git"] = {"commit": "b2e08ebe439b", "branch": "trunk", "dirty": True}
    start["git"] |= {"state": "0a1b2c3d4e5f", "note": "no", "left_out": {"count": 1, "first": [""]}}
    write(folder / "run/ledger.jsonl", [start, end])
    return folder / "run"


@pytest.fixture(scope="module")
def kinds(crashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("kinds")
    made = {name: folder / name for name in (*OTHERS, *RUNS, *DAMAGED)}
    made["odd"] = folder / "ä ö%d%(x)s $a_$ {b}\n\x1b[31m"
    for name in ("empty", "others"):
        made[name].mkdir()
    (made["others"] / "notes.txt").write_text("notes")
    made["file"].write_text("text\n")
    made["binary"].write_bytes(bytes(range(256)))
    made["link"].symlink_to("nowhere")
    for path in (made["crashed"], made["odd"], *(made["runs"] / name for name in "ab")):
        shutil.copytree(crashed, path)
    for file in FILES.values():
        (made["runs"] / "a" / file).write_bytes(bytes(300))
    for name, end in (
        ("finished", {"reason": "finished", "exit_code": 0}),
        ("stopped", {"reason": "SIGTERM", "exit_code": 143}),
        ("lost", None),
        ("running", None),
    ):
        shutil.copytree(crashed, made[name], ignore=shutil.ignore_patterns("crash"))
        start, last = lines(made[name] / "ledger.jsonl")
        write(made[name] / "ledger.jsonl", [start, {**last, **end}] if end else [start])
    exp = make(Tiny, made["new"])
    exp.setup()
    exp.close()
    for name in DAMAGED:
        file, _, how = name.partition("-")
        path = shutil.copytree(crashed, made[name]) / FILES[file]
        data = path.read_bytes()
        if how in DAMAGE:
            path.write_bytes(DAMAGE[how](data))
        else:
            path.unlink()
        if how == "directory":
            path.mkdir()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(made["running"] / ".lock-0")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        yield made
        holder.stdin.close()


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = SimpleNamespace(savefig=lambda *args, **options: None)
    monkeypatch.setattr(plot, "draw", lambda *args: picture)
    monkeypatch.setattr(board, "serve", lambda *args: None)
    monkeypatch.setattr(replay, "subprocess", SimpleNamespace(Popen=Repeated))


COMMANDS: dict[str, list[str]] = {
    "ls": ["ls", "KIND"],
    "ls --json": ["ls", "KIND", "--json"],
    "board": ["board", "KIND", "--port", "0"],
    "plot": ["plot", "KIND"],
    "show": ["show", "KIND"],
    "show --json": ["show", "KIND", "--json"],
    "show --reproduce": ["show", "KIND", "--reproduce"],
    "replay": ["replay", "KIND"],
}
# What is no error is not there: it ends with 0, and has nothing to say on stderr.
_EXPECTED = "expected the output directory of a run."
_NO_RUN = "holds no run; expected the output directory of one"
_SHOW = {
    **dict.fromkeys(("missing", "link"), f"does not exist; {_EXPECTED}"),
    **dict.fromkeys(("file", "binary"), f"is a file; {_EXPECTED}"),
    **dict.fromkeys(("empty", "others"), f"{_NO_RUN}."),
    "runs": "there are runs below it: python -m expbase ls.",
}
_LS = {
    **dict.fromkeys(("missing", "link"), "no such directory; expected a directory with runs in it"),
    **dict.fromkeys(("file", "binary"), "is a file; expected a directory with runs in it"),
}
_UNREADABLE = ("empty", "half", "zeros", "binary", "list", "number", "null", "object")
ERRORS: dict[str, dict[str, str]] = {
    "ls": _LS,
    "ls --json": _LS,
    "board": {
        **_LS,
        **dict.fromkeys(
            ("empty", "others", "new", "records-gone", "records-directory"),
            "A run has some as soon as it has logged a line.",
        ),
    },
    "plot": {
        **dict.fromkeys(
            ("missing", "link", "empty", "others", "runs"),
            "metrics.jsonl: does not exist; expected the output directory of a run.",
        ),
        **dict.fromkeys(("file", "binary"), f"is a file; {_EXPECTED}"),
        **dict.fromkeys(
            ("new", "metrics-gone"),
            "metrics.jsonl: does not exist yet: the run has logged nothing so far.",
        ),
        "metrics-empty": "metrics.jsonl: holds no metrics yet; expected lines of JSON",
        **{
            f"metrics-{how}": "metrics.jsonl: holds no metrics that can be read; expected lines"
            for how in ("zeros", "binary", "list", "number", "null", "object")
        },
        "metrics-directory": "metrics.jsonl: cannot be read: Is a directory.",
    },
    "show": _SHOW,
    "show --json": _SHOW,
    "show --reproduce": {
        **_SHOW,
        "new": "--reproduce: session 1 given; there are none: the run never began.",
        **{
            f"ledger-{how}": "session 1 given; there are none in ledger.jsonl, as far as it can be"
            for how in (*_UNREADABLE, "gone", "directory")
        },
    },
    "replay": {
        **dict.fromkeys((*OTHERS, "config-gone", "config-directory"), f"{_NO_RUN}."),
        **dict.fromkeys(
            ("finished", "stopped", "lost", "running", "new", "crash-gone"),
            "no failure in training was noted (crash/iteration-N is not there). How it ended: "
            "python -m expbase show ",
        ),
        **{
            f"crash-{how}": "crash_0.json: damaged: "
            for how in (*_UNREADABLE, "directory")
        },
        **{
            f"ledger-{how}": "its ledger names no script that was started"
            for how in (*_UNREADABLE, "gone")
        },
        "ledger-directory": "ledger.jsonl: cannot be read: Is a directory.",
        **{
            f"{file}-{how}": "The failure cannot be repeated without it."
            for file in ("manifest", "state")
            for how in (*_UNREADABLE, "gone", "directory")
        },
    },
}  # fmt: skip


def called(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, and what went to stdout and stderr, as the interpreter would have it."""
    capsys.readouterr()
    try:
        code: Any = main(words)
    except SystemExit as end:
        code = end.code or 0
    printed = capsys.readouterr()
    if isinstance(code, str):
        return 1, printed.out, f"{printed.err}{code}\n"
    return code, printed.out, printed.err


def contents(path: Path) -> dict[Path, tuple[int, ...]]:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    states = {one: one.lstat() for one in found if os.path.lexists(one)}
    return {one: (state.st_mtime_ns, state.st_size, state.st_ino) for one, state in states.items()}


@pytest.mark.parametrize("kind", [*OTHERS, *RUNS, *DAMAGED])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_clearly_and_changes_nothing(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    path = kinds[kind]
    before = contents(path)
    code, out, err = called(
        [word if word != "KIND" else str(path) for word in COMMANDS[command]], capsys
    )
    assert contents(path) == before
    if fragment := ERRORS[command].get(kind):
        assert code == 1
        assert fragment in err
        (line,) = err.removesuffix("\n").split("\n")
        assert line.startswith(f"python -m expbase {command.split()[0]}: error: ")
        assert out == ""
    else:
        assert (code, err) == (0, "")
        # A script has paths as they are, in quotes.
        assert command == "show --reproduce" or all(map(str.isprintable, out.splitlines()))
    if "--json" in command:
        for text in out.splitlines():
            json.loads(text, parse_constant=pytest.fail)
    if command == "show":
        assert max(map(len, out.splitlines()[1:]), default=0) <= 80


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("crashed", "crashed  2/6  .* b2e08eb\\*$"),
        ("stopped", "preempted  2/6 "),
        ("lost", "lost   2/6 .* b2e08eb\\*$"),
        ("running", "running  2/6 "),
        ("new", "new    0/6 "),
        ("config-half", "crashed  2  .* config.yaml: not YAML: .*[^.]$"),
        ("config-gone", "crashed  2  .* config.yaml: cannot be read: .* No such file"),
        ("config-list", "crashed  2  .* config.yaml: holds a list; expected `key: value`"),
        ("ledger-zeros", "lost   2/6 .* ledger.jsonl: holds no record$"),
        ("ledger-gone", "lost   2/6 .* ledger.jsonl: holds no record$"),
        ("ledger-directory", "lost   2/6 .* ledger.jsonl: cannot be read: Is a directory$"),
        ("lock-gone", "crashed  2/6 "),
    ],
)
def test_the_table_tells_the_state_of_what_is_damaged_in_one_row(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str, text: str
) -> None:
    _, out, _ = called(["ls", str(kinds[kind])], capsys)
    _, row = out.splitlines()
    assert re.match(rf"\.    {text}", row), row


def test_a_damaged_run_and_an_odd_name_leave_the_rest_of_the_table_as_it_is(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(["ls", str(kinds["runs"])], capsys)
    assert (code, err) == (0, "")
    _, damaged, good = out.splitlines()
    assert re.search("^a    lost .* ledger.jsonl: holds no record$", damaged)
    assert re.search("^b    crashed  2/6 ", good)
    _, out, _ = called(["ls", str(kinds["odd"].parent)], capsys)
    name = "ä ö%d%(x)s $a_$ {b}\\n\\x1b[31m"
    (row,) = [row for row in out.splitlines() if row.startswith("ä")]
    assert row.startswith(f"{name} ")
    _, out, _ = called(["ls", "--json", str(kinds["odd"].parent)], capsys)
    assert kinds["odd"].name in [json.loads(line)["name"] for line in out.splitlines()]


# --- fields of another kind ------------------------------------------------------------------


def variants(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record with each field gone, and with values of other kinds."""
    for name in record:
        yield {n: value for n, value in record.items() if n != name}
        yield from ({**record, name: value} for value in WRONG)


def called_all(run: Path, capsys: pytest.CaptureFixture[str], *commands: str) -> None:
    """Calls commands; a traceback would come through."""
    for command in commands:
        words = [str(run) if word == "KIND" else word for word in COMMANDS[command]]
        code, _, err = called(words, capsys)
        assert code in (0, 1)
        assert len(err.splitlines()) == (
            1 if code and command != "replay" else len(err.splitlines())
        )


def test_fields_of_a_failure_that_are_of_another_kind_are_told_by_name(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(crashed, tmp_path / "run")
    facts = json.loads((run / CRASH).read_text())
    for name in ("error", "iteration", "ranks", "checkpoint"):
        wrong = [
            {**facts, name: value} for value in WRONG if value is not None or name != "checkpoint"
        ]
        fits = {"error": (str,), "iteration": (int,), "ranks": (int,)}.get(name, ())
        for changed in [{n: v for n, v in facts.items() if n != name}, *wrong]:
            if type(changed.get(name)) in fits:
                continue
            (run / CRASH).write_text(json.dumps(changed))
            code, _, err = called(["replay", str(run)], capsys)
            assert code == 1
            assert f"crash_0.json: damaged: {name} is " in err
            assert "its traceback is in traceback_0.txt beside it." in err.lower()
    (run / CRASH).write_text(json.dumps(facts))
    (run / CRASH).with_name("crash_x.json").write_text("")  # nobody's
    assert called(["replay", str(run)], capsys)[0] == 0
    assert "expected one of 3." in called(["replay", str(run), "--iteration", "9"], capsys)[2]


def test_fields_of_metrics_and_scores_that_are_of_another_kind_are_left_out(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(crashed, tmp_path / "run")
    logged = lines(run / "metrics.jsonl")
    for name in ("iteration", "time", "train/loss", "valid/accuracy"):
        for value in WRONG:
            write(run / "metrics.jsonl", [{**line, name: value} for line in logged])
            called_all(run, capsys, "ls", "ls --json", "show", "plot")
    write(run / "metrics.jsonl", [{"iteration": "x", "train/a": 1}, {"iteration": 2, "train/a": 3}])
    assert plot.curves(run) == {"train/a": [(2, 3)]}
    write(run / "metrics.jsonl", [{"iteration": 2, "train/loss": "nan"}])
    assert "loss        nan\n" in called(["show", str(run)], capsys)[1]
    state = json.loads((run / FILES["state"]).read_text())
    for value in [*WRONG, [[1, 1e999]], [[10**400, 10**400]], [["x", "y"]]]:
        state["values"]["best"] = {"scores": value}
        (run / FILES["state"]).write_text(json.dumps(state))
        called_all(run, capsys, "ls", "ls --json", "show")


def test_a_run_without_its_config_says_that_it_is_not_known(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = called(["show", str(kinds["config-gone"])], capsys)
    assert "training    not known\n" in out
    assert re.search("best        [0-9.]+ at iteration 2\n", out)
    assert "never began" not in called(["show", str(kinds["ledger-gone"])], capsys)[1]
    assert "never began" in called(["show", str(kinds["new"])], capsys)[1]


def test_a_folder_that_cannot_be_read_is_told_and_the_rest_is_shown(
    kinds: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == kinds["runs"] / "a":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    code, out, err = called(["ls", str(kinds["runs"])], capsys)
    assert code == 0
    assert err == f"{kinds['runs'] / 'a'}: Permission denied; not looked into.\n"
    assert len(out.splitlines()) == 2


# --- run -------------------------------------------------------------------------------------

PLAN = 'experiment: "{workspace}/train.py:Exp"\nrunner:\n- {name: a, class: train, device: cpu}\n'
TRAIN = PLAN.replace("class: train", "class: train, KEY")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "empty; expected `key: value` lines."),
        ("- 1\n", "holds a list; expected `key: value` lines."),
        ("7\n", "holds a int; expected `key: value` lines."),
        ("null\n", "empty; expected `key: value` lines."),
        (bytes(range(256)), "cannot be read: 'utf-8' codec can't decode byte 0x80"),
        ("a: [", "not YAML: while parsing a flow node"),
        ("runner: []\n", 'experiment: None given; expected "{workspace}/train.py:Class"'),
        (PLAN.replace("train.py", "no.py"), "no.py does not exist."),
        (PLAN.replace("Exp", "Nobody"), "train.py has no class 'Nobody'; it has Exp, Other."),
        (PLAN.replace("Exp", "Other"), "experiment: Other is no ExperimentBase."),
        (PLAN.replace("{workspace}/train.py", "no.such"), "there is no module 'no.such'."),
        (PLAN.replace("train.py", "broken.py"), "broken.py cannot be imported:\n  File"),
        (PLAN.replace("train.py", "binary.py"), "binary.py cannot be imported:\nSyntaxError"),
        (PLAN.partition("- ")[0] + "7\n", "not YAML"),
        (PLAN.partition("runner")[0] + "runner: 7\n", "runner: expected a list of"),
        (PLAN.replace("name: a", "name: .."), "runner[0].name: '..' given; expected a name for"),
        (PLAN.replace("name: a", "name: ."), "runner[0].name: '.' given; expected a name for"),
        (PLAN.replace("name: a, ", ""), "runner[0].name: None given; expected a name for a folder"),
        (PLAN.replace("class: train", "class: [train]"), "['train'] given; expected train or inf"),
        (PLAN.replace("class: train", "class: {a: 1}"), "{'a': 1} given; expected train or infer"),
        (PLAN + "config: 7\n", "config: 7 given; expected a section of `key: value`s."),
        (PLAN + "config: hello\n", "config: 'hello' given; expected a section of `key: value`s."),
        (PLAN + "config: {training: 7}\n", "config.training: 7 given; expected a section"),
        (TRAIN.replace("KEY", "config: [1]"), "(a): config: [1] given; expected a section"),
        (TRAIN.replace("KEY", "epochs: 1, config: {training: 7}"), "(a): config.training: 7 given"),
        (TRAIN.replace("KEY", "epochs: x"), "(a): training.max_epoch: 'x' given; expected a whole"),
        (TRAIN.replace("KEY", "init_partial: x"), "init_partial: 'x' given; expected true or fals"),
        (TRAIN.replace("KEY", "init_model_path: 7"), "init_model_path: 7 given; expected a path."),
        (TRAIN.replace("KEY", "startup_class_path: no.py"), "startup_class_path: "),
        (PLAN.replace("device: cpu", "device: 7"), "(a).device: 7 given; expected cpu, gpu, gpu:0"),
        (PLAN + "mode: b\n", "mode: no runner 'b'. Expected one of a."),
        (PLAN + "mode:\n", "mode: nothing given; expected some of a."),
        (PLAN + "workspace: [1]\n", "workspace: [1] given; expected a path."),
        (PLAN + "output: 7\n", "output: 7 given; expected a path."),
        (PLAN + "null: 8\n", "unknown key None. Did you mean 'mode'?"),
        (PLAN.replace("{workspace}", "{no}"), "{no} in '{no}/train.py:Exp' is unknown; expected"),
    ],
)
def test_a_file_that_describes_no_runs_is_answered_at_its_key_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, fragment: str
) -> None:
    (tmp_path / "plan.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    body = "from tiny import Tiny\nclass Exp(Tiny): pass\nclass Other: pass\n"
    (tmp_path / "train.py").write_text(body)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(bytes(9))
    before = contents(tmp_path)
    code, out, err = called(["run", str(tmp_path / "plan.yaml")], capsys)
    assert (code, out) == (1, "")
    assert err.startswith(f"python -m expbase run: error: {tmp_path / 'plan.yaml'}: ")
    assert fragment in err
    assert "Traceback" not in err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [*OTHERS, "crashed"])
def test_run_takes_no_other_kind_of_thing(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    code, out, err = called(["run", str(kinds[kind])], capsys)
    assert (code, out) == (1, "")
    assert err.startswith(
        f"python -m expbase run: error: {kinds[kind]}: a config file ending in ''"
    )
    assert "expected .yaml or .yml" in err


# --- verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["missing", "--output", "new"], "missing: no such file; expected a training script."),
        (["link", "--output", "new"], "link: no such file; expected a training script."),
        (["crashed", "--output", "new"], "crashed: is a directory; expected a training script."),
        (["file", "--output", "binary"], "--output: binary cannot be a directory: File exists"),
        (["file", "--output", "link"], "--output: link cannot be a directory: File exists"),
        (["file", "--output", "file/x"], "--output: file/x cannot be a directory: Not a directory"),
        (["file", "--output", "crashed"], "--output: crashed is not empty; remove it, or name a"),
        (["file", "--output", "new2", "--iterations", "9"], "--iterations: 9 given; expected"),
        (["file", "--output", "new2", "--nprocs", "0"], "--nprocs: 0 given; expected"),
        (["file", "--output", "new2", "--tolerance", "nan"], "--tolerance: nan given; expected"),
    ],
)
def test_verify_refuses_what_it_cannot_use_and_makes_nothing(
    kinds: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    fragment: str,
) -> None:
    monkeypatch.chdir(kinds["file"].parent)
    before = contents(Path().absolute())
    code, out, err = called(["verify", *words], capsys)
    assert (code, out) == (1, "")
    assert err.startswith(f"python -m expbase verify: error: {fragment}")
    assert len(err.splitlines()) == 1
    assert contents(Path().absolute()) == before


def stand_in(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """Has verify start another command, which trains nothing."""
    monkeypatch.setattr(verify.Side, "command", lambda self: list(command))


def test_a_script_that_trains_nothing_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "true")
    words = ["verify", __file__, "--output", str(tmp_path / "out")]
    code, _, err = called(words, capsys)
    assert code == 1
    assert f"{__file__}: made no checkpoint in {tmp_path / 'out/straight'}; expected" in err
    assert len(err.splitlines()) == 1


def test_verify_that_is_broken_off_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def broken_off(self: verify.Side, *args: Any) -> bool:
        started.append(self.process)
        raise SystemExit(143)

    stand_in(monkeypatch, "sleep", "100")
    monkeypatch.setattr(verify.Side, "_wait_for", broken_off)
    side = verify.Side(SimpleNamespace(output=tmp_path, iterations=40), "killed")  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        side.finish_with_kills(random.Random(0), 1)
    (process,) = started
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_tool_in_order_and_its_handler_is_as_before(
    number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, ending.ended_by_signals():
        signal.raise_signal(number)
    assert caught.value.code == code
    assert signal.getsignal(number) == before
    with ending.ended_by_signals({number: None}):  # it is for a child
        signal.raise_signal(number)


def test_what_a_process_started_is_killed_with_it(tmp_path: Path) -> None:
    command = f"setsid sleep 100 & echo $! > {tmp_path}/pid; echo up; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        ending.kill(process)
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] in "ZX"


# --- plot ------------------------------------------------------------------------------------


def test_all_runs_of_a_picture_are_named_whatever_their_names_and_metrics() -> None:
    runs = {
        "$a_$": {"train/a": [(1, 1.0), (2, 2.0)]},
        "_b$": {"train/b": [(1, 1.0)]},
        "none": {"train/c": [(1, 1.0)]},
    }
    figure = DRAW(runs, ["train/a", "train/b"], 0.0)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["$a_$", "_b$"]
    figure.canvas.draw()  # a $ is a $


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["crashed", "--output", "curves"], "--output: 'curves' given; expected a name in .png,"),
        (["crashed", "--output", "metrics.jsonl"], "--output: 'metrics.jsonl' given; expected a"),
        (["crashed", "--output", "no/a.png"], "--output: no/a.png: No such file or directory."),
        (["crashed", "--metrics", "los"], "--metrics: 'los' given; expected some of speed/"),
        (["crashed", "new"], "new/metrics.jsonl: does not exist yet"),
    ],
)
def test_plot_refuses_in_one_line(
    kinds: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    fragment: str,
) -> None:
    monkeypatch.setattr(plot, "draw", DRAW)
    monkeypatch.chdir(kinds["crashed"].parent)
    code, out, err = called(["plot", *words], capsys)
    assert (code, out) == (1, "")
    assert err.startswith(f"python -m expbase plot: error: {fragment}")
    assert len(err.splitlines()) == 1


def test_a_run_without_the_wanted_metric_is_named(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other / "metrics.jsonl", [{"iteration": 1, "train/a": 1.0}])
    code, _, err = called(["plot", str(crashed), str(other), "--metrics", "loss"], capsys)
    assert (code, err) == (0, f"{other}: has none of these metrics; not drawn.\n")


# --- an experiment's script ------------------------------------------------------------------

_LOOK = {
    **dict.fromkeys(
        [*(kind for kind in OTHERS if kind != "link"), "link", "config-gone", "config-directory"],
        "holds no run; expected the directory of one, with its config.yaml.",
    ),
    "new": "no intact checkpoint there; expected a directory like checkpoints/step-00000400",
    "config-half": "config.yaml: not YAML: ",
    "config-zeros": "config.yaml: not YAML: ",
    "config-empty": "config.yaml: empty; expected `key: value` lines.",
    "config-list": "config.yaml: holds a list; expected `key: value` lines.",
    "manifest-gone": "no intact checkpoint there",
    "state-binary": "no intact checkpoint there",
    "running": "",
    "lost": "",
}
_YAML = "a config file ending in ''; expected .yaml or .yml."
SCRIPT = {
    "--output KIND --evaluate last": _LOOK,
    "--output KIND --export 2": {
        **{kind: text for kind, text in _LOOK.items() if text},
        "new": "step-00000002: does not exist (2); there are: none.",
        "manifest-gone": "manifest.json: cannot be read: No such file or directory.",
        "state-binary": "state.json: 2048 bytes; expected ",
    },
    "--output KIND": {
        **dict.fromkeys(("file", "binary", "link"), "cannot be made a directory: File exists."),
        "running": "is in use by a running process. Wait for it, stop it, or give another",
        "config-list": "config.yaml: holds a list; expected `key: value` lines.",
    },
    "--output new --checkpoint_path KIND": dict.fromkeys(
        (*OTHERS, "new"), "no intact checkpoint there; expected a directory like checkpoints/step-"
    ),
    "--output new --init_model_path KIND": {
        **dict.fromkeys(("missing", "link"), "does not exist."),
        **dict.fromkeys(("file", "binary"), "of an unknown kind; expected a checkpoint directory,"),
        **dict.fromkeys(("empty", "others", "runs", "new"), "no intact checkpoint there; expected"),
    },
    "--output new --config KIND": dict.fromkeys(OTHERS, _YAML),
}


@pytest.mark.parametrize(
    ("words", "kind", "fragment"),
    [(words, kind, text) for words, table in SCRIPT.items() for kind, text in table.items()],
)
def test_a_script_answers_in_one_line_and_leaves_what_it_was_given(
    kinds: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    kind: str,
    fragment: str,
) -> None:
    path, places = kinds[kind], {"KIND": str(kinds[kind]), "new": str(tmp_path / "new")}
    before = contents(path)
    argv = [places.get(word, word) for word in words.split()]
    parser = default_argument_parser()
    parser.prog = "train.py"
    answer: Any = ""
    try:
        expbase.main(Tiny, parser=parser, argv=[*argv, "--device", "cpu"])
    except SystemExit as end:
        answer = end.code  # a text: python prints it and ends with 1
    assert contents(path) == before
    assert "Traceback" not in capsys.readouterr().err
    assert bool(answer) == bool(fragment)
    assert fragment in answer
    assert answer.startswith("train.py: error: " if fragment else "")
    assert len(answer.splitlines()) == bool(fragment) or "not YAML" in answer


@pytest.mark.parametrize("which", ["", "bset", "-1", "1.5", "step-00000002"])
@pytest.mark.parametrize("option", ["--evaluate", "--export"])
def test_a_checkpoint_of_no_name_is_refused_before_anything_is_set_up(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str], option: str, which: str
) -> None:
    words = ["--output", str(kinds["finished"]), f"{option}={which}"]
    with pytest.raises(SystemExit, match=f"{option}: {which!r} given; expected best, last or an"):
        expbase.main(Tiny, argv=words)
    assert capsys.readouterr().err == ""


# --- --help ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["", "ls", "board", "plot", "show", "replay", "verify", "run"])
def test_help_fits_80_columns_and_tells_the_exit_codes(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = called([*filter(None, [tool]), "--help"], capsys)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert not tool or "exit codes: 0" in out


def test_help_of_a_script_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = default_argument_parser().format_help()
    assert max(map(len, text.splitlines())) <= 80
    assert "exit codes: 0" in text


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "--foo"], ["ls", "a", "b"], ["show"], ["board", "a", "--port", "x"], ["no"],
        ["plot", "a", "--smooth", "x"], ["replay", "a", "--iteration", "x"], ["verify", "a"],
        ["run", "a.yaml", "--nprocs", "0"], ["run", "a.yaml", "--nprocs", "-1"],
    ],
)  # fmt: skip
def test_wrong_usage_is_answered_with_the_usage_and_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(words, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("usage: python -m expbase")
    assert "error: " in err.splitlines()[-1]
