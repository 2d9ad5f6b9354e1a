"""The last value of each metric of a run, without reading all of its metrics.jsonl.

The lines at the end of the file are parsed. What is not in them is searched for in its bytes, from
the end to the begin: validations and tests always, any other metric if somebody asks for it.

    newest = read_newest(run)           # newest.iteration, newest.metrics, newest.tested
    found = search(run, "d_loss")       # of a name that is not in these: {"train/d_loss": 0.7}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from expbase.base.files import regular
from expbase.record.metrics import METRICS, as_metrics

_PIECE = 1 << 17  # bytes that are read at a time, some 400 lines; larger ones take longer
_SELDOM = ("valid/", "test/")  # how names begin that are searched for to the begin of the file

Line = dict[str, Any]


@dataclass
class Newest:
    """What the last lines of a run's metrics.jsonl say."""

    iteration: int = 0
    metrics: Line = field(default_factory=dict)  # the last value of each, by its full name
    tested: str = ""  # the checkpoint of the last line of a test; "": none, or other weights


def read_newest(run: Path) -> Newest:
    """Returns what the last lines say; an OSError if the file cannot be read."""
    newest = Newest()
    if not (run / METRICS).is_file():
        return newest
    with open(run / METRICS, "rb", opener=regular) as file:
        end, lines = _piece_before(file, os.fstat(file.fileno()).st_size, _PIECE)
        for line in _of_other_names(lines):
            _note(newest, line)
        missing = [w for w in _SELDOM if not any(name.startswith(w) for name in newest.metrics)]
        fits = {f'"{word}'.encode(): _beginning(word) for word in missing}
        for line in _newest_with(file, end, fits):
            _note(newest, line)
    return newest


def search(run: Path, name: str) -> Line:
    """Returns the metrics of a name, `loss` or `train/loss`, of the last line that has one."""
    if not (run / METRICS).is_file():
        return {}

    def fits(one: str) -> bool:
        return "/" in one and name in (one, one.partition("/")[2])

    with open(run / METRICS, "rb", opener=regular) as file:
        ending = f'{json.dumps(name)[1:-1]}"'.encode()
        for line in _newest_with(file, os.fstat(file.fileno()).st_size, {ending: fits}):
            return {one: value for one, value in line.items() if fits(one)}
    return {}


def _note(newest: Newest, line: Line) -> None:
    """Notes a line that comes before those that were noted."""
    newest.iteration = newest.iteration or line["iteration"]
    is_first_test = not any(name.startswith("test/") for name in newest.metrics)
    if is_first_test and any(name.startswith("test/") for name in line):
        newest.tested = str(line.get("checkpoint", ""))
    for name, value in line.items():
        if "/" in name:
            newest.metrics.setdefault(name, value)


def _of_other_names(lines: bytes) -> Iterator[Line]:
    """Yields lines, the last one first, but for those whose names a later one has."""
    had: set[bytes] = set()
    for text in reversed(lines.splitlines()):
        # Of two lines that are equal but for digits the names are equal, if there are none in them.
        without_digits = text.translate(None, b"0123456789")
        if without_digits in had:
            continue
        line = _parsed(text)
        if line is not None:
            yield line
            if not any(map(str.isdigit, "".join(line))):
                had.add(without_digits)


def _newest_with(
    file: BinaryIO, end: int, fits: dict[bytes, Callable[[str], bool]]
) -> Iterator[Line]:
    """Yields for each text the last line before a position that has it in a name that fits.

    Args:
        file: That of the lines.
        end: The position, where a line begins.
        fits: By the text, in quotes on one side, whether a name is meant. Emptied by this.
    """
    while end and fits:
        end, lines = _piece_before(file, end, _PIECE)
        for text, is_meant in [*fits.items()]:
            line = _last_with(lines, text, is_meant)
            if line is not None:
                del fits[text]
                yield line


def _last_with(lines: bytes, text: bytes, is_meant: Callable[[str], bool]) -> Line | None:
    end = len(lines)
    while (at := lines.rfind(text, 0, end)) >= 0:
        end = lines.rfind(b"\n", 0, at) + 1
        line = _parsed(lines[end:].partition(b"\n")[0])
        if line is not None and any(map(is_meant, line)):
            return line
    return None


def _piece_before(file: BinaryIO, end: int, size: int) -> tuple[int, bytes]:
    """Returns the whole lines of a file that end at a position, and where the first one begins.

    They have at least `size` bytes together, but for the last line that is cut by that; the first
    ones of the file may have less.
    """
    begin = max(end - size, 0)
    file.seek(begin)
    lines = file.read(end - begin)
    if begin == 0:
        return 0, lines
    cut = lines.find(b"\n") + 1
    if cut == 0 or cut == len(lines):  # a line that is longer
        return _piece_before(file, end, 4 * size)
    return begin + cut, lines[cut:]


def _parsed(text: bytes) -> Line | None:
    try:
        return as_metrics(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _beginning(word: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(word)
