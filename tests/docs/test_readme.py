"""The code and the commands of the README and of docs/ do what is said there.

The Chinese pages have the same code (test_languages.py). Tables, names and links: test_docs.py.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import paddle
import pytest
import yaml
from pages import ROOT, SCRIPT, TEXT, blocks, fences
from safetensors.paddle import load_file, save_file
from screens import texts
from tiny import run_script

from expbase import ExperimentBase, __main__, default_argument_parser
from expbase.cli import add_options_of_main

# What runs the code of these pages, or folders of them; that of all others is run here.
OWN_TESTS = {
    "experiments/multitask/README": "test_components.py",
    "experiments/ctr/README": "test_yaml_runner.py",
    "moving": "test_moving.py",
    "recipes": "test_recipes.py",  # the commands, too
    "recipes_around": "test_recipes.py",  # the same
    "notebooks": "test_notebooks.py",  # the same
    "jumped": "test_jumped.py",  # the same
    "bisect": "test_bisect.py",  # the same
    "judge": "test_judge.py",  # the same
    "take_out": "test_take_out.py",  # the same
    "same_result": "test_same_result.py",
}


def own_test(page: str) -> str:
    """The file of the test that runs the code of a page, if it is not this one."""
    return OWN_TESTS.get(page) or OWN_TESTS.get(page.split("/")[0], "")


TRAINED = [
    page for page in TEXT if blocks(page, "python") and not own_test(page) and page != "first"
]
SHORT = ["--device=cpu", "training.max_iteration=40", "training.valid_interval=20"]
# Tools that start processes, serve until they are stopped, or need a file: their tests run them.
PARSED_ONLY = ("board", "reproduce", "run", "verify")


def slow(pages: list[str], *long: str) -> list[Any]:
    """The pages as parameters; some take a second, and show nothing that others do not."""
    return [pytest.param(p, marks=pytest.mark.long if p in long else ()) for p in pages]


# --- code ------------------------------------------------------------------------------------


def test_the_loop_of_the_readme_is_the_loop() -> None:
    shown, real = (
        [ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(code))) if is_loop(node)]
        for code in (blocks("README", "python")[1], inspect.getsource(ExperimentBase.train))
    )
    assert shown == real != []


def is_loop(node: ast.AST) -> bool:
    return isinstance(node, ast.While)


def test_the_code_of_every_other_page_has_a_test_of_its_own() -> None:
    for page in TEXT:
        if test := own_test(page):
            text = next((ROOT / "tests").rglob(test)).read_text()
            assert f'"{page.rpartition("/")[2]}' in text or f"{page}.md" in text, page


def test_every_block_of_a_page_is_of_a_language_that_tests_look_for() -> None:
    kinds = {kind for text in TEXT.values() for kind, _ in fences(text)}
    assert kinds == {"bash", "python", "sh", "text", "yaml"}
    assert [name for name, text in TEXT.items() if re.search("^ +```", text, re.M)] == []


@pytest.mark.parametrize(
    "page",
    slow(
        TRAINED,
        "validation",
        "weights",
        "export",
        "looking",
        "loop",
        "processes",
        "events",
        "shares",
    ),
)
def test_the_code_of_a_page_runs_and_its_experiments_train(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    if any("jit.load" in code for code in blocks(page, "python")):
        (tmp_path / "train.py").write_text(SCRIPT)
        run_here("train.py", ["--output=runs/line", *SHORT], monkeypatch)
        run_here("train.py", ["--output=runs/line", "--export=last"], monkeypatch)
    theirs = {"encoder.weight": paddle.ones([1, 1]), "encoder.bias": paddle.zeros([1])}
    save_file(theirs, "other.safetensors")  # from somewhere else, for load_model
    for code in (SCRIPT, *blocks(page, "python")):
        exec(code, names)  # the documentation's own
    for name, experiment in names.items():
        if inspect.isclass(experiment) and issubclass(experiment, names["Line"]):
            config = experiment.default_config()
            config.training.update(valid_interval=20, save_interval=20, log_interval=20)
            if not config.training.max_epoch:
                config.training.max_iteration = 40
            exp = experiment(config, argparse.Namespace(output=name, device="cpu"))
            exp.setup()
            exp.run()
            assert exp.finished, name
            assert exp.iteration == 40 or exp.internals.epochs_ended == 3, name


def test_the_page_of_weights_transposes_a_linear_of_pytorch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = paddle.arange(6, dtype="float32").reshape([3, 2])  # [out, in]
    bias = paddle.ones([3])
    save_file({"encoder.weight": theirs, "encoder.bias": bias}, "other.safetensors")
    (code,) = (code for code in blocks("weights", "python") if ".T.copy()" in code)
    exec(code, {})
    layer = paddle.nn.Linear(2, 3)
    layer.set_state_dict(
        {n.removeprefix("encoder."): v for n, v in load_file("transposed.safetensors").items()}
    )
    x = paddle.to_tensor([[1.0, 2.0]])
    assert (layer(x) == paddle.matmul(x, theirs, transpose_y=True) + bias).all()


def test_the_files_of_the_page_of_config_fit_its_experiment() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for code in (SCRIPT, *blocks("config", "python")):
        exec(code, names)
    (file,) = blocks("config", "yaml")
    config = names["Tuned"].default_config()
    config.merge_from_other_cfg(yaml.safe_load(file))
    assert (config.optim.lr, config.data.batch_size) == (0.01, 40)


# --- commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of the README, a config file, two runs, and one of Parakeet's."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "line.yaml").write_text("training: {log_interval: 5}\n")
    weights = paddle.nn.Linear(1, 1).state_dict()
    paddle.save(weights, str(folder / "runs/old/checkpoints/step-24.pdparams"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_here("train.py", ["--output=runs/line", *SHORT], patch)
        run_here("train.py", ["--output=runs/other", "training.seed=1", *SHORT], patch)
    return folder


def run_here(script: str | Path, words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Runs a script in this process, as `python SCRIPT WORDS` would."""
    patch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command for python, without `python`."""
    text = "\n".join(blocks(page, "bash")).strip().replace("\\\n", "").replace("&&", "\n")
    for command in filter(None, text.splitlines()):
        program, *words = shlex.split(command)
        assert program in ("python", "pip", "mkdocs"), command
        if program == "python" and "digits" not in command and words != ["-m", "pytest"]:
            yield words


COMMANDED = [
    page
    for page in TEXT
    if blocks(page, "bash")
    and not page.startswith(
        ("first", "recipes", "experiments", "jumped", "bisect", "judge", "take_out", "publish")
    )
]


@pytest.mark.parametrize(
    "page",
    slow(COMMANDED, "looking", "config", "validation", "weights", "reproduce", "moving/parakeet"),
)
def test_the_commands_of_a_page_work(
    page: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "workspace"))
    for words in commands(page):
        do(words, monkeypatch)
    assert Path("curves.png").exists() == ("expbase plot" in TEXT[page])


def do(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command of a page does, in this process and in short, if that can be."""
    if "python" in words:  # under paddle's launcher
        words = words[words.index("python") + 1 :]
    if words[0].startswith("tests/"):  # it takes minutes
        script = (ROOT / words[0]).read_text()
        assert all(f'"{word}"' in script for word in words if word.startswith("--")), words
    elif words[:2] != ["-m", "expbase"]:
        train(words[words.index("train.py") + 1 :], monkeypatch)
    elif words[2] in PARSED_ONLY:
        end = words.index("--") if "--" in words else None  # what follows is for the script
        parser_of_tools().parse_args(words[2:end])
    else:
        assert __main__.main(words[2:]) == 0, words


