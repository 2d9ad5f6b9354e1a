"""Every command on every kind of thing: a clear line, a fitting exit code, nothing changed.

What a command prints for a run in good order is pinned in its own test file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
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
from expbase.tools import board, plot, replay

ERROR = "ArithmeticError: no such number: µ"
CHECKPOINT = "checkpoints/step-00000002"
CRASH = "crash/iteration-3/crash_0.json"
LEDGER, STATE = "ledger.jsonl", f"{CHECKPOINT}/state.json"
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
HOWS = [*DAMAGE, "gone", "directory"]
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
        Path(spec["copy"]).with_name("ended_0.json").write_text(json.dumps(ERROR))

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
    start, end = lines(folder / "run" / LEDGER)
    start |= {"command": [str(folder / "train.py"), "--output", "run"], "directory": "."}
    start |= {"environment": {"OMP_NUM_THREADS": "1"}, "config_changes": {"training.seed": [1, 0]}}
    start["git"] = {"commit": "b2e08ebe439b", "branch": "trunk", "dirty": True}
    start["git"] |= {"state": "0a1b2c3d4e5f", "note": "no", "left_out": {"count": 1, "first": [""]}}
    write(folder / "run" / LEDGER, [start, end])
    return folder / "run"


@pytest.fixture(scope="module")
def kinds(crashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("kinds")
    made = {name: folder / name for name in (*OTHERS, *RUNS)}
    made["odd"] = folder / "ä ö%d%(x)s $a_$ {b}\n\x1b[31m"
    for name in ("empty", "others"):
        made[name].mkdir()
    (made["others"] / "notes.txt").write_text("notes")
    made["file"].write_text("text\n")
    made["binary"].write_bytes(bytes(range(256)))
    made["link"].symlink_to("nowhere")
    for path in (made["crashed"], made["odd"], *(made["runs"] / name for name in "ab")):
        shutil.copytree(crashed, path)
    for name in ("config.yaml", LEDGER, "metrics.jsonl", STATE, CRASH, ".lock-0"):
        (made["runs"] / "a" / name).write_bytes(bytes(300))
    for name, end in (
        ("finished", {"reason": "finished", "exit_code": 0}),
        ("stopped", {"reason": "SIGTERM", "exit_code": 143}),
        ("lost", None),
        ("running", None),
    ):
        shutil.copytree(crashed, made[name], ignore=shutil.ignore_patterns("crash"))
        start, last = lines(made[name] / LEDGER)
        write(made[name] / LEDGER, [start, {**last, **end}] if end else [start])
    exp = make(Tiny, made["new"])
    exp.setup()
    exp.close()
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


@contextlib.contextmanager
def damaged(path: Path, how: str) -> Iterator[None]:
    """The file damaged, for the block."""
    data = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(DAMAGE[how](data))
    yield
    path.rmdir() if how == "directory" else path.unlink(missing_ok=True)
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*args: Any) -> None:
        raise SystemExit(0)

    picture = SimpleNamespace(savefig=lambda *args, **options: None)
    monkeypatch.setattr(plot, "draw", lambda *args: picture)
    monkeypatch.setattr(board, "visualdl", ended)
    monkeypatch.setattr(replay, "subprocess", SimpleNamespace(Popen=Repeated))


COMMANDS: dict[str, list[str]] = {
    "ls": ["ls", "KIND"],
    "ls --json": ["ls", "KIND", "--json"],
    "board": ["board", "KIND", "--port", "0"],
    "plot": ["plot", "KIND"],
    "show": ["show", "KIND"],
    "show --reproduce": ["show", "KIND", "--reproduce"],
    "replay": ["replay", "KIND"],
}


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


def answer(
    command: str, path: Path, fragment: str | None, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command prints; it changes nothing, and fails only with this in its one line."""
    before = contents(path)
    words = [word if word != "KIND" else str(path) for word in COMMANDS[command]]
    code, out, err = called(words, capsys)
    assert contents(path) == before
    if fragment:
        assert (code, out) == (1, ""), err
        (line,) = err.removesuffix("\n").split("\n")
        assert line.startswith(f"python -m expbase {command.split()[0]}: error: ")
        assert fragment in line
        return ""
    assert (code, err) == (0, "")
    if "--json" in command:
        for text in out.splitlines():
            json.loads(text, parse_constant=pytest.fail)
    # A script has paths as they are, in quotes.
    assert command == "show --reproduce" or all(map(str.isprintable, out.splitlines()))
    if command == "show":
        assert max(map(len, out.splitlines()[1:]), default=0) <= 80
    return out


