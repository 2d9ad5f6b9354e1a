"""The guest: when the doctor looks at an experiment, and when it leaves.

It looks before training once; after each of the first updates, and then it has left; at some of the
captures of the state; and at an error before that is logged. It sees through `self.internals`, is
called last, is in no checkpoint, raises nothing and makes no collective: a run without it has the
same bits. `--no_advice` leaves it out.

    visit(experiment, internals)
"""

from __future__ import annotations

import functools
from typing import Any

from expbase.checkpoint import layout
from expbase.checkpoint.compare_rank_weights import Difference
from expbase.doctor.before_training import (
    changed_by_its_file,
    keys_that_are_methods,
    likely_mistakes,
    loaders_nobody_reads,
    methods_nobody_calls,
    misnamed_loaders,
)
from expbase.doctor.doctor_file import conditions_of
from expbase.doctor.edited_files import edited_files
from expbase.doctor.error_notes import add_notes
from expbase.doctor.first_updates import FirstUpdates, unlike_length
from expbase.doctor.unsaved_changes import Audit
from expbase.doctor.why_ranks_differ import advice
from expbase.engine.internals import Internals
from expbase.mixins_in_front import users_class


def visit(experiment: Any, internals: Internals) -> None:
    """Lets the doctor look at an experiment that was just made, if its advice is wanted."""
    if not internals.advises:
        return
    if not internals.read_only:
        _visit_training(experiment, internals)

    def conditions() -> str:
        return "" if experiment.rank else conditions_of(experiment, internals.code)

    Audit(experiment, internals, conditions)


def _visit_training(experiment: Any, internals: Internals) -> None:
    def warn(text: str) -> None:
        experiment.logger.warning("%s", text)

    def look_before_training() -> None:
        mistakes = likely_mistakes(experiment.config.training, experiment.train_loader)
        names = *misnamed_loaders(experiment), *methods_nobody_calls(type(experiment))
        edited = edited_files(internals.code, type(experiment))
        names += *loaders_nobody_reads(experiment), *keys_that_are_methods(experiment.config)
        for text in (*names, *mistakes, *edited):
            warn(text)
        if experiment.rank == 0 and not layout.listed(experiment.checkpoint_dir):  # it begins
            for text in changed_by_its_file(users_class(type(experiment)), experiment.config):
                warn(text)

    def say_why(difference: Difference) -> None:
        for text in advice(difference):
            warn(text)

    def look_at_an_epoch() -> None:
        if internals.restored is None:
            for text in unlike_length(experiment, internals):
                warn(text)
        has_seen_one()

    internals.listen("ready", look_before_training)
    has_seen_one = internals.listen("on_train_epoch_end", look_at_an_epoch)
    internals.listen("ranks_differ", say_why)
    internals.explain(functools.partial(add_notes, experiment, internals))
    FirstUpdates(experiment, internals, warn)
