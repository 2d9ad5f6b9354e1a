"""Checks of declarations: one against another, and against the first real batch.

A declaration is a list of `paddle.static.InputSpec` with names.

    check_declaration("reader Lines", reader.outputs_attr)
    check_fit("head tags", head_inputs, "reader Lines", reader.outputs_attr)
    check_values("reader", reader.outputs_attr, first_batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paddle.static import InputSpec

from expbase.state.arrays import describe

Specs = Sequence[InputSpec]


def check_declaration(place: str, specs: Any) -> None:
    """Checks that a declaration is a list of InputSpec with names.

    Args:
        place: Whose it is, for the message.
        specs: The declaration.

    Raises:
        ValueError: It is something else.
    """
    is_list = isinstance(specs, (list, tuple))
    if not is_list or not all(isinstance(spec, InputSpec) and spec.name for spec in specs):
        raise ValueError(
            f"{place}: declares {specs!r}; expected a list of paddle.static.InputSpec with names."
        )


def check_fit(taker: str, taken: Specs, source: str, returned: Specs) -> None:
    """Checks that a source returns all that a taker takes.

    Args:
        taker: Who takes it, for the message.
        taken: What it takes.
        source: Who returns it, for the message.
        returned: What it returns.

    Raises:
        ValueError: A name is missing, or has another type or shape.
    """
    by_name = {spec.name: spec for spec in returned}
    for spec in taken:
        if spec.name not in by_name:
            raise ValueError(
                f"{taker}: takes {spec.name!r}, {describe(spec)}, from {source}, which returns "
                f"{names_in(by_name)}."
            )
        other = by_name[spec.name]
        if difference := _difference(spec, other):
            raise ValueError(
                f"{taker}: takes {spec.name!r} as {describe(spec)}; {source} returns it as "
                f"{describe(other)}: {difference}."
            )


def check_values(source: str, specs: Iterable[InputSpec], values: Mapping[str, Any]) -> None:
    """Checks the tensors of the first batch against a declaration.

    Args:
        source: Where they come from, for the message.
        specs: The declaration.
        values: The tensors by name.

    Raises:
        ValueError: A name is missing, or has another type or shape.
    """
    for spec in specs:
        if spec.name not in values:
            hint = ""
            if source == "reader":
                hint = (
                    " Was it registered with the model, in this phase? reader.register_with(model)"
                )
            raise ValueError(
                f"{source}: declares {spec.name!r}, and the first batch has "
                f"{names_in(values)}.{hint}"
            )
        value = values[spec.name]
        if difference := _difference(spec, value):
            raise ValueError(
                f"{source}: declares {spec.name!r} as {describe(spec)}; in the first batch it is "
                f"{describe(value)}: {difference}."
            )


def check_mapping(place: str, outputs: Any) -> None:
    """Checks that forward returned a mapping.

    Raises:
        ValueError: It returned something else.
    """
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"{place}: forward returned a {type(outputs).__name__}; expected a mapping by the "
            "names of outputs_attr."
        )


def names_in(names: Iterable[Any]) -> str:
    """Names for a message: `a, b`, or `nothing`."""
    return ", ".join(map(str, names)) or "nothing"


def _difference(spec: InputSpec, other: Any) -> str:
    """How another declaration, or a tensor, differs from this declaration; empty if it fits."""
    if spec.dtype != other.dtype:
        return "another type"
    if len(spec.shape) != len(other.shape):
        return "another number of dimensions"
    sizes = zip(spec.shape, other.shape, strict=True)  # below 0: a size that varies
    return "another size" if any(a != b and a >= 0 and b >= 0 for a, b in sizes) else ""
