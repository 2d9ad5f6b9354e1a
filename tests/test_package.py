"""The package: what it requires, what it exports, and that importing it does nothing.

And what stands beside it: CITATION.cff, what CI does, and the commands of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pretend
import pytest
import yaml
from packaging.requirements import Requirement
from pages import code_of
from repository import setup_cfg

import expbase
from expbase import __main__

ROOT = Path(__file__).parent.parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
SETUP = ("python -m venv .venv", "source .venv/bin/activate")
CHECKS = [  # of CI, in this order; a warning of mkdocs's counts only where it says it
    "python -m pytest",
    "python -m pytest -m long",
    "ruff check .",
    "ruff format --check .",
    "mypy --strict expbase",
    "mypy --strict expbase/__init__.py",
    "mkdocs build --strict",
    "python -m pytest tests/docs/test_site.py",
    "python tests/proofs/packages.py --built",
]
SOURCES = sorted((ROOT / "expbase").rglob("*.py"))
EXPORTED = {
    "Config", "ConfigError", "ExperimentBase", "default_argument_parser",
    "get_default_training_config", "main", "on", "rank_zero_only",
}  # fmt: skip
LOOK = """
import os, signal, sys, threading
import paddle
def look():
    import logging
    kinds = ("SigBlk", "SigIgn", "SigCgt")  # SigQ counts those of other processes, too
    caught = [line for line in open("/proc/self/status") if line.startswith(kinds)]
    python = [signal.getsignal(number) for number in signal.Signals]
    loggers = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", [])]
    threads = threading.active_count()
    imports = list(sys.meta_path), list(sys.path), list(sys.path_hooks)
    return caught, python, handlers, dict(os.environ), threads, paddle.get_device(), imports
