"""The code that docstrings of expbase show is bound to what it calls: names, methods, arguments.

Nothing of it is run. In the synopsis of a file a method of a variable is one of the class that the
synopsis made it of, or whose name it has; else of any class that the file knows. Names that it has
from its user or from other packages are in two lists here. The examples of a class or a function
stand in a user's program, of which nothing else is known.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import expbase
from expbase import ExperimentBase

PACKAGE = Path(expbase.__file__).parent
OF_THE_USER = {"Encoder", "Kinds", "Tags", "function", "start_children", "train_batch", "write"}
OF_OTHERS = {"BatchSampler", "DataLoader", "InputSpec", "ThreadPoolExecutor", "executor", "file"}
UNKNOWN = object()


class Synopsis(typing.NamedTuple):
    place: str
    module: str
    code: str
    is_of_file: bool


def synopses() -> Iterator[Synopsis]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                place = f"{module}.{getattr(node, 'name', '')}".rstrip(".")
                for code in codes(ast.get_docstring(node) or ""):
                    is_of_file = isinstance(node, ast.Module)
                    yield Synopsis(place, module.removesuffix(".__init__"), code, is_of_file)


def codes(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring that are Python with a call in it, or look like it."""
    for paragraph in re.split(r"\n\s*\n(?=\s*\S)", docstring):
        paragraph = re.sub(r"\A *Examples?:\n", "", paragraph)
        code = written_out(textwrap.dedent(paragraph).strip("\n"))
        looks_like_it = paragraph.startswith(" ") and re.match(r"(\w+ = )?[\w.]+\(", code)
        if parsed(code) or looks_like_it:
            yield code


def written_out(code: str) -> str:
    """`f(a, …)` as f(a, ...), which may lack arguments."""
    code = re.sub(r"(=…)?, …\)", r"\1, *...)", code.replace("(…)", "(*...)"))
    return code.replace("…", "...")


def parsed(code: str) -> ast.Module | None:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    return tree if any(isinstance(node, ast.Call) for node in ast.walk(tree)) else None


FOUND = [*synopses()]


@functools.cache
def defined() -> dict[str, Any]:
    """The functions and classes of all files, by name, but for names of several."""
    found: dict[str, Any] = {}
    for module in {synopsis.module for synopsis in FOUND}:
        for name, value in vars(importlib.import_module(module)).items():
            if getattr(value, "__module__", "") == module:
                found[name] = UNKNOWN if name in found else value
    return found


