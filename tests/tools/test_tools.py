"""Every command on every kind of thing: an answer in one line, and nothing is changed.

What a command prints for a run in good order, and its errors, are in its own test file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tiny import Tiny, make, trained

import expbase
from expbase import default_argument_parser
from expbase.__main__ import main
from expbase.tools import board, plot

CHECKPOINT = "checkpoints/step-00000002"
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),  # as some file systems leave them after a power cut
    "list": lambda data: b"[1, 2]\n",
    "object": lambda data: b"{}\n",
}
NO_RUNS = ["missing", "link", "empty", "others", "file"]
COMMANDS = (
    *("ls KIND", "ls KIND --json", "board KIND --port 0", "plot KIND", "rm KIND", "show KIND"),
)
# Of the files of a run, those without which a command fails; all others do without any of them.
NEEDED = {"plot KIND": ["metrics.jsonl"]}
FILES = [
    "config.yaml",
    "ledger.jsonl",
    "metrics.jsonl",
    f"{CHECKPOINT}/manifest.json",
]


class Failing(Tiny):
    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 3:
            raise ArithmeticError("no such number")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Things that are no run; a run that was never begun, one that failed, and odd names."""
    folder = tmp_path_factory.mktemp("kinds")
    made = {name: folder / name for name in (*NO_RUNS, "new", "crashed")}
    made["odd"] = folder / "ä ö%d%(x)s $a_$ {b}\n\x1b[31m"
    for name in ("empty", "others"):
        made[name].mkdir()
    (made["others"] / "notes.txt").write_text("notes")
    made["file"].write_text("text\n")
    made["link"].symlink_to("nowhere")
    with pytest.raises(ArithmeticError):
        trained(Failing, made["crashed"], monitor="accuracy", valid_interval=2)
    ledger = made["crashed"] / "ledger.jsonl"
    # As if a script had been started, and not the tests.
    start, *end = ledger.read_text().splitlines()
    (folder / "train.py").write_text("")
    command = {"command": [str(folder / "train.py"), "--output", "run"], "directory": "."}
    ledger.write_text("\n".join([json.dumps({**json.loads(start), **command}), *end, ""]))
    shutil.copytree(made["crashed"], made["odd"])
    exp = make(Tiny, made["new"])
    exp.setup()
    exp.close()
    return made


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server, no picture."""

    def ended(*args: Any, **options: Any) -> None:
        raise SystemExit(0)

    picture = SimpleNamespace(savefig=lambda *args, **options: None)
    monkeypatch.setattr(plot, "draw", lambda *args: picture)
    monkeypatch.setattr(board, "show", ended)


def called(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, and what went to stdout and stderr."""
    capsys.readouterr()
    try:
        code: Any = main(words)
    except SystemExit as end:
        code = end.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def contents(path: Path) -> dict[Path, tuple[int, ...]]:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    states = {one: one.lstat() for one in found if os.path.lexists(one)}
    return {one: (state.st_mtime_ns, state.st_size, state.st_ino) for one, state in states.items()}


