"""The constants of optimizers and schedules: what they were made with, and training leaves alone.

A run that is made longer follows the curve that the config describes now: a schedule that is
another one than at the checkpoint is stepped from its start to where it was, if it is paddle's and
goes on by itself; else its rate goes on from what it was. Each constant that differs is named.

    constants = constants_in(walk)           # {"schedule.T_max": "80", …}
    given = follow(constants, then, decoded, nodes)
    given.paths, given.lines                 # what is not to be restored, and what is to be said
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle.optimizer import lr

from expbase.base.any_object import module_of
from expbase.base.errors import ValueMistake
from expbase.state.value_places import WHOLE, GroupNode, Node, OptimizerNode, ScheduleNode, cells_of
from expbase.state.walk import Walk

_MOST_STEPS = 10**8
_MOVING = ("last_lr", "last_epoch")  # of a schedule; they follow from the rest


@dataclass
class Given:
    """The constants that the code gives anew at a resume."""

    paths: set[str] = field(default_factory=set)  # of values that do not come from the checkpoint
    lines: list[str] = field(default_factory=list)


def constants_in(walk: Walk) -> dict[str, str]:
    """Returns the constants of optimizers and schedules as texts, by path."""
    return dict(_constants_in(walk))


def follow(
    now: Mapping[str, str],
    then: Mapping[str, str],
    decoded: Mapping[str, Any],
    nodes: Mapping[str, Node],
) -> Given:
    """Makes schedules and rates follow the code of now where their constants have changed.

    Args:
        now: The constants of this start, at the end of setup.
        then: Those of the checkpoint.
        decoded: The values of the checkpoint by path: a node, a key and a value each.
        nodes: What has places, by name.
    """
    given = Given()
    other = [path for path, text in now.items() if then.get(path, text) != text]
    for name, node in nodes.items():
        if isinstance(node, ScheduleNode) and not _is_inside(name, nodes):
            inside = [path for path in other if path.startswith(f"{name}.")]
            if inside:
                lines = [_differs(path, now, then) for path in _worth_a_line(inside)]
                _follow_schedule(given, name, decoded, nodes, lines)
        elif isinstance(node, (OptimizerNode, GroupNode)):
            own = {f"{name}.{key}" for key in node.places()}
            given.paths |= own.intersection(other)
            given.lines += [_differs(path, now, then) for path in other if path in own]
    return given


def _worth_a_line(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        last = path.rpartition(".")[2]
        # What begins with a line paddle has worked out of the rest.
        if last not in _MOVING and last[0] != "_":
            yield path


def _follow_schedule(
    given: Given,
    name: str,
    decoded: Mapping[str, Any],
    nodes: Mapping[str, Node],
    lines: Sequence[str],
) -> None:
    """Steps a fresh schedule to the iteration of the checkpoint, if that can be done."""
    schedule = nodes[name].value
    within = [part for path, part in nodes.items() if f"{path}.".startswith(f"{name}.")]
    if not all(map(_steps_alone, within)):
        why = f"; the rate goes on from what it was: a {type(schedule).__name__} is not"
        given.lines += [f"{line}{why} stepped to where it would be" for line in lines]
        return
    last = decoded.get(f"{name}.last_epoch", (None, None, schedule.last_epoch))[2]
    if last - schedule.last_epoch > _MOST_STEPS:
        raise ValueMistake(f"{name}.last_epoch is {last}, which no training reaches.")
    for _ in range(last - schedule.last_epoch):
        schedule.step()
    given.lines += lines
    given.paths |= {path for path in decoded if path.startswith(f"{name}.")}


def _constants_in(walk: Walk) -> Iterator[tuple[str, str]]:
    """Yields the path and the text of each constant of optimizers and schedules."""
    outer = [
        f"{path}."
        for path, node in walk.nodes.items()
        if isinstance(node, (OptimizerNode, ScheduleNode))
    ]
    for path, node in walk.nodes.items():
        if any(f"{path}.".startswith(name) for name in outer):
            for key, value in node.places().items():
                # Of a list its place in the schedule is one.
                if key is not WHOLE and (text := _as_constant(value)) is not None:
                    yield walk.path_of(path, key), text


def _as_constant(value: Any) -> str | None:
    """Returns a number, a text, a short list of them or a function as a text; else None."""
    if isinstance(value, types.FunctionType):
        cells = [f"{n}={_as_constant(cell)}" for n, cell in cells_of(value).items()]
        return " ".join([value.__qualname__, *cells])
    if isinstance(value, (list, tuple)) and len(value) < 100:
        items = [*map(_as_constant, value)]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    return repr(value) if type(value) in (bool, int, float, str, type(None)) else None


def _differs(path: str, now: Mapping[str, str], then: Mapping[str, str]) -> str:
    here, there = now[path], then[path]
    where = ""
    if here[:1] == there[:1] == "[":  # of a list the first item that differs
        pairs = zip(here[1:-1].split(", "), there[1:-1].split(", "), strict=False)
        differing = ((n, *pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        if (first := next(differing, None)) is not None:
            number, here, there = first
            where = f"[{number}]"
    name = path.removesuffix("[:]") + where
    return f"self.{name}: {here:.60} by the code, {there:.60} at the checkpoint"


def _is_inside(name: str, nodes: Mapping[str, Node]) -> bool:
    """Returns whether a name is that of a schedule within another one."""
    ends = [i for i, letter in enumerate(name) if letter == "."]
    return any(isinstance(nodes.get(name[:end]), ScheduleNode) for end in ends)


def _steps_alone(node: Node) -> bool:
    """Returns whether a schedule, or one within it, steps without a metric, as paddle's do."""
    kind = type(node.value)
    is_paddles = isinstance(node, ScheduleNode) and module_of(kind) == lr.__name__
    return kind is list or (is_paddles and kind is not lr.ReduceOnPlateau)
