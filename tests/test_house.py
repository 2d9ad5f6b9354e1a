"""How the code hangs together: the rules of the house, looked for in the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tiny import Tiny, make, trained

from expbase import ExperimentBase
from expbase.base.errors import Mistake
from expbase.checkpoint import pdparams  # noqa: F401  # its own error, too
from expbase.engine.run_states import Step
from expbase.events import Events

PACKAGE = Path(__file__).parent.parent / "expbase"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down: a file imports from its folder, or from one below it. The leaves of the root
# are what every folder knows.
FLOORS = ("tools", "extras", "root", "doctor", "engine", "checkpoint", "record", "data", "state")
FLOORS += ("ranks", "leaves", "base")
LEAVES = {"help_text", "config", "events", "mixins_in_front", "training", "_version"}

RUN = "_ExperimentBase__run"


def name_of(path: Path) -> str:
    """`state.arrays` for expbase/state/arrays.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file, each before those within it."""
    return [*ast.walk(tree(path))]


def floor(name: str) -> int:
    folder = name.partition(".")[0] if "." in name else "root"
    return FLOORS.index("leaves" if name in LEAVES else folder)


@cache
def imports(path: Path) -> list[str]:
    """The files of expbase that a file imports, anywhere in it."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[str]:
    known = {name_of(file) for file in FILES}
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [n.value for n in node.args if isinstance(n, ast.Constant)]
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


def test_nothing_knows_the_doctor_but_one_line_of_the_experiment() -> None:
    knowing = {
        name_of(path)
        for path in FILES
        for name in imports(path)
        if name.startswith("doctor") and not name_of(path).startswith("doctor.")
    }
    assert knowing == {"experiment"}


# Lines of training that say that something may be a mistake: where a result would be wrong, or work
# lost. What only looks is in doctor/.
WARNED = """
    checkpoint.checkpointer checkpoint.model_files checkpoint.compare_rank_weights engine.evaluation
    engine.loop engine.report engine.resume engine.run engine.start engine.subscribers ranks.hang
    record.visualizer state.unsavable
"""


def test_training_warns_in_few_places() -> None:
    rooms = ("engine.", "state.", "checkpoint.", "data.", "ranks.", "record.")
    warned = {name for name in calls(r".*\b_?warn(ing)?") if name.startswith(rooms)}
    assert warned == {*WARNED.split()}


def test_no_imports_go_in_a_circle() -> None:
    graph = {name_of(path): set(imports(path)) - {name_of(path)} for path in FILES}
    while leaves := [name for name, imported in graph.items() if not imported]:
        for leaf in leaves:
            del graph[leaf]
        for imported in graph.values():
            imported -= {*leaves}
    assert graph == {}


def test_the_core_imports_nothing_optional() -> None:
    """It imports what setup.cfg requires, and paddle; tools and extras may want more."""
    required = {"numpy", "paddle", "rich", "visualdl", "yacs", "yaml"}
    others = {
        f"{name_of(path)} imports {name}"
        for path in FILES
        if not name_of(path).startswith(("tools.", "extras."))
        for node in nodes(path)
        for name in outside(node)
        if name not in required
    }
    assert others == {"ranks.store imports psutil"}  # which VisualDL brings