def answer(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code of a command; it changes nothing, and if it fails it says so in one line."""
    before = contents(path)
    words = [word if word != "KIND" else str(path) for word in command.split()]
    code, out, err = called(words, capsys)
    assert contents(path) == before
    if code:
        assert (code, out) == (78, "")
        assert err.startswith(f"python -m expbase {words[0]}: error: ")
        assert err.count("\n") == 1
    else:
        assert err == ""
        assert all(map(str.isprintable, out.splitlines()))
    return code


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_clearly_and_changes_nothing(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    failed = {kind for kind, path in kinds.items() if answer(command, path, capsys)}
    if command.startswith(("ls", "rm")):
        assert failed == {"missing", "link", "file"}
    elif command in ("show KIND", "show KIND --json"):
        assert failed == {*NO_RUNS}
    else:
        assert failed == {*NO_RUNS, "new"}


@pytest.mark.parametrize("command", [command for command in COMMANDS if "board" not in command])
def test_damage_is_told_or_does_no_harm(
    kinds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = shutil.copytree(kinds["crashed"], tmp_path / "run")
    for file in FILES:
        data = (run / file).read_bytes()
        failed = []
        for damage in (*DAMAGE.values(), None):
            (run / file).unlink()
            if damage:
                (run / file).write_bytes(damage(data))
            failed.append(bool(answer(command, run, capsys)))
        (run / file).write_bytes(data)
        if file in NEEDED.get(command, ()):
            assert failed[1:] == [True] * 4, file  # half of it may do
        else:
            assert not any(failed), file


def test_odd_names_are_shown_in_a_line(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(["ls", str(kinds["new"].parent)], capsys)
    assert (code, err) == (0, "")
    assert "ä ö%d%(x)s $a_$ {b}\\n\\x1b[31m  Failing     crashed  2/6" in out


# --- an experiment's script ------------------------------------------------------------------

SCRIPT = {
    "--output KIND --evaluate last": {"missing", "link", "file", "new"},
    "--output KIND --export 2": {"empty", "new"},
    "--output KIND": {"file", "link"},
    "--output new --checkpoint_path KIND": {"missing", "others", "file", "new"},
    "--output new --init_model_path KIND": {"link", "empty", "file", "new"},
    "--output new --config KIND": {*NO_RUNS, "new"},
}


@pytest.mark.parametrize("words", SCRIPT)
def test_a_script_answers_in_one_line_and_leaves_what_it_was_given(
    kinds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    parser = default_argument_parser()
    parser.prog = "train.py"
    for kind in SCRIPT[words]:
        before = contents(kinds[kind])
        places = {"KIND": str(kinds[kind]), "new": str(tmp_path / f"new-{kind}")}
        argv = [places.get(word, word) for word in words.split()]
        with pytest.raises(SystemExit) as end:
            expbase.main(Tiny, parser=parser, argv=[*argv, "--device", "cpu"])
        assert contents(kinds[kind]) == before
        assert "Traceback" not in capsys.readouterr().err
        assert str(end.value).startswith("train.py: error: ")
        assert len(str(end.value).splitlines()) == 1


# --- --help ----------------------------------------------------------------------------------


def test_help_fits_80_columns_and_tells_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = [default_argument_parser().format_help()]
    for tool in ("new", "ls", "board", "plot", "rm", "show", "verify", "reproduce", "run"):
        code, out, err = called([tool, "--help"], capsys)
        assert (code, err) == (0, "")
        texts.append(out)
    assert all("exit codes: " in text for text in texts)
    texts.append(called(["--help"], capsys)[1])
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


def test_the_usage_has_the_order_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    for usage in (
        "ls [DIR] [options]",  # after --columns DIR would be a column
        "plot RUN [RUN ...] [options]",
        "show RUN [--digest [D]]",
        "reproduce RUN [options] [-- WORDS]",
        "run FILE [KEY=VALUE ...] [options]",
    ):
        shown = called([usage.split()[0], "--help"], capsys)[1]
        assert shown.startswith(f"usage: python -m expbase {usage}\n")


def test_what_was_typed_wrongly_is_answered_in_one_line_and_with_code_78(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, text in {
        "ls --colums loss": "unrecognized arguments: --colums. Did you mean --columns?",
        "ls --foo": "unrecognized arguments: --foo. --help names all there are.",
        "ls a b": "unrecognized arguments: b. --help names all there are.",
        "run a.yaml --fresch a=1": "unrecognized arguments: --fresch. Did you mean --fresh?",
        "show": "the following arguments are required: RUN",
        "board a --port x": "argument --port: invalid int value: 'x'",
        "plot a --smooth x": "argument --smooth: invalid float value: 'x'",
        "verify a": "the following arguments are required: --output",
        "verify a --output b --iterations 9": "argument --iterations: '9' given; expected 10 or",
        "run a.yaml --nprocs 0": "argument --nprocs: '0' given; expected 1 or more",
        "run a.yaml --nprocs -1": "argument --nprocs: '-1' given; expected 1 or more",
        "no": "argument TOOL: invalid choice: 'no' (choose from ",
    }.items():
        code, out, err = called(words.split(), capsys)
        assert (code, out, err.count("\n")) == (78, "", 1), words
        tool = f" {words.split()[0]}" * (words != "no")
        assert err.startswith(f"python -m expbase{tool}: error: {text}")


def test_a_file_that_is_not_there_is_a_mistake_if_it_was_given(
    kinds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for missing, expected in ((tmp_path / "a.png", 78), (tmp_path / "font", 1)):
        error = FileNotFoundError(2, "No such file or directory", str(missing))
        picture = SimpleNamespace(savefig=Mock(side_effect=error))
        monkeypatch.setattr(plot, "draw", lambda *args, picture=picture: picture)
        words = ["plot", str(kinds["crashed"]), "--output", str(tmp_path / "a.png")]
        code, out, err = called(words, capsys)
        assert (code, out, err.count("\n")) == (expected, "", 1)


def test_a_tool_that_only_reads_imports_no_paddle_and_visualdl(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    run = str(kinds["crashed"])
    commands = [
        ["--help"],
        ["--version"],
        ["board", "--help"],
        ["ls", run],
        ["show", run],
        ["rm", run],
        ["new", str(tmp_path / "mine")],
    ]
    code = (
        "import sys\nsys.modules.update(paddle=None, visualdl=None)\n"  # to import them is an error
        "from expbase.__main__ import main\n"
        f"for words in {commands}:\n"
        "    try:\n        assert main(words) == 0\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        "    assert not {'matplotlib', 'pandas'} & sys.modules.keys()\n"
        f"assert main(['plot', {run!r}, '--output', {str(tmp_path / 'curves.png')!r}]) == 0\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
