"""Where a script does not repeat itself, and what is known to cause that: words for `verify`.

    processes = [read_updates(output) for output in two_runs_of_repeat_update]
    for line in where(processes): print(line)

Two processes that have made the same updates are compared first, then the makings of one update in
each process. So it shows what differs in each process, and what differs each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expbase.base.json_lines import json_lines
from expbase.tools.repeat_update import TIMES, updates_path
from expbase.tools.update_trace import (
    AFTER,
    BATCH,
    BEFORE,
    GRADIENT,
    INPUT,
    LOSS,
    OF_RESULT,
    OUTPUT,
    SAMPLES,
)

Updates = dict[tuple[int, int], dict[str, Any]]  # by iteration and rank: a line of repeat_update


class FirstDifference(NamedTuple):
    """Where two traces of one update part."""

    iteration: int
    kind: str  # of a step, as update_trace has them
    name: str
    logged: tuple[str, ...]  # numbers that differ, too


def read_updates(output: Path) -> Updates:
    """Returns what a run of repeat_update has written, of all ranks."""
    found: Updates = {}
    rank = 0
    while (path := updates_path(output, rank)).exists():
        for line in json_lines(path):
            found.setdefault((line["iteration"], rank), {}).update(line)
        rank += 1
    return found


def where(processes: Sequence[Updates], by_hand: Sequence[str] = ()) -> Iterator[str]:
    """Yields lines: the first place at which updates differ, and the causes to look at.

    Args:
        processes: The updates of two processes; nothing is yielded if both have failed.
        by_hand: Loaders that are read by hand.
    """
    facts = [line for one in processes for line in one.values() if "layers" in line]
    if not facts:
        return
    across = _between(*processes)
    within = [place for updates in processes for place in _within(updates)]
    place = across or min(within, key=lambda one: one.iteration, default=None)
    is_within = place is None or across is None or any(one[1:3] == place[1:3] for one in within)
    if place is None:
        iterations = sorted({iteration for updates in processes for iteration, _ in updates})
        text = (
            f"not seen again: in two more processes the updates {iterations[0]} to "
            f"{iterations[-1]} were the same, the last of them {TIMES} times each"
        )
    elif place.kind in (SAMPLES, BATCH):
        is_within, text = _of_data(place, facts)
    else:
        text = _in_words(place, facts[0]["layers"], facts[0]["optimizers"])
        if place.kind != BEFORE and not by_hand:  # of which each making has read another batch
            text += _of_makings(processes, is_within=is_within, differs_across=across is not None)
    yield f"where: {text}."
    yield f"causes to look at: {'; '.join(_causes(place, facts[0], by_hand, is_within=is_within))}."


def _between(one: Updates, other: Updates) -> FirstDifference | None:
    """Returns the first place at which the same updates of two processes differ."""
    for key in sorted(one.keys() & other.keys()):
        traces = (updates[key]["traces"][0] for updates in (one, other))
        if place := _first(key[0], *traces):
            return place
    return None


def _within(updates: Updates) -> Iterator[FirstDifference]:
    """Yields places at which the makings of an update differ."""
    for (iteration, _), line in sorted(updates.items()):
        first, *others = line["traces"]
        for trace in others:
            if place := _first(iteration, first, trace):
                yield place


def _first(
    iteration: int, one: Mapping[str, Any], other: Mapping[str, Any]
) -> FirstDifference | None:
    """Returns where two traces part; None if they are the same."""
    for left, right in itertools.zip_longest(one["steps"], other["steps"]):
        if left != right:
            kind, name, _ = left or right
            logged = [a[0] for a, b in zip(one["logged"], other["logged"], strict=False) if a != b]
            return FirstDifference(iteration, kind, name, tuple(dict.fromkeys(logged)))
    return None


def _operator(processes: Sequence[Updates]) -> str:
    """Returns the operator of paddle's whose result differs first, in words; empty: unknown."""
    for line in (line for updates in processes for line in updates.values()):
        first, *others = line.get("operators") or [[]]
        for left, right in (pair for other in others for pair in zip(first, other, strict=False)):
            if left != right:
                name = str(left[0])
                operator = name.removesuffix(OF_RESULT)
                if operator != name:
                    return f". The first gradient that differs is that of what {operator} gave"
                return f". The first operator whose result differs is {name}"
    return ""


