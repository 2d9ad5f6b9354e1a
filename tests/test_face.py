"""The face: every public name of what a user derives from, listed here and documented there.

A name that is new fails the list, so that it is decided on. What a docstring has to say follows
from the signature: each parameter in Args, and what is returned in Returns or Yields.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expbase
from expbase import ExperimentBase
from expbase.engine.internals import Internals
from expbase.events import Events

REFERENCE = Path(__file__).parents[1] / "docs/reference.md"

YOURS = "setup_dataloader setup_model train_batch valid"
READ = (
    "config args iteration epoch batches_per_epoch total_iterations finished end_reason logger "
    "output_dir checkpoint_dir rank world_size parallel internals"
)
WHOLE_RUN = (
    "default_config setup init_parallel setup_output_dir dump_config setup_visualizer setup_logger "
    "setup_checkpointer check_setup data_parallel unwrap register_stateful exclude_from_state "
    "resume_or_load run close"
)
LOOP = (
    "train going_on end_iteration new_epoch read_batch micro_batches backward step_optimizers log "
    "stop evaluate valid_batches average gather"
)
FILES = "save load_checkpoint save_model load_model export"
EVENTS = (
    "prepare startup on_train_begin on_train_epoch_begin on_train_batch_begin "
    "on_before_optimizers_step on_train_batch_end on_log on_train_epoch_end on_evaluate_end "
    "on_save_checkpoint on_load_checkpoint on_checkpoint_written on_exception on_train_end terminal"
)
FACE = " ".join((YOURS, READ, WHOLE_RUN, LOOP, FILES, EVENTS)).split()
ATTRIBUTES = "model optimizer train_loader valid_loader test_loader visualizer".split()
INTERNALS = (
    "life phase read_only advises is_ending has_logged batches_read has_validated waiting "
    "inspected restored state code divisor updates_per_epoch listen explain saved_at epochs_ended "
    "batch_in_epoch num_shares share batch_indices stepping grad_scaler log_finite "
    "evaluated_loader evaluated_indices evaluating surround_phases stateful_objects "
    "learning_rates fire hears turn_epoch step_of wait_for_checkpoint closing"
).split()
IN_REFERENCE = [
    "expbase.experiment.ExperimentBase",
    "expbase.events.Events",
    "expbase.engine.internals.Internals",
    "expbase.extras.all_events.AllEvents",
    "expbase.extras.components",
    "expbase.extras.mixins.EarlyStopping",
    "expbase.extras.mixins.ExponentialMovingAverage",
    "expbase.extras.mixins.GradientClipping",
    "expbase.extras.prediction.Prediction",
]


def shown_in(page: Path) -> list[str]:
    """What a page of the reference shows, by its path."""
    return re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def sections_of(text: str) -> dict[str, str]:
    """The text of each section of a docstring, by its heading."""
    found = re.split(r"^(Args|Returns|Yields|Raises):\n", text, flags=re.MULTILINE)
    bodies = (re.split(r"^(?=\S)", body, flags=re.MULTILINE)[0] for body in found[2::2])
    return dict(zip(found[1::2], bodies, strict=True))


def named_in(section: str) -> set[str]:
    """The parameters that a section names: at the beginning of a line, maybe with stars."""
    lines = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section, re.MULTILINE)
    return {name.strip("* ") for line in lines for name in line.split(",")}


def lacks(function: Any, text: str | None, *, is_method: bool = False) -> Iterator[str]:
    """What the annotations and the docstring of a function lack."""
    signature = inspect.signature(function)
    parameters = [*signature.parameters.values()][is_method:]
    types = [signature.return_annotation, *(parameter.annotation for parameter in parameters)]
    if inspect.Signature.empty in types:
        yield "a type"
    if not text:
        yield "a docstring"
        return
    sections = sections_of(text)
    named = named_in(sections.get("Args", ""))
    yield from (f"Args: {p.name}" for p in parameters if p.name not in named)
    yield from (f"no parameter {name}" for name in named - {p.name for p in parameters})
    if signature.return_annotation != "None" and not {"Returns", "Yields"} & {*sections}:
        yield "Returns"


def lacks_in(cls: type) -> Iterator[str]:
    """What the public members that a class defines lack; an override may inherit its text."""
    for name, member in vars(cls).items():
        function = inspect.unwrap(getattr(member, "__func__", member))  # of a classmethod
        text = inspect.getdoc(getattr(cls, name))
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield from (f"{name}: a docstring" for _ in range(not text))
            if inspect.signature(member.fget).return_annotation is inspect.Signature.empty:
                yield f"{name}: a type"
        elif inspect.isfunction(function) and (function.__doc__ or not text):
            yield from (f"{name}: {missing}" for missing in lacks(function, text, is_method=True))


def test_the_face_has_these_names_and_no_others() -> None:
    assert len(FACE) <= 70
    assert public(ExperimentBase) == {*FACE}
    assert public(Events) == {*EVENTS.split()}


def test_the_door_has_these_names_and_no_others() -> None:
    assert public(Internals) == {*INTERNALS}


def test_what_a_user_sets_is_declared_with_a_type_and_a_text() -> None:
    assert [*ExperimentBase.__annotations__] == ATTRIBUTES
    (tree,) = ast.parse(inspect.getsource(ExperimentBase)).body
    assert isinstance(tree, ast.ClassDef)
    after = dict(zip(tree.body, tree.body[1:], strict=False))
    texts = {
        ast.unparse(node.target): ast.literal_eval(text.value)
        for node, text in after.items()
        if isinstance(node, ast.AnnAssign)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    assert [*texts] == ATTRIBUTES


@pytest.mark.parametrize("path", shown_in(REFERENCE))
def test_what_the_reference_shows_has_types_and_the_sections_of_its_signatures(path: str) -> None:
    shown = pkgutil.resolve_name(path)
    ones = map(vars(shown).get, shown.__all__) if inspect.ismodule(shown) else [shown]
    lacking = []
    for one in ones:
        assert one.__doc__
        missing = lacks_in(one) if inspect.isclass(one) else lacks(one, inspect.getdoc(one))
        lacking += [f"{one.__name__}.{text}" for text in missing]
    assert lacking == []


def test_the_reference_shows_all_that_a_user_derives_from_and_imports() -> None:
    english, chinese = map(shown_in, (REFERENCE, REFERENCE.with_suffix(".zh.md")))
    assert english == chinese
    assert {*IN_REFERENCE} <= {*english}
    names = {path.rpartition(".")[2] for path in english}
    assert {*expbase.__all__} <= names