def outside(node: ast.AST) -> set[str]:
    """The packages that an import names, but for Python's own and ours."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    roots = {name.partition(".")[0] for name in names}
    return roots - {*sys.stdlib_module_names, "expbase"}


def test_what_is_due_follows_from_numbers_alone() -> None:
    assert imports(PACKAGE / "engine/due.py") == []


def test_no_import_is_hidden_from_these_tests() -> None:
    """One place hides something from type checkers, no import: pyright would not see a typo."""
    using = [path for path in FILES if "TYPE_CHECKING" in path.read_text()]
    assert [path.name for path in using] == ["experiment.py"]
    hidden = [
        n for n in nodes(using[0]) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n)
    ]
    [block] = map(ast.unparse, hidden)
    assert block == "if not TYPE_CHECKING:\n    __getattr__ = raise_no_attribute"
    relative = [
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def private(node: ast.AST) -> Iterator[ast.Attribute]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and re.match(r"_[a-z]", child.attr):
            yield child


def test_few_files_lie_in_the_root() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "_version"}
    assert len(files) <= 8


def test_only_what_drives_a_run_takes_the_whole_of_it() -> None:
    """What a Run owns gets what it needs."""
    taking = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == "expbase.engine.run"
    }
    assert taking == {"experiment", "engine.resume"}


def test_no_attribute_of_a_part_is_assigned_from_outside() -> None:
    """What the run, its loop or an experiment has to tell a part, it tells by a method."""
    assigned = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if name_of(path).startswith(("engine.", "experiment"))
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if re.fullmatch(r"(self|run)([.]__run)?([.][a-z]\w*)+", ast.unparse(node.value))
    ]
    assert assigned == []


def test_options_are_read_in_one_place() -> None:
    read = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
        if re.search(r"\bargs$", ast.unparse(node.args[0]))
    ]
    assert len(read) <= 1, read


def test_a_run_says_nothing_but_by_what_outlives_its_terminal() -> None:
    """Tools print, and end when nobody reads them; unpickler.py answers its parent by stdout."""
    written = r"print|(traceback|warnings)\.print_\w+|sys\.(__)?std(out|err)(__)?\..*write\w*"
    bare = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if not name_of(path).startswith(("base.terminal", "tools.", "checkpoint.unpickler"))
        for node in nodes(path)
        if isinstance(node, ast.Call) and re.fullmatch(written, ast.unparse(node.func))
    ]
    assert bare == []


def test_the_life_of_a_run_is_no_flags(tmp_path: Path) -> None:
    run = vars(trained(Tiny, tmp_path / "run"))[RUN]  # what comes later, too
    kept = {**vars(type(run)), **vars(run), **vars(type(run.loop)), **vars(run.loop)}
    flags = {name for name, value in kept.items() if isinstance(value, bool)}
    assert flags == {"is_over", "_save_requested"}
    assert len(Step) <= 4


def test_no_method_is_patched() -> None:
    """A tool goes in front of a class by put_in_front; nothing is assigned to a class."""
    patched = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if node.attr not in ("iteration", "epoch")  # the counters of one experiment
        if re.search(r"(^|[.])(Experiment\w*|[Ee]xperiment)$", ast.unparse(node.value))
    ]
    assert patched == []


def calls(pattern: str) -> set[str]:
    """The files that call what a pattern names."""
    return {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and re.fullmatch(pattern, ast.unparse(node.func))
    }


def test_gradients_are_set_in_one_place() -> None:
    """A step's clear_grad() is the optimizer's."""
    assigned = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if node.attr in ("grad", "grad_")
    }
    by_method = calls(r".*\.(_set_grad_ivar|_unset_fake_empty|clear_gradient)")
    assert assigned | by_method == {"base.gradients"}


def test_a_failure_leaves_by_one_road() -> None:
    assert calls(r".*\bnote_failure|.*\breport\.failure") == {"engine.run"}


# Raised for a caller that catches it: of ours, of Python's, or argparse.
CAUGHT = {
    *("base.arrays: ValueError", "checkpoint.pdparams: ValueError", "base.any_object: LookupError"),
    *("checkpoint.model_files: ValueError", "checkpoint.unpickler: _Refused"),
    *("base.json_values: LookupError", "base.yaml_words: yaml.constructor.ConstructorError"),
    *("base.terminal: AttributeError", "config: AttributeError", "cli: argparse.ArgumentTypeError"),
}
# The end of a process, and of an import without paddle.
ENDS = {
    "cli: MistakeExit",
    "tools.child_processes: SystemExit",
    "base.import_paddle: ModuleNotFoundError",
}


def test_an_error_with_a_text_is_a_mistake() -> None:
    """So that it is shown as a sentence; what is raised without a text is for a caller."""
    raised = {
        f"{name_of(path)}: {ast.unparse(node.exc.func)}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        if re.search(r"^(.*[.])?_?[A-Z]\w*$", ast.unparse(node.exc.func))
    }
    mistakes = {kind.__name__ for kind in derived_from(Mistake)}
    assert {one for one in raised if one.split()[1] not in mistakes} == CAUGHT | ENDS


def derived_from(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield from (one, *derived_from(one))


def test_the_words_before_a_reason_for_not_exact_stand_once() -> None:
    """Three files write them, and `verify` looks for them."""
    writing = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and str(node.value).startswith("not exact:")
    }
    assert writing == {"record.logs"}


def test_each_step_of_setup_is_undone_by_one_stack(tmp_path: Path) -> None:
    run = vars(make(Tiny, tmp_path / "run"))[RUN]
    stacks = [name for name, part in vars(run).items() if isinstance(part, ExitStack)]
    assert stacks == ["_on_close"]


def test_shares_are_known_to_few() -> None:
    """Others are given a number of batches, and who sums; keys and messages may have the word."""
    knowing = {name_of(path) for path in FILES for name in imports(path) if "shares" in name}
    assert {name for name in knowing if not name.startswith("engine.shares.")} == {"engine.run"}
    asked = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "shares"
    }
    asked = {name for name in asked if not name.startswith(("engine.shares.", "tools."))}
    assert asked == {"cli", "doctor.first_updates", "engine.run"}


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


def test_no_two_classes_have_one_name() -> None:
    """A search for a class finds it; the scripts in experiments/ are none of these files."""
    owners: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


def test_no_class_uses_a_private_name_of_another_one() -> None:
    classes = [node for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)]
    own = {cls: own_private_names(cls) for cls in classes}
    ours = {name for names in own.values() for name in names}
    crossing = [
        f"{cls.name} uses {ast.unparse(node)}"
        for cls in classes
        for node in private(cls)
        if node.attr in ours - own[cls]
    ]
    assert crossing == []


SOURCE = re.compile(r"\b((?:paddle|visualdl|rich|safetensors)/[\w/]+\.py)(?:, ([\w.]+))?")


def test_a_file_of_another_package_that_a_comment_names_is_there_with_its_function() -> None:
    """So a reader can look whether the trap of which the comment speaks is there yet."""
    wrong, count = [], 0
    for path in FILES:
        text = re.sub(r"\n *(# )?", " ", path.read_text())
        for file, name in SOURCE.findall(text):
            count += 1
            package, _, rest = file.partition("/")
            source = Path(str(find_spec(package).origin)).parent / rest  # type: ignore[union-attr]
            known = source.read_text() if source.is_file() else ""
            function = name.rstrip(".").rpartition(".")[2]
            if not known or not re.search(rf"\b{function}\b", known):
                wrong.append(f"{name_of(path)}: {file}, {name}")
    assert wrong == []
    assert count > 30
