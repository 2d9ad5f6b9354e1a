"""How the code hangs together: the rules and the budget of the house, measured on the source."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tiny import Tiny, make

from expbase import ExperimentBase
from expbase.engine.life import Step
from expbase.events import Events

PACKAGE = Path(__file__).parent.parent / "expbase"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down: a file imports from its folder, or from one below it. The leaves of the root
# are what every folder knows.
FLOORS = ("tools", "extras", "root", "engine", "checkpoint", "record", "data", "state", "ranks")
FLOORS += ("leaves", "base")
LEAVES = {"help_text", "config", "defaults", "events", "front", "_version"}
# What may only fall: who makes the house smaller writes the new numbers here. Tokens, without
# comments, docstrings and layout: nothing is won by joining lines.
CORE, ALL = 77_121, 96_716
TUPLE_ASSIGNMENTS = 7
FROM_OUTSIDE = 57  # assignments to an attribute of something else than self
GETATTR_ARGS = 1
NO_VERB = 34  # docstrings of functions that do not begin with one

RUN = "_ExperimentBase__run"


def name_of(path: Path) -> str:
    """`state.arrays` for expbase/state/arrays.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def floor(name: str) -> int:
    folder = name.partition(".")[0] if "." in name else "root"
    return FLOORS.index("leaves" if name in LEAVES else folder)


def imports(path: Path) -> Iterator[str]:
    """The files of expbase that a file imports, anywhere in it."""
    known = {name_of(file) for file in FILES}
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name == "expbase":
                if isinstance(node, ast.Import):
                    yield "__init__"
            elif name.startswith("expbase.") and name.removeprefix("expbase.") in known:
                yield name.removeprefix("expbase.")


def test_imports_point_down() -> None:
    up = [
        f"{name_of(path)} imports {imported}"
        for path in FILES
        if name_of(path) not in ("__init__", "__main__")
        for imported in imports(path)
        if floor(imported) < floor(name_of(path))
    ]
    assert up == []


def test_no_imports_go_in_a_circle() -> None:
    graph = {name_of(path): set(imports(path)) - {name_of(path)} for path in FILES}
    while leaves := [name for name, imported in graph.items() if not imported]:
        for leaf in leaves:
            del graph[leaf]
        for imported in graph.values():
            imported -= {*leaves}
    assert graph == {}


def test_no_import_is_hidden_from_these_tests() -> None:
    assert [path.name for path in FILES if "TYPE_CHECKING" in path.read_text()] == []


def private(node: ast.AST) -> Iterator[ast.Attribute]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and re.match(r"_[a-z]", child.attr):
            yield child


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_few_files_lie_in_the_root() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "_version"}
    assert len(files) <= 8


def test_only_what_drives_a_run_takes_the_whole_of_it() -> None:
    """What a Run owns gets what it needs."""
    taking = {
        name_of(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "expbase.engine.run"
    }
    assert taking == {"experiment", "engine.resume"}


def test_few_attributes_are_assigned_from_outside() -> None:
    assigned = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        if not name_of(path).startswith(OPTIONAL)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) != "self"
    ]
    assert len(assigned) <= FROM_OUTSIDE, assigned


def test_options_are_read_in_few_places() -> None:
    read = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
        if re.search(r"\bargs$", ast.unparse(node.args[0]))
    ]
    assert len(read) <= GETATTR_ARGS, read


def begins_with_verb(docstring: str) -> bool:
    return bool(re.match(r"(?!This|Its|Is|Has)[A-Z][a-z-]*s[,;:.]?\s", docstring))


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in functions(path)
        if not any("property" in ast.unparse(mark) for mark in node.decorator_list)
        if (text := ast.get_docstring(node)) and not begins_with_verb(text + " ")
    ]
    assert len(wrong) <= NO_VERB, wrong


def test_the_life_of_a_run_is_no_flags(tmp_path: Path) -> None:
    run = vars(make(Tiny, tmp_path / "run"))[RUN]
    kept = {**vars(type(run)), **vars(run), **vars(type(run.loop)), **vars(run.loop)}
    flags = {name for name, value in kept.items() if isinstance(value, bool)}
    assert flags == {"_is_past_setup", "is_over", "_save_requested"}
    assert len(Step) <= 4


def test_no_method_is_patched() -> None:
    """A tool goes in front of a class by put_in_front; nothing is assigned to a class."""
    patched = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if node.attr not in ("iteration", "epoch")  # the counters of one experiment
        if re.search(r"(^|[.])(Experiment\w*|[Ee]xperiment)$", ast.unparse(node.value))
    ]
    assert patched == []


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_file_to_read_has_at_most_450_lines_and_no_other_has_more() -> None:
    assert [(name_of(path), lines(path)) for path in FILES if lines(path) > 450] == []


def length(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def test_a_function_has_at_most_40_lines() -> None:
    long = [
        f"{name_of(path)}:{node.name} {length(node)}"
        for path in FILES
        for node in functions(path)
        if length(node) > 40
    ]
    assert long == []


def test_the_loop_has_at_most_30_lines() -> None:
    loop = {"going_on", "end_iteration"}
    nodes = [node for node in functions(PACKAGE / "engine/loop.py") if node.name in loop]
    nodes += [node for node in functions(PACKAGE / "experiment.py") if node.name == "train"]
    without_docstrings = [length(node) - length(node.body[0]) for node in nodes]
    assert len(nodes) == 3
    assert sum(without_docstrings) <= 30


OPTIONAL = ("extras", "tools")
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def tokens(path: Path) -> int:
    """The size of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    owners = [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]
    docstrings = {node.body[0].lineno for node in owners if ast.get_docstring(node)}
    return sum(
        token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    )


def test_the_house_does_not_grow() -> None:
    core = [path for path in FILES if not name_of(path).startswith(OPTIONAL)]
    assert sum(map(tokens, core)) <= CORE
    assert sum(map(tokens, FILES)) <= ALL


def tuple_assignments(path: Path) -> int:
    """How many assignments join several into one: `a, b = x, y`."""
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Assign)]
    return sum(
        isinstance(node.value, ast.Tuple) and any(isinstance(t, ast.Tuple) for t in node.targets)
        for node in nodes
    )


def test_no_more_assignments_are_joined() -> None:
    assert sum(map(tuple_assignments, FILES)) <= TUPLE_ASSIGNMENTS


def test_an_experiment_inherits_from_its_events_alone() -> None:
    assert ExperimentBase.__mro__[1:] == (Events, object)


def test_an_experiment_has_one_private_attribute(tmp_path: Path) -> None:
    attributes = vars(make(Tiny, tmp_path / "run"))
    assert [name for name in attributes if name.startswith("_")] == [RUN]


def own_private_names(cls: ast.ClassDef) -> set[str]:
    """What a class calls private and makes itself: its methods, and what it assigns on self."""
    methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    assigned = {
        node.attr
        for node in private(cls)
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return {name for name in methods if re.match(r"_[a-z]", name)} | assigned


def test_no_class_uses_a_private_name_of_another_one() -> None:
    classes = [
        node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    ]
    own = {cls: own_private_names(cls) for cls in classes}
    ours = {name for names in own.values() for name in names}
    crossing = [
        f"{cls.name} uses {ast.unparse(node)}"
        for cls in classes
        for node in private(cls)
        if node.attr in ours - own[cls]
    ]
    assert crossing == []
