"""The README and docs/ say only what is true: code, commands, tables, links, names of tests.

The examples of events.md, components.md and runner.md have tests beside those of their modules, the
pages of moving/ have test_moving.py.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import run_script

from expbase import (
    ExperimentBase,
    __main__,
    default_argument_parser,
    get_default_training_config,
)
from expbase.events import EVENTS
from expbase.extras import mixins

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
TEXT = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
TRAINED = ("README", "data", "loop", "methods", "running")
SHORT = ["--device=cpu", "training.max_iteration=40", "training.valid_interval=20"]
# Tools that start processes, serve until they are stopped, or need a file: their tests run them.
PARSED_ONLY = ("board", "replay", "run", "verify")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT[page], re.DOTALL | re.MULTILINE)


SCRIPT = blocks("README", "python")[0]


def test_the_readme_and_its_script_are_short() -> None:
    assert len(TEXT["README"].splitlines()) <= 180
    assert len(SCRIPT.splitlines()) <= 36


# --- code ------------------------------------------------------------------------------------


def test_the_loop_of_the_readme_is_the_loop() -> None:
    shown, real = (
        [ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(code))) if is_loop(node)]
        for code in (blocks("README", "python")[1], inspect.getsource(ExperimentBase.train))
    )
    assert shown == real != []


def is_loop(node: ast.AST) -> bool:
    return isinstance(node, ast.While)


def test_the_code_of_every_page_has_a_test() -> None:
    with_code = {page for page in PAGES if blocks(page, "python")}
    assert with_code == {*TRAINED, "events", "components", "runner"}


@pytest.mark.parametrize("page", TRAINED)
def test_the_code_of_a_page_runs_and_its_experiments_train(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for code in (SCRIPT, *blocks(page, "python")):
        exec(code, names)  # the documentation's own
    for name, experiment in names.items():
        if inspect.isclass(experiment) and issubclass(experiment, names["Line"]):
            config = experiment.default_config()
            config.training.update(valid_interval=20, save_interval=20, log_interval=20)
            config.training.max_iteration = config.training.max_iteration and 40
            exp = experiment(config, argparse.Namespace(output=name, device="cpu"))
            exp.setup()
            exp.run()
            assert exp.finished, name
            assert exp.iteration == 40 or exp.epochs_ended == 3, name


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
    text = "".join(blocks(page, "bash")).strip().replace("&&", "\n")
    for command in text.splitlines():
        program, *words = shlex.split(command)
        assert program in ("python", "pip"), command
        if program == "python" and "digits" not in command and words != ["-m", "pytest"]:
            yield words


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")])
def test_the_commands_of_a_page_work(
    page: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "workspace"))
    for words in commands(page):
        if "python" in words:  # under paddle's launcher
            words = words[words.index("python") + 1 :]
        if words[0].startswith("tests/"):  # it takes minutes
            script = (ROOT / words[0]).read_text()
            assert all(f'"{word}"' in script for word in words if word.startswith("--")), words
        elif words[:2] != ["-m", "expbase"]:
            train(words[words.index("train.py") + 1 :], monkeypatch)
        elif words[2] in PARSED_ONLY:
            parser_of_tools().parse_args(words[2:])
        else:
            assert __main__.main(words[2:]) == 0, words
    assert Path("curves.png").exists() == ("expbase plot" in TEXT[page])


def train(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SHORT, *words]  # of two values for a key the last one counts
    args = default_argument_parser().parse_intermixed_args(words)
    if args.nprocs == 1 and not args.restarts:  # else it takes processes
        run_here("train.py", words, monkeypatch)


def parser_of_tools() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    tools = parser.add_subparsers()
    for name in ("board", "ls", "new", "plot", "replay", "runner", "show", "verify"):
        getattr(__main__, name).add_parser(tools)
    return parser


def test_a_run_is_continued_as_the_readme_says(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "workspace"))
    train(["--output", "runs/line", "training.max_iteration=300"], monkeypatch)
    promised = next(block for block in blocks("README", "text") if "CONTINUING" in block)
    said = capsys.readouterr().err.splitlines()
    assert said[0].split(" ", 1)[1] == promised.strip().replace("4000", "0040")
    assert float(re.findall(r"valid/error=(\S+)", "\n".join(said))[-1]) < 0.1


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What the first command of the README leaves, and the lines that it says."""
    run = tmp_path_factory.mktemp("digits") / "run"
    (command,) = (line for line in blocks("README", "bash") if "digits" in line)
    words = shlex.split(command.split("&&")[1])[1:-1]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *words, str(run)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    text = result.stderr.replace(str(run), "runs/digits")
    return run, [line.split(" ", 1)[1] for line in text.splitlines()]