class Reader(ast.NodeVisitor):
    """Follows a synopsis: the class of each variable, and what is called of it."""

    def __init__(self, module: ModuleType, *, is_of_file: bool) -> None:
        self.module = module
        self.is_of_file = is_of_file
        self.kinds: dict[str, Any] = {}  # the class of a variable, UNKNOWN if nothing tells it
        self.wrong: list[str] = []

    # --- variables

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.note(target, self.kind_of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.note(node.target, UNKNOWN)
        for line in node.body:
            self.visit(line)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.note(item.optional_vars, UNKNOWN)
        for line in node.body:
            self.visit(line)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.kinds[node.name] = UNKNOWN
        for base in node.bases:
            self.value_of(base)

    def note(self, target: ast.expr, kind: Any) -> None:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                self.kinds[part.id] = kind if part is target else UNKNOWN

    # --- uses

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function, is_method = self.value_of(node.func, is_called=True)
        if function is UNKNOWN:
            return
        try:
            signature = inspect.signature(function)
        except ValueError:  # one of C
            return
        starred = any(isinstance(word, ast.Starred) for word in node.args)
        arguments = [word for word in node.args if not isinstance(word, ast.Starred)]
        keywords = {word.arg: ... for word in node.keywords if word.arg}
        bind = signature.bind_partial if starred else signature.bind
        try:
            bind(*[...] * (len(arguments) + is_method), **keywords)
        except TypeError as error:
            self.wrong.append(f"{ast.unparse(node)}: {error}; it is {signature}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self.value_of(node)

    def value_of(self, node: ast.expr, *, is_called: bool = False) -> tuple[Any, bool]:
        """What an expression names, and whether its first argument is the object before the dot."""
        if isinstance(node, ast.Name):
            return self.value_of_name(node.id), False
        if not isinstance(node, ast.Attribute):
            return UNKNOWN, False
        if isinstance(node.value, ast.Name) and node.value.id not in self.kinds:
            owner = self.value_of_name(node.value.id, is_called=False)
            if owner is not UNKNOWN:  # a module or a class
                if not hasattr(owner, node.attr):
                    self.wrong.append(f"{ast.unparse(node)}: there is no such name")
                return getattr(owner, node.attr, UNKNOWN), False
        owners = self.classes_of(node.value, is_called=is_called)
        for owner in owners:
            if node.attr in attributes(owner):
                function = inspect.getattr_static(owner, node.attr, UNKNOWN)
                return (function, True) if inspect.isfunction(function) else (UNKNOWN, False)
        # The keys of a Config are attributes, and a user gives an experiment names of his own.
        if owners and not any(issubclass(owner, (dict, super, ExperimentBase)) for owner in owners):
            names = ", ".join(owner.__name__ for owner in owners)
            self.wrong.append(f"{ast.unparse(node)}: {node.attr!r} is nothing of {names}")
        return UNKNOWN, False

    def value_of_name(self, name: str, *, is_called: bool = True) -> Any:
        if name in self.kinds:
            return UNKNOWN
        for known in (vars(self.module), vars(builtins)):
            if name in known:
                return known[name]
        if name in OF_THE_USER | OF_OTHERS:
            return UNKNOWN
        if name in defined():
            return defined()[name]
        if is_called and self.is_of_file:
            self.wrong.append(f"{name}: neither of the module nor of the synopsis")
        return UNKNOWN

    def classes_of(self, node: ast.expr, *, is_called: bool) -> list[type]:
        """The classes of which an object may be, whose method is called; [] if nothing tells."""
        kind = self.kind_of(node)
        if kind is not UNKNOWN:
            return [kind]
        root = next(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        if root in OF_THE_USER | OF_OTHERS:
            return []
        if root in ("exp", "experiment") and isinstance(node, ast.Name):
            return [ExperimentBase]
        classes = [value for value in vars(self.module).values() if inspect.isclass(value)]
        own = [cls for cls in classes if cls.__module__.startswith("expbase")]
        if root == "self":
            is_one = isinstance(node, ast.Name)
            return [cls for cls in own if is_one and issubclass(cls, ExperimentBase)]
        if isinstance(node, ast.Name):
            named = [cls for cls in own if cls.__name__.lower() == node.id.replace("_", "")]
            return named or own * (is_called and self.is_of_file)
        return own * (is_called and self.is_of_file)

    def kind_of(self, node: ast.expr) -> Any:
        """The class of what an expression gives."""
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id, UNKNOWN)
        if not isinstance(node, ast.Call):
            return UNKNOWN
        function, _ = self.value_of(node.func, is_called=True)
        if inspect.isclass(function):
            return function
        try:
            made = typing.get_type_hints(function).get("return")
        except (TypeError, NameError):
            return UNKNOWN
        return made if inspect.isclass(made) and made.__module__ != "builtins" else UNKNOWN


@functools.cache
def attributes(cls: type) -> set[str]:
    """What a class and its objects have: in the class, by annotation, or assigned to self."""
    found = set(dir(cls))
    for base in cls.__mro__:
        found |= vars(base).get("__annotations__", {}).keys()
        if base.__module__.startswith("expbase"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                    found.add(node.attr)
    return found


def test_a_synopsis_calls_what_there_is_with_arguments_that_it_takes() -> None:
    wrong = []
    for synopsis in FOUND:
        reader = Reader(importlib.import_module(synopsis.module), is_of_file=synopsis.is_of_file)
        tree = parsed(synopsis.code)
        assert tree, f"{synopsis.place}: no Python: {synopsis.code}"
        reader.visit(tree)
        wrong += [f"{synopsis.place}: {text}" for text in reader.wrong]
    assert wrong == []
    assert len(FOUND) > 60


def described(docstring: str) -> list[str]:
    """The names in the section Args of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.M)
    return re.findall(r"^    \*{0,2}(\w+): ", section[1], re.M) if section else []


def test_the_arguments_of_a_docstring_are_those_of_the_signature() -> None:
    unknown, count = [], 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                body = node.body if isinstance(node, ast.ClassDef) else [node]
                made = [
                    one for one in body if one is node or getattr(one, "name", "") == "__init__"
                ]
                names = {name for one in made for name in parameters(one)}
                named = described(ast.get_docstring(node) or "") if made else []
                count += len(named)
                wrong = [f"{path.name}: {node.name}({name})" for name in named if name not in names]
                unknown += wrong
    assert unknown == []
    assert count > 200


def parameters(function: ast.stmt) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [one.arg for one in found if one is not None]