# --- what is no run, and runs in every state -------------------------------------------------

_EXPECTED = "expected the output directory of a run."
_NO_RUN = "holds no run; expected the output directory of one"
_LS = {
    **dict.fromkeys(("missing", "link"), "no such directory; expected a directory with runs in it"),
    **dict.fromkeys(("file", "binary"), "is a file; expected a directory with runs in it"),
}
# What is not here is no error.
ERRORS: dict[str, dict[str, str]] = {
    "ls": _LS,
    "ls --json": _LS,
    "board": {
        **_LS,
        **dict.fromkeys(
            ("empty", "others", "new"), "A run has some as soon as it has logged a line."
        ),
    },
    "plot": {
        **dict.fromkeys(
            ("missing", "link", "empty", "others", "runs"),
            "metrics.jsonl: does not exist; expected the output directory of a run.",
        ),
        **dict.fromkeys(("file", "binary"), f"is a file; {_EXPECTED}"),
        "new": "metrics.jsonl: does not exist yet: the run has logged nothing so far.",
    },
    "show": dict.fromkeys(OTHERS, f"{_NO_RUN}."),
    "show --reproduce": {
        **dict.fromkeys(OTHERS, f"{_NO_RUN}."),
        "new": "--reproduce: session 1 given; ledger.jsonl has 0.",
    },
    "replay": {
        **dict.fromkeys(OTHERS, f"{_NO_RUN}."),
        **dict.fromkeys(
            ("finished", "stopped", "lost", "running", "new"),
            "no failure in training was noted in crash/iteration-N.",
        ),
    },
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_clearly_and_changes_nothing(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for kind, path in kinds.items():
        answer(command, path, ERRORS[command].get(kind), capsys)


# --- damage: one table for each reader -------------------------------------------------------

_UNREADABLE = ("empty", "half", "zeros", "binary", "list", "number", "null", "object")
READERS: dict[str, dict[str, dict[str, str]]] = {
    "config.yaml": {
        "ls": {},
        "show": {},
        "replay": dict.fromkeys(("gone", "directory"), f"{_NO_RUN}."),
    },
    LEDGER: {
        "ls": {},
        "ls --json": {},
        "show": {"directory": "Is a directory: "},
        "show --reproduce": {
            **dict.fromkeys(HOWS, "session 1 given; ledger.jsonl has 0."),
            "directory": "Is a directory: ",
        },
        "replay": {
            **dict.fromkeys((*_UNREADABLE, "gone"), "its ledger names no script that was started"),
            "directory": "Is a directory: ",
        },
    },
    "metrics.jsonl": {
        "ls": {},
        "show": {},
        "plot": {
            **dict.fromkeys(
                ("zeros", "binary", "list", "number", "null", "object"),
                "metrics.jsonl: holds no metrics that can be read; expected lines",
            ),
            "empty": "metrics.jsonl: holds no metrics yet; expected lines of JSON",
            "gone": "metrics.jsonl: does not exist yet: the run has logged nothing so far.",
            "directory": "metrics.jsonl: cannot be read: Is a directory.",
        },
    },
    f"{CHECKPOINT}/manifest.json": {"ls": {}, "show": {}},
    STATE: {"ls": {}, "ls --json": {}, "show": {}},
    CRASH: {
        "show": {},
        "replay": {
            **dict.fromkeys((*_UNREADABLE, "directory"), "crash_0.json: damaged: "),
            "gone": "no failure in training was noted in crash/iteration-N.",
        },
    },
    ".lock-0": {"ls": {}, "show": {}},
}


@pytest.mark.parametrize(
    ("file", "command"), [(file, command) for file, table in READERS.items() for command in table]
)
def test_damage_is_told_or_does_no_harm(
    crashed: Path, capsys: pytest.CaptureFixture[str], file: str, command: str
) -> None:
    for how in HOWS:
        with damaged(crashed / file, how):
            answer(command, crashed, READERS[file][command].get(how), capsys)


def test_the_table_shows_the_state_of_each_run_and_what_is_damaged(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, text in {
        "crashed": "crashed  2/6  .* b2e08eb\\*$",
        "stopped": "preempted  2/6 ",
        "lost": "lost   2/6 .* b2e08eb\\*$",
        "running": "running  2/6 ",
        "new": "new    0/6 ",
    }.items():
        _, row = answer("ls", kinds[kind], None, capsys).splitlines()
        assert re.match(rf"\.    {text}", row), row
    for file, how, text in (
        ("config.yaml", "half", "crashed  2  .* config.yaml: not YAML: .*[^.]$"),
        ("config.yaml", "gone", "crashed  2  .* config.yaml: cannot be read: .* No such file"),
        ("config.yaml", "list", "crashed  2  .* config.yaml: .* list.*; expected `key: value`"),
        (LEDGER, "zeros", "lost   2/6 .* ledger.jsonl: holds no record$"),
        (LEDGER, "gone", "lost   2/6 .* ledger.jsonl: holds no record$"),
        (LEDGER, "directory", "lost   2/6 .* ledger.jsonl: cannot be read: Is a directory$"),
        (".lock-0", "gone", "crashed  2/6 "),
    ):
        with damaged(kinds["crashed"] / file, how):
            _, row = answer("ls", kinds["crashed"], None, capsys).splitlines()
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


def test_fields_of_a_failure_that_are_missing_are_told_by_name(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(crashed, tmp_path / "run")
    facts = json.loads((run / CRASH).read_text())
    for name in ("error", "iteration", "ranks", "checkpoint"):
        (run / CRASH).write_text(json.dumps({n: v for n, v in facts.items() if n != name}))
        code, _, err = called(["replay", str(run)], capsys)
        assert code == 1
        assert f"crash_0.json: damaged: it lacks {name};" in err
        assert "its traceback is in traceback_0.txt beside it." in err.lower()
    (run / CRASH).write_text(json.dumps(facts))
    (run / CRASH).with_name("crash_x.json").write_text("")  # nobody's
    assert called(["replay", str(run)], capsys)[0] == 0


def test_fields_of_metrics_and_scores_that_are_of_another_kind_are_left_out(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(crashed, tmp_path / "run")
    logged = lines(run / "metrics.jsonl")
    for name in ("iteration", "train/loss", "valid/accuracy"):
        for value in WRONG:
            write(run / "metrics.jsonl", [{**line, name: value} for line in logged])
            answer("ls --json", run, None, capsys)
            assert called(["show", str(run)], capsys)[0] == 0
            words = ["plot", str(run), "--metrics", "lr"]
            assert called(words, capsys)[0] == int(name == "iteration" and value not in (7, True))
    write(run / "metrics.jsonl", [{"iteration": "x", "train/a": 1}, {"iteration": 2, "train/a": 3}])
    assert plot.curves(run) == {"train/a": {2: 3}}
    state = json.loads((run / STATE).read_text())
    for value in [*WRONG, [[1, 1e999]], [[10**400, 10**400]], [["x", "y"]]]:
        state["values"]["best"] = {"scores": value}
        (run / STATE).write_text(json.dumps(state))
        answer("ls --json", run, None, capsys)
        answer("show", run, None, capsys)


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


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "empty; expected `key: value` lines."),
        ("- 1\n", "list"),
        (bytes(range(256)), "cannot be read: 'utf-8' codec can't decode byte 0x80"),
        ("a: [", "not YAML: while parsing a flow node"),
        (PLAN.replace("train.py", "broken.py"), "broken.py cannot be imported:\n  File"),
        (PLAN.replace("train.py", "binary.py"), "binary.py cannot be imported:\nSyntaxError"),
    ],
)
def test_a_file_that_describes_no_runs_is_answered_at_its_key_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, fragment: str
) -> None:
    (tmp_path / "plan.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(bytes(9))
    before = contents(tmp_path)
    code, out, err = called(["run", str(tmp_path / "plan.yaml")], capsys)
    assert (code, out) == (1, "")
    assert err.startswith(f"python -m expbase run: error: {tmp_path / 'plan.yaml'}: ")
    assert fragment in err
    assert "Traceback" not in err
    assert contents(tmp_path) == before


def test_run_takes_no_other_kind_of_thing(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (*OTHERS, "crashed"):
        code, out, err = called(["run", str(kinds[kind])], capsys)
        assert (code, out) == (1, "")
        text = f"{kinds[kind]}: a config file ending in ''"
        assert err.startswith(f"python -m expbase run: error: {text}")
        assert "expected .yaml or .yml" in err


# --- an experiment's script ------------------------------------------------------------------

_LOOK = {
    **dict.fromkeys(
        OTHERS,
        "holds no run; expected the directory of one, with its config.yaml.",
    ),
    "new": "no intact checkpoint there; expected a directory like checkpoints/step-00000400",
    "running": "",
    "lost": "",
}
_YAML = "a config file ending in ''; expected .yaml or .yml."
SCRIPT = {
    "--output KIND --evaluate last": _LOOK,
    "--output KIND --export 2": {
        **{kind: text for kind, text in _LOOK.items() if text},
        "new": "step-00000002: does not exist (2); there are: none.",
    },
    "--output KIND": {
        **dict.fromkeys(("file", "binary", "link"), "cannot be made a directory: File exists."),
        "running": "is in use by a running process. Wait for it, stop it, or give another",
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


@pytest.mark.parametrize("words", SCRIPT)
def test_a_script_answers_in_one_line_and_leaves_what_it_was_given(
    kinds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    for kind, fragment in SCRIPT[words].items():
        before = contents(kinds[kind])
        given = script_answer(words, kinds[kind], tmp_path / f"new-{kind}")
        assert contents(kinds[kind]) == before
        assert "Traceback" not in capsys.readouterr().err
        assert bool(given) == bool(fragment)
        assert fragment in given
        assert given.startswith("train.py: error: " if fragment else "")
        assert len(given.splitlines()) == bool(fragment)


def script_answer(words: str, path: Path, new: Path) -> Any:
    """What a training script prints at its end, if it fails, and ends with code 1."""
    places = {"KIND": str(path), "new": str(new)}
    parser = default_argument_parser()
    parser.prog = "train.py"
    argv = [places.get(word, word) for word in words.split()]
    try:
        expbase.main(Tiny, parser=parser, argv=[*argv, "--device", "cpu"])
    except SystemExit as end:
        return end.code
    return ""


@pytest.mark.parametrize(
    ("file", "how", "evaluate", "export"),
    [
        ("config.yaml", "gone", "holds no run; expected the directory of one", ""),
        ("config.yaml", "half", "config.yaml: not YAML: ", ""),
        ("config.yaml", "empty", "config.yaml: empty; expected `key: value` lines.", ""),
        ("manifest.json", "gone", "no intact checkpoint there", "cannot be read: No such file"),
        ("state.json", "binary", "no intact checkpoint there", "state.json: 2048 bytes; expected "),
    ],
)
def test_a_script_tells_what_of_a_run_is_damaged(
    crashed: Path, tmp_path: Path, file: str, how: str, evaluate: str, export: str
) -> None:
    path = crashed / file if file == "config.yaml" else crashed / CHECKPOINT / file
    with damaged(path, how):
        assert evaluate in script_answer("--output KIND --evaluate last", crashed, tmp_path)
        assert (export or evaluate) in script_answer("--output KIND --export 2", crashed, tmp_path)


def test_a_checkpoint_of_no_name_is_refused_before_anything_is_set_up(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--evaluate", "--export"):
        for which in ("", "bset", "-1", "1.5", "step-00000002"):
            words = ["--output", str(kinds["finished"]), f"{option}={which}"]
            text = f"{option}: {which!r} given; expected best, last or an"
            with pytest.raises(SystemExit, match=text):
                expbase.main(Tiny, argv=words)
    assert capsys.readouterr().err == ""


# --- --help ----------------------------------------------------------------------------------


def test_help_fits_80_columns_and_tells_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = [default_argument_parser().format_help()]
    for tool in ("ls", "board", "plot", "show", "replay", "verify", "run"):
        code, out, err = called([tool, "--help"], capsys)
        assert (code, err) == (0, "")
        texts.append(out)
    assert all("exit codes: 0" in text for text in texts)
    texts.append(called(["--help"], capsys)[1])
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


def test_wrong_usage_is_answered_with_the_usage_and_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (
        "ls --foo", "ls a b", "show", "board a --port x", "no", "plot a --smooth x",
        "replay", "verify a", "run a.yaml --nprocs 0", "run a.yaml --nprocs -1",
    ):  # fmt: skip
        code, out, err = called(words.split(), capsys)
        assert (code, out) == (2, ""), words
        assert err.startswith("usage: python -m expbase")
        assert "error: " in err.splitlines()[-1]


def test_a_tool_starts_without_visualdl_matplotlib_and_pandas() -> None:
    code = (
        "import sys\nfrom expbase.__main__ import main\n"
        "try:\n    main(['board', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'visualdl', 'matplotlib', 'pandas'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