def train(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Of two values for a key the last one counts; a long run is one that there is time to kill.
    words = [*SHORT, *(re.sub(r"max_iteration=\d{5,}", "max_iteration=400", w) for w in words)]
    parser = default_argument_parser()
    add_options_of_main(parser)
    args = parser.parse_intermixed_args(words)
    if args.nprocs == 1 and not args.restarts:  # else it takes processes
        run_here("train.py", words, monkeypatch)


def parser_of_tools() -> argparse.ArgumentParser:
    return __main__.parser_of(__main__.TOOLS)


def test_the_means_over_seeds_are_as_the_page_of_looking_shows_them(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    (command,) = (words for words in commands("looking") if "--seeds" in words)
    (promised,) = (text for text in blocks("looking", "text") if "mean of" in text)
    capsys.readouterr()
    do(command, monkeypatch)
    assert shape(capsys.readouterr().out) == shape(promised)


def shape(table: str) -> list[list[str]]:
    """The words of each line, with 0 for each number but the seeds'."""
    lines = [re.sub(r"(?<!of )\d[\d.]*", "0", line) for line in table.splitlines()]
    return [line.split() for line in lines]


def test_a_run_is_continued_as_the_readme_says(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "workspace"))
    train(["--output", "runs/line", "training.max_iteration=400"], monkeypatch)
    promised = next(block for block in blocks("README", "text") if "CONTINUING" in block)
    said = capsys.readouterr().err.splitlines()
    assert said[0].split(" ", 1)[1] == promised.strip().replace("4000", "0040")
    assert float(re.findall(r"valid/error=(\S+)", "\n".join(said))[-1]) < 0.1


@pytest.mark.long
def test_two_ranks_begin_with_the_card_that_the_pages_show(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--output", str(tmp_path / "run"), "--nprocs", "2", *SHORT]
    result = run_script(tmp_path / "train.py", *words)
    assert result.returncode == 0, result.stderr
    for page in ("data", "processes"):
        (card,) = (block for block in blocks(page, "text") if block.startswith("data "))
        assert [line for line in card.splitlines() if line not in result.stderr] == [], page


@pytest.mark.long
def test_the_checks_before_a_long_run_say_what_the_pages_show(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "workspace"))
    smoke, verify, *_ = commands("running")
    said = run_script(Path("train.py").resolve(), *smoke[1:], "--device=cpu").stdout.splitlines()
    capsys.readouterr()
    assert __main__.main([*verify[2:], "--kills", "1"]) == 0  # of two values the last one counts
    said += capsys.readouterr().out.replace("1 kills", "6 kills").splitlines()[-1:]
    promised = next(block for block in blocks("running", "text") if "smoke test" in block)
    assert said == promised.splitlines()
    assert any(said[-1] in block.splitlines() for block in blocks("resume", "text"))


# --- the first experiment --------------------------------------------------------------------


@pytest.mark.long
def test_the_first_experiment_goes_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it in order, with fewer iterations; each text of the page is said at its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain, script, methods, whole = blocks("first", "python")
    saved, continued, finished, mistake, refused, tested = blocks("first", "text")
    words = [command for command in commands("first") if command != ["plain.py"]]
    smoke, first, again, proof, longer, *others, last = words
    assert (first, longer) == (again, [*first, "training.max_iteration=12000"])
    shorter = [
        "training.max_iteration=25",
        "training.valid_interval=10",
        "training.save_interval=10",
    ]

    Path("plain.py").write_text(plain.replace("range(20)", "range(1)"))
    run_here("plain.py", [], monkeypatch)
    assert "accuracy" in capsys.readouterr().out
    assert Path("spirals.pdparams").exists()

    Path("train.py").write_text(script)
    run_here("train.py", [*smoke[1:], "--device=cpu"], monkeypatch)
    run_here("train.py", [*first[1:], *shorter], monkeypatch)
    expect(saved, capsys)
    shutil.rmtree("runs/first/checkpoints/step-00000025")  # as if it had been killed at 24
    run_here("train.py", [*again[1:], *shorter], monkeypatch)
    expect(continued, capsys)
    do(proof, monkeypatch)
    run_here("train.py", [*again[1:], *shorter], monkeypatch)
    expect(finished, capsys)
    with pytest.raises(SystemExit) as error:
        run_here("train.py", [*again[1:], "training.max_iterations=100"], monkeypatch)
    assert str(error.value) == mistake.strip()

    Path("train.py").write_text(script.replace("\n\nif __name__", f"\n{methods}\n\nif __name__"))
    with pytest.raises(SystemExit) as error:
        run_here("train.py", [*again[1:], *shorter], monkeypatch)
    assert str(error.value).replace(str(tmp_path), "…") == refused.strip()
    for command in others:
        do(
            [*command, *shorter] if "--output" in command and "-m" not in command else command,
            monkeypatch,
        )
    *_, evaluated, exported = capsys.readouterr().out.splitlines()
    assert "accuracy" in json.loads(evaluated)
    layer = paddle.jit.load(json.loads(exported)["exported"])
    assert layer(paddle.zeros([3, 2])).shape == [3, 2]
    Path("train.py").write_text(whole)
    assert last == ["train.py"]
    run_here("train.py", ["training.max_epoch=3", "optim.warmup=5", "--device=cpu"], monkeypatch)
    expect(tested, capsys)
    names = {"first", "lr0.001", "lr0.01", "TwoSpirals"}
    assert {run.name for run in Path("runs").iterdir()} == names
    sys.modules.pop("plain")


def expect(promised: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of a page was said, but for its numbers."""
    said = re.sub(r"\d[\d.]*", "0", capsys.readouterr().err)
    for line in promised.splitlines():
        assert re.sub(r"\d[\d.]*", "0", line) in said, line


# --- digits ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What the first command of the README leaves, and the lines that it says."""
    run = tmp_path_factory.mktemp("digits") / "run"
    (command,) = (line for line in blocks("README", "bash") if "digits" in line)
    script, *words = shlex.split(command.split("&&")[1])[1:-1]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.chdir(ROOT)
        run_here(script, [*words, str(run)], patch)
    text = said.getvalue().replace(str(run), "runs/digits")
    return run, [line.split(" ", 1)[1] for line in text.splitlines()]


def test_digits_reaches_what_the_readme_promises(digits: tuple[Path, list[str]]) -> None:
    run, lines = digits
    promised = next(block for block in blocks("README", "text") if "FINISHED: epoch 18" in block)
    shown = "\n".join(lines[-7:])
    forms = [re.sub(r"\b[\da-f]{64}\b|\d[\d.]*", "0", text) for text in (shown, promised.strip())]
    assert forms[0] == forms[1]
    assert float(re.findall(r"accuracy=(\S+)", shown)[0]) > 0.96
    assert len((run / "test.jsonl").read_text().splitlines()) == 360


def test_the_pictures_show_what_digits_says_and_the_columns_of_ls(
    digits: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, lines = digits

    def normal(line: str) -> str:
        return re.sub(r"\d[\d.,]*", "0", re.sub(r" in \S+$", " in RUN", line))

    pictures = [texts(ROOT / f"docs/{name}.svg") for name in ("promise", "live")]
    shown = [row.split(" ", 1)[1] for rows in pictures for row in rows if row[2:3] == ":"]
    shown = [row for row in shown if not row.startswith("CONTINUING")]
    assert len(shown) > 25
    assert {normal(row) for row in shown} - {normal(line) for line in lines} == set()

    assert __main__.main(["ls", str(run.parent)]) == 0
    printed, pictured = capsys.readouterr().out.splitlines(), texts(ROOT / "docs/ls.svg")[1:]
    today, shown = ([re.split(r"  +", row.strip()) for row in rows] for rows in (printed, pictured))
    assert shown[0] == today[0]
    assert [row[1:4] for row in today[1:]] == [["Digits", "finished", "600/600"]]
    assert today[1][1:4] in [row[1:4] for row in shown]


@pytest.mark.long
def test_the_commands_of_the_page_of_shares_work_in_a_clone(tmp_path: Path) -> None:
    (shown,) = blocks("shares", "bash")
    four, two, verify = shown.replace("\\\n", "").splitlines()
    longer = "training.max_iteration=6000"  # so that there is time to kill it
    assert four.replace("--nprocs 4", "--nprocs 2") == two

    def said(command: str, *changes: tuple[str, str]) -> str:
        for old, new in changes:
            assert old in command
            command = command.replace(old, new)
        words = [sys.executable, *shlex.split(command)[1:]]
        done = forks.run(words, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    place = ("runs/shares", str(tmp_path / "run"))
    assert "[20] FINISHED" in said(four, place, (longer, "training.max_iteration=20"))
    continued = said(two, place, (longer, "training.max_iteration=40"))
    assert "CONTINUING the run" in continued
    assert "[40] FINISHED" in continued
    shorter = ("--ranks", "--iterations 12 --kills 1 --ranks")
    place = ("verified/shares", str(tmp_path / "verified"))
    assert "on 1, 2, 4 processes" in said(verify, place, shorter)


@pytest.mark.long
def test_a_metric_that_is_replaced_is_right_over_ranks(
    digits: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = ROOT / "experiments/digits/macro_f1.py"
    words = ["--output", str(digits[0]), "--device", "cpu", "--evaluate", "best"]
    two_ranks = run_script(script, *words, "--nprocs", "2")
    assert two_ranks.returncode == 0, two_ranks.stderr
    monkeypatch.syspath_prepend(str(script.parent))
    run_here(script, words, monkeypatch)
    sys.modules.pop("train")  # other experiments have one, too
    expected = json.loads(capsys.readouterr().out)
    assert json.loads(two_ranks.stdout.splitlines()[-1]) == expected
    assert expected["macro_f1"] > 0.9
