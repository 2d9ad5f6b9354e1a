"""Notes that are added to an error before it is logged: what it may come from, and what to do.

add_notes(experiment, internals, error)
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import paddle

from expbase.base.error_text import users_line
from expbase.base.errors import add_note
from expbase.checkpoint.layout import NonFiniteError
from expbase.doctor.before_training import keys_that_are_methods, misnamed_loaders
from expbase.engine.internals import Internals
from expbase.engine.run_states import Life
from expbase.state.sparse_embeddings import sparse_under_adam


def add_notes(experiment: Any, internals: Internals, error: BaseException) -> None:
    """Adds what explains an error, if anything here does."""
    _explain_schedule(experiment, error)
    if internals.life is Life.IN_SETUP:
        _explain_missing_model(experiment, error)
        for text in (*misnamed_loaders(experiment), *keys_that_are_methods(experiment.config)):
            add_note(error, text)
    elif internals.life is Life.TRAINING and internals.phase == "train":
        _explain_memory(error)
    if isinstance(error, NonFiniteError):
        _explain_sparse_adam(internals, error)


def _explain_missing_model(experiment: Any, error: BaseException) -> None:
    """Adds to an error of setup_dataloader that what it wants is not there yet, if that is so."""
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, AttributeError) or "setup_dataloader" not in frames:
        return
    line = users_line(error)
    made = getattr(type(experiment).setup_model, "__code__", None)
    wanted = re.search(rf"self\.(\w+)\.{error.name}\b", line)
    if error.obj is experiment and made and error.name in made.co_names:
        wanted = re.search(rf"self\.({error.name})\b", line)
    if wanted and getattr(experiment, wanted[1], None) is None:
        add_note(
            error,
            f"setup_dataloader: self.{wanted[1]} is not there yet; setup_model runs after it. "
            "Expected there what needs a model, for example an optimizer.",
        )


def _explain_schedule(experiment: Any, error: BaseException) -> None:
    """Adds to what paddle's schedules raise of a length what it may come from."""
    if isinstance(error, AssertionError) and re.search(
        "'[A-Za-z_]+' must be a positive", str(error)
    ):
        add_note(
            error,
            "A schedule of the learning rate is given a length that is no positive number: the "
            "run is shorter than its warm-up, or training.max_iteration is 0, since max_epoch "
            f"ends the run. self.total_iterations is {experiment.total_iterations} here. Expected "
            "a shorter warm-up or a longer run.",
        )


def _explain_memory(error: BaseException) -> None:
    """Adds to an update's error that there is no memory what would need less of it."""
    # Paddle raises it for the host and for a GPU (paddle/fluid/pybind/exception.cc, BadAlloc), and
    # within some operators a RuntimeError of the same text; what a custom device answers is an
    # OSError with a number (paddle/phi/backends/custom/custom_device.cc).
    if isinstance(error, MemoryError) or "Out of memory error on" in str(error):
        add_note(
            error,
            "Out of memory in an update: expected smaller batches, with as many samples in an "
            "update by training.accumulation_steps=2, or amp. The same command with --force goes "
            "on with them, from the newest checkpoint.",
        )


def _explain_sparse_adam(internals: Internals, error: BaseException) -> None:
    """Adds that a sparse embedding under Adam on the CPU makes such numbers by itself, if one is
    there.
    """
    if paddle.device.get_device() != "cpu":
        return
    for path in [*sparse_under_adam(internals.stateful_objects())][:1]:
        add_note(
            error,
            f"The learning rate may not be the cause: self.{path} is an Embedding(sparse=True) "
            "that Adam steps on the CPU. There Paddle computes wrong moments, other ones in each "
            "run. Expected Adam(lazy_mode=True), SGD, Adagrad or sparse=False.",
        )