def test_digits_reaches_what_the_readme_promises(digits: tuple[Path, list[str]]) -> None:
    run, lines = digits
    promised = next(block for block in blocks("README", "text") if "FINISHED: epoch 18" in block)
    shown = "\n".join(lines[-6:])
    assert re.sub(r"\d[\d.]*", "0", shown) == re.sub(r"\d[\d.]*", "0", promised.strip())
    assert float(re.findall(r"accuracy=(\S+)", shown)[0]) > 0.96
    assert len((run / "test.jsonl").read_text().splitlines()) == 360


def test_a_metric_is_replaced_in_five_lines_and_right_over_ranks(
    digits: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = ROOT / "experiments/digits/macro_f1.py"
    body = script.read_text().split("class MacroF1")[1].split("\n\n")[0].splitlines()
    assert len(body) <= 5
    words = ["--output", str(digits[0]), "--device", "cpu", "--evaluate", "best"]
    two_ranks = run_script(script, *words, "--nprocs", "2")
    assert two_ranks.returncode == 0, two_ranks.stderr
    monkeypatch.syspath_prepend(str(script.parent))
    run_here(script, words, monkeypatch)
    sys.modules.pop("train")  # other experiments have one, too
    expected = json.loads(capsys.readouterr().out)
    assert json.loads(two_ranks.stdout.splitlines()[-1]) == expected
    assert expected["macro_f1"] > 0.9


# --- tables, names, links --------------------------------------------------------------------


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of a table, by how its first row begins; without that row."""
    lines = TEXT[page].split(f"\n| {head}")[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if not row[0].startswith("---")]


def test_the_table_of_keys_holds_every_key_and_its_default() -> None:
    table = {
        name: value.strip('"')
        for names, values, _ in rows("running", "`training.` key")
        for name, value in zip(names.split(", "), values.split(", "), strict=True)
    }
    assert table == {name: str(value) for name, value in get_default_training_config().items()}


def test_the_table_of_mixins_holds_their_defaults() -> None:
    for name, text in rows("methods", "mixin"):
        mixin = getattr(mixins, name.strip("`"))
        section = re.findall(r"`(\w+)`", text)[0]
        for key, value in mixin.default_config()[section].items():
            assert f"{key} {json.dumps(value)}" in text, (name, key)


def test_the_page_of_methods_names_what_there_is_and_nothing_else() -> None:
    public = {name for name in dir(ExperimentBase) if not name.startswith("_")} - {*EVENTS}
    table = TEXT["methods"].split("\n\nThe docstrings")[0]
    named = {word for words in re.findall(r"`([a-z_* ]+)`", table) for word in words.split()}
    attributes = set(
        re.findall(r"^        (\w+): ", ExperimentBase.__mro__[-3].__doc__ or "", re.M)
    )
    setup_steps = {name for name in public if name.startswith("setup_")}
    assert public - setup_steps <= named
    assert named - public - attributes == {"setup_*"}


def test_every_option_that_a_page_names_exists() -> None:
    parser = parser_of_tools()
    (tools,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    helps = default_argument_parser().format_help()
    helps += "".join(tool.format_help() for tool in tools.values())
    launchers = (
        "nproc_per_node nnodes master host rank job_id max_restart elastic_level elastic_timeout"
    )
    slurms = "nodes ntasks time signal requeue open"  # --open-mode, --ntasks-per-node
    proofs = "only faults every"
    theirs = {f"--{name}" for name in f"{launchers} {slurms} {proofs}".split()}
    for page, text in TEXT.items():
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z_]+", text)) - theirs
        assert {option for option in named if option not in helps} == set(), page


def test_every_test_that_a_page_names_exists() -> None:
    named = [n for text in TEXT.values() for n in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text)]
    assert len(named) > 20
    for file, function in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, (file, function)


def test_every_link_leads_to_a_file_and_the_readme_to_every_page() -> None:
    links = {name: re.findall(r"\]\(([^)]+)\)", text) for name, text in TEXT.items()}
    for name, targets in links.items():
        for target in targets:
            path, _, heading = target.partition("#")
            file = PAGES[name].parent / path
            assert file.exists(), (name, target)
            headings = re.findall(r"^#+ (.*)", file.read_text(), re.M) if heading else []
            assert not heading or heading in {h.lower().replace(" ", "-") for h in headings}
    of_readme = {(ROOT / target).resolve() for target in links["README"]}
    assert {*PAGES.values()} - of_readme == {ROOT / "README.md"}


def test_the_page_of_architecture_names_every_module() -> None:
    tree = blocks("architecture", "text")[0]
    package = ROOT / "expbase"
    modules = {path.name for path in package.glob("[a-z]*.py")}
    assert set(re.findall(r"\w+\.py", tree)) == modules
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == folders


def test_every_module_that_a_page_names_exists() -> None:
    for page, text in TEXT.items():
        for name in re.findall(r"`([\w/]+\.py)`", text):
            places = [ROOT / "expbase" / name, ROOT / "tests" / name]
            known = any(place.exists() for place in places) or page == "runner"
            assert known or name in ("train.py", "file.py"), (page, name)
