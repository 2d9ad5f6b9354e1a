"""The package: what it requires, what it exports, and that importing it does nothing.

And what stands beside it: CITATION.cff, and the commands and links of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from pages import code_of, headings, links, slug

import expbase
from expbase import __main__

ROOT = Path(__file__).parent.parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
SETUP = ("python -m venv .venv", "source .venv/bin/activate")
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
    return caught, python, handlers, dict(os.environ), threads, paddle.get_device()
before = look()
sys.stdout.write("|"), sys.stderr.write("|")
import expbase
from expbase import *
sys.stdout.write("|"), sys.stderr.write("|")
for one, other in zip(before, look()):
    assert one == other, (one, other)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process in which a warning of expbase's would be an error."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lines_of(text: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {line for line in lines if line}


def options() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


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
    required = lines_of(options()["options"]["install_requires"])
    assert required
    assert not [name for name in required if name.lower().startswith("paddle")]


def test_requirements_txt_and_setup_cfg_name_the_same_ranges() -> None:
    parser = options()
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
    assert "protobuf>=3.20.2,<7" in lines_of(options()["options"]["install_requires"])


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


@pytest.mark.parametrize(
    ("package", "file"), [("yacs", "config.py"), ("visualdl", "visualizer.py")]
)
def test_yacs_and_visualdl_are_each_imported_in_one_file(package: str, file: str) -> None:
    assert [path.name for path in SOURCES if package in imported(path)] == [file]


def test_an_experiment_imports_no_yacs() -> None:
    scripts = sorted((ROOT / "experiments").rglob("*.py"))
    assert scripts
    assert not [path for path in scripts if "yacs" in imported(path)]


def test_types_are_shipped() -> None:
    assert (ROOT / "expbase" / "py.typed").exists()
    assert {"py.typed", "*.pyi"} < {*options()["options.package_data"]["expbase"].split()}


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


# --- beside the package ----------------------------------------------------------------------


def test_the_experiments_are_shipped_as_they_are() -> None:
    assert (ROOT / "expbase/experiments").resolve() == ROOT / "experiments"  # git keeps the link
    kept = options()["options.package_data"]["expbase"].split()
    files = [path for path in (ROOT / "experiments").glob("*/*") if path.is_file()]
    assert [path for path in files if f"experiments/*/*{path.suffix}" not in kept] == []


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= {*citation}  # as CFF 1.2.0 demands
    metadata = options()["metadata"]
    assert (citation["cff-version"], citation["title"]) == ("1.2.0", metadata["name"])
    assert citation["version"] == expbase.__version__
    assert citation["license"] == metadata["license"]
    assert citation["authors"] == [{"name": metadata["author"]}]


def test_the_commands_of_contributing_are_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = code_of(CONTRIBUTING.read_text(), "bash")
    ci = (ROOT / ".ci/run").read_text().splitlines()
    for command in "".join(blocks).splitlines():
        match shlex.split(command):
            case ["pip", "install", "-e", extras]:
                assert {*extras.strip(".[]").split(",")} <= {*options()["options.extras_require"]}
            case ["python", "-m", "pytest", *words]:
                text = "".join((ROOT / word).read_text() for word in words if "/" in word)
                assert all(f"def {word}(" in text for word in words if word.startswith("test_"))
            case ["python", "-m", "expbase", *words]:
                assert __main__.main(words) == 1
                assert "RUN" in capsys.readouterr().err  # there is no such run
            case ["python", script, *words] if script.startswith("tests/"):
                text = (ROOT / script).read_text()
                assert all(f'"{word}"' in text for word in words)
                assert command in ci or "--only" in words
            case _:
                assert any(line.startswith(command) for line in (*ci, *SETUP, ".ci/run"))
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_links_of_contributing_lead_somewhere() -> None:
    for target in links(CONTRIBUTING):
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        found = {slug(text) for _, text in headings((ROOT / path).read_text())} if heading else {""}
        assert heading in found, target


@pytest.mark.parametrize("module", ["ranks.world", "run", "state.weights", "tools.parakeet"])
def test_a_module_that_has_moved_is_an_error_that_names_the_place(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"expbase\.{module}: has moved; expected .+"):
        importlib.import_module(f"expbase.{module}")
