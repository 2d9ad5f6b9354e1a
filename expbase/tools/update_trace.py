"""What goes through one update, as checksums: each layer's input and output, losses, gradients.

    trace = Trace()
    with traced_layers(found, trace):
        train_batch()
    trace.steps             # [["input", "model", "1a2b3c4d"], ["output", "model", …], …]

Two traces of one update that should be alike differ first where something does not repeat itself.
Operators are notes that paddle itself writes, if its version has the flag for it; 3.3.1 has.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from expbase.base.files import checksum_of
from expbase.base.json_values import checksum
from expbase.state.parts import StatefulObjects, named_parameters

# What a step may be, in the order of an update.
KINDS = ("before", "samples", "batch", "input", "output", "loss", "gradient", "after")
BEFORE, SAMPLES, BATCH, INPUT, OUTPUT, LOSS, GRADIENT, AFTER = KINDS
OF_RESULT = "@Grad"  # follows an operator of whose result it is the gradient
# paddle appends a line to this file for each result of an operator, forward and backward.
_NOTES = "FLAGS_tensor_md5_checksum_output_path"
_RENAMES = "FLAGS_enable_unique_name"  # which paddle sets with it, and does not take back
# dropout1_out_float32_2x3:d41d8cd9…: the operator and its number; which result; type and shape. Of
# the gradient of a result: add1_out_float32_2x3@Grad:7fb9a8b9…
_RESULT = re.compile(r"([A-Za-z_0-9]*?[A-Za-z_])\d+_\w+?(@Grad)?:(\w+)")


class Trace:
    """What has gone through an update: lists of a kind, a name and a checksum."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.logged: list[list[str]] = []  # name and value

    def add(self, kind: str, name: str, value: Any) -> None:
        """Notes the checksum of a value."""
        self.steps.append([kind, name, checksum(value)])

    def add_weights(self, kind: str, found: StatefulObjects) -> None:
        """Notes the tensors of layers and optimizers; those of the latter by file and key."""
        for file, arrays in found.arrays().items():
            for key, array in arrays.items():
                name = f"{file}: {key}" if file in found.optimizers else found.owner(file, key)
                self.steps.append([kind, name, f"{checksum_of([array.data]):08x}"])


@contextlib.contextmanager
def traced_layers(found: StatefulObjects, trace: Trace) -> Iterator[None]:
    """Notes, within the block, what each layer gets and gives, and the gradients of parameters."""
    with contextlib.ExitStack() as hooks:
        for path, layer in found.sublayers():

            def note_input(_: Any, inputs: Any, path: str = path) -> None:
                trace.add(INPUT, path, inputs)

            def note_output(_: Any, inputs: Any, output: Any, path: str = path) -> None:
                trace.add(OUTPUT, path, output)

            hooks.callback(layer.register_forward_pre_hook(note_input).remove)
            hooks.callback(layer.register_forward_post_hook(note_output).remove)
        for name, parameter in named_parameters(found):
            if not parameter.stop_gradient:
                note = partial(_note_gradient, trace, name)
                hooks.callback(parameter.register_hook(note).remove)
        yield


def _note_gradient(trace: Trace, name: str, gradient: Any) -> None:
    if gradient.is_selected_rows():  # of an Embedding with sparse=True
        rows = gradient.get_selected_rows()
        trace.add(GRADIENT, name, [rows.rows(), np.asarray(rows.get_tensor())])
    else:
        trace.add(GRADIENT, name, gradient)


@contextlib.contextmanager
def operators_of_paddle(path: Path, found: StatefulObjects) -> Iterator[list[list[str]]]:
    """Notes, within the block, what each operator of paddle gives; nothing if its version cannot.

    While it notes, paddle renames what an operator writes into, such as a parameter at an
    optimizer's step. So a second step within the block misses its accumulators: a KeyError.

    Args:
        path: Of a file that is made for it, and removed.
        found: Whose parameters have their names again after the block.

    Yields:
        A list that has, after the block, the operator of each result and the checksum.
    """
    noted: list[list[str]] = []
    names = [(parameter, parameter.name) for _, parameter in named_parameters(found)]
    off = {_NOTES: "", _RENAMES: False}
    if not all(map(core.globals().is_public, off)):
        yield noted
        return
    paddle.set_flags({_NOTES: str(path)})
    try:
        yield noted
    finally:
        paddle.set_flags(off)
        for parameter, name in names:
            parameter.name = name
        text = path.read_text(errors="replace") if path.exists() else ""
        path.unlink(missing_ok=True)
        noted += [[name.rstrip("_") + of, md5] for name, of, md5 in _RESULT.findall(text)]