def _of_makings(processes: Sequence[Updates], *, is_within: bool, differs_across: bool) -> str:
    """Returns whether one update differs from itself in one process, in words."""
    again = f"Made {TIMES} times in one process, from one state and one batch,"
    if not is_within:
        return f". {again} it is the same, and in another process it is not"
    return f"{_operator(processes)}. {again} it differs{', too' if differs_across else ''}"


def _in_words(
    place: FirstDifference, layers: Mapping[str, str], optimizers: Mapping[str, str]
) -> str:
    iteration, kind, name, logged = place
    layer = f"{name} ({layers.get(name)})"
    has_parts = any(path.startswith(f"{name}.") for path in layers)
    gave = "what the layers gave is the same"
    steps = ", ".join(f"self.{one} ({kind})" for one, kind in optimizers.items())
    made = "setup has made it otherwise"
    if iteration > 1:
        made = "it was the same after the one before, so an event or a thread has changed it"
    of = layers.get(name.rpartition(".")[0], "a parameter")
    words = {
        BEFORE: f"{name} differs before it: {made}",
        INPUT: f"the input of {layer} differs, and what layers gave before is the same",
        OUTPUT: f"the output of {layer} differs, and "
        + ("what its layers gave is the same" if has_parts else "its input is the same"),
        LOSS: f"the loss differs, and {gave}",
        GRADIENT: f"the gradient of {name} ({of}) differs, and {gave}",
        AFTER: f"{name} differs after it, and the gradients are the same: the step of {steps}, or "
        "what train_batch itself writes into it",
    }
    logs = f"; so does what it logs: {', '.join(logged)}" if logged and kind == GRADIENT else ""
    return f"update {iteration}: {words[kind]}{logs}"


def _of_data(place: FirstDifference, facts: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Returns whether data set or sampler differ in one process, too, and all of it in words."""
    here, other = facts[0], facts[-1]
    if place.kind == SAMPLES:
        text = f"update {place.iteration}: the samples differ, of {here['sampler']}"
        if any(len({*line["order"]}) > 1 for line in facts):
            return True, f"{text}. Asked twice in one process, from one seed, it differs, too"
        return False, f"{text}. Asked twice in one process, from one seed, it is the same"
    text = f"update {place.iteration}: batch{place.name} differs, of the same samples"
    name = f"{here['data_set']}.__getitem__"
    for index, given in (item for line in facts for item in line["samples"].items()):
        if len({*given}) > 1:
            return True, f"{text}. {name}({index}) differs when it is called twice in one process"
    for index, given in here["samples"].items():
        if other["samples"].get(index, given) != given:
            return False, f"{text}. {name}({index}) differs in another process, and not in one"
    if here["samples"]:
        text += f". {name} gives the same: look at collate_fn, and at what draws beside it"
    return True, text


def _causes(
    place: FirstDifference | None,
    facts: Mapping[str, Any],
    by_hand: Sequence[str],
    *,
    is_within: bool,
) -> Iterator[str]:
    """Yields the causes, those that the script has itself first."""
    sparse = facts["sparse_under_adam"]
    if sparse and (place is None or any(name in place.name for name in sparse)):
        yield (
            f"{', '.join(sparse)} has sparse gradients, and Adam's kernel for them does not repeat "
            "on the CPU: give the optimizer lazy_mode=True, or the Embedding no sparse=True"
        )
        return
    for name in by_hand:
        yield f"{name} is read by hand: paddle's thread draws beside training"
    if facts["threads"]:
        yield f"threads of yours that run beside training: {', '.join(facts['threads'])}"
    in_update = place is None or place.kind in (INPUT, OUTPUT, LOSS, GRADIENT)
    if facts["own_operators"] and in_update:
        names = ", ".join(facts["own_operators"])
        yield f"operators of yours, which may add in another order each time: {names}"
    if place is not None and place.kind == BATCH and not is_within:
        yield "a split of the data that setup draws without a seed (default_rng().permutation(n))"
    yield "the time; numbers of the system (os.urandom, a generator without a seed)"
    if place is None or not is_within:
        yield "the order of a set (PYTHONHASHSEED=0 fixes it), or of files that nobody has sorted"
    if is_within:
        yield "memory that nobody has filled (paddle.empty)"
        if not facts["threads"]:
            yield "threads"
        if not facts["device"].startswith("cpu"):
            yield "a kernel that adds in any order, and that training.deterministic does not reach"