before = look()
sys.stdout.write("|"), sys.stderr.write("|")
import expbase
from expbase import *
sys.stdout.write("|"), sys.stderr.write("|")
for one, other in zip(before, look()):
    assert one == other, (one, other)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, in which nothing of this one's environment is that ours set."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    kept = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH"} & {*os.environ}
    environment = {name: os.environ[name] for name in kept}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def lines_of(text: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {line for line in lines if line}


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_installing_expbase_never_installs_a_paddle() -> None:
    required = lines_of(setup_cfg()["options"]["install_requires"])
    assert required
    assert not [name for name in required if name.lower().startswith("paddle")]


def test_what_expbase_imports_is_declared_or_is_paddle_or_of_an_extra() -> None:
    # VisualDL's own server is one of Flask: ours only asks who calls it.
    known = {"yaml": "PyYAML", "paddle": None, "flask": None, "expbase": None}
    parser = setup_cfg()
    declared = {Requirement(one).name for one in lines_of(parser["options"]["install_requires"])}
    files = [path for path in (ROOT / "expbase").rglob("*.py") if "experiments" not in path.parts]
    names = set().union(*map(imported, files)) - sys.stdlib_module_names
    assert {"psutil", "matplotlib", "numpy", "yaml"} <= names
    assert {known.get(name, name) for name in names} - declared <= {None}


def test_requirements_txt_and_setup_cfg_name_the_same_ranges() -> None:
    parser = setup_cfg()
    required = lines_of(parser["options"]["install_requires"])
    cpu = {f'{name}; extra == "cpu"' for name in lines_of(parser["options.extras_require"]["cpu"])}
    assert lines_of((ROOT / "requirements.txt").read_text()) == required | cpu


def test_requirements_txt_names_paddle_and_installs_none_over_a_users_own() -> None:
    named = {}
    for line in lines_of((ROOT / "requirements.txt").read_text()):
        requirement = Requirement(line)
        marker = requirement.marker
        named[requirement.name] = marker is None or marker.evaluate({"extra": ""})
    assert named["visualdl"]
    assert named["yacs"]
    assert not named["paddlepaddle"]


def test_who_installs_a_paddle_by_hand_gets_a_protobuf_that_fleet_can_use() -> None:
    assert "protobuf>=3.20.2,<7" in lines_of(setup_cfg()["options"]["install_requires"])


def test_the_exported_names_are_these_and_at_most_ten() -> None:
    assert set(expbase.__all__) == EXPORTED
    assert len(expbase.__all__) == len(EXPORTED) <= 10
    assert {name for name in dir(expbase) if not name.startswith("_")} == EXPORTED
    for name in EXPORTED:
        assert getattr(expbase, name).__name__ == name
    stub = ast.parse((ROOT / "expbase" / "__init__.pyi").read_text())
    assert {alias.name for node in stub.body for alias in node.names} == {*EXPORTED, "__version__"}  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'expbase' has no attribute 'mian'"):
        expbase.mian  # noqa: B018


def test_yacs_and_visualdl_are_each_imported_in_one_file_and_in_no_experiment() -> None:
    scripts = sorted((ROOT / "experiments").rglob("*.py"))
    assert scripts
    for package, file in (("yacs", "config.py"), ("visualdl", "visualizer.py")):
        naming = [path for path in SOURCES + scripts if package in path.read_text()]
        assert [path.name for path in naming if package in imported(path)] == [file]


def test_types_are_shipped() -> None:
    assert (ROOT / "expbase" / "py.typed").exists()
    assert {"py.typed", "*.pyi"} < {*setup_cfg()["options.package_data"]["expbase"].split()}


def test_importing_expbase_does_nothing_that_importing_paddle_has_not_done() -> None:
    result = python(LOOK)
    assert result.returncode == 0, result.stderr
    for stream in (result.stdout, result.stderr):
        assert stream.split("|")[1] == ""


def test_without_paddle_the_import_says_what_to_install() -> None:
    result = python("import sys; sys.modules['paddle'] = None; from expbase import main")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: expbase needs PaddlePaddle: pip install")
    assert "paddlepaddle-gpu" in last
    assert "During handling" not in result.stderr


def test_nothing_tells_anybody_to_install_the_expbase_of_another_project() -> None:
    gap = r"""["'`,\s\\#]+"""
    install = rf"pip3?{gap}install(?:{gap}-[\w-]+)*{gap}"
    told = re.compile(install + r"expbase(?![\w./-])")
    wrong = "pip install X", 'pip install\n  "X[cpu]"', '"pip", "install", "-q", "X"'
    assert all(told.search(words.replace("X", "expbase")) for words in wrong)
    assert not told.search('pip install "paddle-expbase[cpu]"; pip uninstall expbase')
    kinds = (*".py .pyi .md .cfg .toml .txt .cff .yaml .yml .ipynb .svg".split(), "")
    places = ("expbase", "experiments", "docs", "tests", ".ci")
    files = [*ROOT.glob("*"), *(path for place in places for path in (ROOT / place).rglob("*"))]
    texts = {path: path.read_text() for path in files if path.is_file() and path.suffix in kinds}
    assert len(texts) > 400
    assert [path for path, text in texts.items() if told.search(text)] == []


# --- beside the package ----------------------------------------------------------------------


def test_the_experiments_are_shipped_as_they_are() -> None:
    assert (ROOT / "expbase/experiments").resolve() == ROOT / "experiments"  # git keeps the link
    kept = setup_cfg()["options.package_data"]["expbase"].split()
    files = [path for path in (ROOT / "experiments").glob("*/*") if path.is_file()]
    assert [path for path in files if f"experiments/*/*{path.suffix}" not in kept] == []


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= {*citation}  # as CFF 1.2.0 demands
    metadata = setup_cfg()["metadata"]
    assert (citation["cff-version"], citation["title"]) == ("1.2.0", metadata["name"])
    assert citation["version"] == expbase.__version__
    assert citation["license"] == metadata["license"]
    assert citation["authors"] == [{"name": metadata["author"]}]


def test_the_commands_of_contributing_are_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = "".join(code_of(CONTRIBUTING.read_text(), "bash")).splitlines()
    assert [command for command in CHECKS if command not in commands] == CHECKS[-2:-1]
    for command in commands:
        match shlex.split(command):
            case ["pip", "install", "-e", extras]:
                assert {*extras.strip(".[]").split(",")} <= {*setup_cfg()["options.extras_require"]}
            case ["python", "-m", "pytest", *words]:
                text = "".join((ROOT / word).read_text() for word in words if "/" in word)
                assert all(f"def {word}(" in text for word in words if word.startswith("test_"))
            case ["python", "-m", "expbase", *words]:
                assert __main__.main(words) == 78
                assert "RUN" in capsys.readouterr().err  # there is no such run
            case ["python", script, *words] if script.startswith("tests/"):
                text = (ROOT / script).read_text() + f'"{pretend.NAME}"'
                assert all(f'"{word}"' in text for word in words)
                assert command in CHECKS or {"--only", "--short"} & {*words}
            case _:
                assert command in (*CHECKS, *SETUP, ".ci/run")


def run_ci(folder: Path, failing: int = 0) -> tuple[int, list[str]]:
    """Runs .ci/run where each command does nothing and one fails; its code, and what it called."""
    folder.mkdir()
    called = folder / "called"
    stub = f'#!/bin/sh\necho "${{0##*/}} $*" >> {called}\n[ $(wc -l < {called}) -ne {failing} ]\n'
    for name in ("python", "python3", "pip", "ruff", "mypy", "mkdocs"):
        (folder / name).write_text(stub)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    result = subprocess.run([ROOT / ".ci/run"], env=environment, capture_output=True, check=False)
    # Where the environment and the site lie, a temporary directory, is left out.
    lines = [re.sub(r"( --site-dir)? /\S+$", "", line) for line in called.read_text().splitlines()]
    return result.returncode, lines


def test_ci_makes_every_check_and_ends_with_the_first_that_fails(tmp_path: Path) -> None:
    code, called = run_ci(tmp_path / "whole")
    assert code == 0
    assert [line for line in called if line != "python3 -m venv" and line[:4] != "pip "] == CHECKS
    for number in range(1, len(called) + 1):
        assert run_ci(tmp_path / str(number), number) == (1, called[:number])
