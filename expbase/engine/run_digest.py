"""digest.txt: what binds a finished run, a line each; the SHA-256 of these lines is its digest.

    digest = write(run)                     # once, at the end of the run
    found = problems(run, digest)           # [] or ["metrics.jsonl train/loss: another one"]
    written = read(run)                     # written.digest, written.bound

A line is a name, a space, and the SHA-256 of what the name says: of a file's content, of a text, or
of values as JSON. Bound are, of each state of code, config and versions that has trained, these
(`start N`, by the iteration where it began to train); the config of the last start; what the run
began from; the weights after setup, the first batch, the numbers of samples; the checkpoints of the
last iteration, of the best ones and of the multiples of keep_every; the logged numbers. How often
the run was started, by how many ranks, where and when is not. Of other checkpoints, which the
moment of a stop decides on, lines stand below an empty one: they are no part of the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from expbase.base.errors import ValueMistake
from expbase.base.files import DAMAGES, read_bytes, write_single_file
from expbase.base.terminal import escaped
from expbase.checkpoint import best, layout, storage
from expbase.checkpoint.layout import STATE_FILE, SUFFIX, CheckpointError
from expbase.config import CONFIG, ConfigError, differences, load_yaml
from expbase.engine.compare_runs import numbers, what_is_saved
from expbase.engine.due import due_at
from expbase.engine.run_dir import MAY_CHANGE
from expbase.record.metrics import METRICS
from expbase.record.sources import SOURCES, kept_as
from expbase.record.starts_and_ends import (
    DIGEST,
    LEDGER,
    Facts,
    Session,
    configs_in,
    flat,
    maker,
    sessions,
    those_that_trained,
)

_HEAD = "expbase run digest 1"  # the first line; the number is that of the form
_MOST_BYTES = 1 << 26
_KEY = "training."


class Line(NamedTuple):
    """What a name stands for now."""

    sha256: str
    words: str = ""  # the text itself, if it is short


@dataclass
class _Found:
    """What is found of a run."""

    bound: dict[str, Line] = field(default_factory=dict)
    others: dict[str, Line] = field(default_factory=dict)
    damaged: dict[str, CheckpointError] = field(default_factory=dict)  # by the name of its lines


@dataclass(frozen=True)
class Written:
    """What digest.txt says: the SHA-256 of what is bound, and of other checkpoints, by name."""

    digest: str
    bound: Mapping[str, str]
    others: Mapping[str, str]

    def binds(self, iteration: int) -> bool:
        """Returns whether the checkpoint of an iteration is bound."""
        return any(name.startswith(_checkpoint(iteration)) for name in self.bound)


def write(run: Path) -> str:
    """Writes digest.txt of a run that has finished; returns the digest.

    Raises:
        CheckpointError, OSError: A file cannot be read, or digest.txt cannot be written.
        ValueError: The ledger has no start.
    """
    starts = _starts(sessions(run))  # this one has no digest yet
    if not starts:
        raise ValueMistake(f"{run}: the ledger has no start.")
    found = _found(run, starts)
    for error in found.damaged.values():
        raise error
    text = f"{_HEAD}\n{_text(found.bound)}"
    write_single_file(run / DIGEST, [f"{text}\n{_text(found.others)}".encode()])
    return _of(text.encode())


def read(run: Path) -> Written:
    """Reads digest.txt of a run.

    Raises:
        ValueError: There is none, or it is of another form.
    """
    path = run / DIGEST
    if not path.is_file():
        raise ValueMistake(
            f"{run}: holds no {DIGEST}; expected that of a run which has finished under expbase "
            "1.1 or later. A run that goes on has none until it finishes again, and a run of 1.0 "
            "has none."
        )
    try:
        text, empty, others = read_bytes(path, _MOST_BYTES).decode().partition("\n\n")
        first, *lines = text.split("\n")
        written = Written(_of(f"{text}\n".encode()), _parsed(lines), _parsed(others.split("\n")))
    except (OSError, *DAMAGES) as error:
        raise ValueMistake(f"{path}: cannot be read: {error}") from error
    if first != _HEAD or not empty:
        raise ValueMistake(f"{path}: begins with {first!r:.80}; expected {_HEAD!r}.")
    return written


def problems(run: Path, digest: str = "") -> list[str]:
    """Returns what of a run is not as it is bound, a line each; none if all is.

    Args:
        run: The output directory.
        digest: The one that it must have; "": that of its digest.txt.

    Raises:
        ValueError: There is no digest.txt.
    """
    written = read(run)
    expected = {**written.others, **written.bound}
    noted = sessions(run)
    now = _found(run, _starts(_until_the_digest(noted)))
    here = now.others | now.bound
    found = [str(error) for error in now.damaged.values()] + _of_config(run, noted)
    for name in [*expected, *(name for name in here if name not in expected)]:
        if name not in here:
            # Others than the bound ones may be left out; of a damaged one nothing is known.
            is_told = name in written.others or name.startswith(tuple(now.damaged))
            found += [f"{name}: not here"] * (not is_told)
        elif name not in expected:
            found.append(f"{name}: here, and not in {DIGEST}")
        elif here[name].sha256 != expected[name]:
            words = here[name].words
            found.append(f"{name}: another one" + f", {words}" * bool(words))
    if digest not in ("", written.digest):
        found.insert(0, f"{DIGEST}: another one, whose digest is {written.digest}")
    return found


def _of_config(run: Path, noted: Sequence[Session]) -> list[str]:
    """Returns what is wrong with config.yaml: it has no line, and the configs of the ledger do."""
    try:
        here = flat(load_yaml(run / CONFIG))
    except ConfigError as error:
        return [str(error) if (run / CONFIG).exists() else f"{CONFIG}: not here"]
    changed = [sorted(differences(one, here).keys() - MAY_CHANGE) for one in configs_in(noted)]
    if not changed or not all(changed):  # it is that of one of the starts at the beginning
        return []
    keys = textwrap.shorten(", ".join(changed[0]), 200)
    return [f"{CONFIG}: another one than in {LEDGER}, which differs in {keys}"]


def check_form(digest: str) -> None:
    """Raises a ConfigError if a text is no digest."""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError(
            f"--digest: {digest!r} given; expected the 64 digits that the run has printed at its "
            "end, and that `show RUN` prints."
        )


# --- the lines -------------------------------------------------------------------------------


def _text(lines: Mapping[str, Line]) -> str:
    return "".join(f"{name} {line.sha256}\n" for name, line in lines.items())


def _parsed(lines: Iterable[str]) -> dict[str, str]:
    return {name: value for name, _, value in (line.rpartition(" ") for line in lines) if value}


def _of(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def _of_text(text: Any) -> Line:
    return Line(_of(str(text).encode()), str(text))


def _of_values(values: Any) -> Line:
    return Line(_of(json.dumps(values, sort_keys=True).encode()))


def _found(run: Path, starts: Sequence[Facts]) -> _Found:
    """Returns all that is there of a run, by the starts that have trained it."""
    found = _Found()
    of_files = {
        LEDGER: partial(_of_starts, run, starts),
        f"{METRICS}, {best.FILE}": partial(_of_numbers, run),
    }
    for files, lines_of in of_files.items():
        try:
            found.bound |= lines_of()
        except DAMAGES as error:
            found.damaged[files] = CheckpointError(f"{files}: damaged: {error!r:.200}")
    there = layout.listed(run / layout.FOLDER)
    kept_anyway = {*there[-1:]}
    with contextlib.suppress(*DAMAGES):  # of which a line tells already
        kept_anyway |= {*_best(run, starts)}
    for path in there:
        name = _checkpoint(layout.iteration_of(path) or 0)
        try:
            with storage.reading(path / STATE_FILE):
                saved = what_is_saved(path)
                del saved["environment"]  # of the machine
                is_bound = path in kept_anyway or _is_kept_by_all(path, saved, starts)
        except CheckpointError as error:
            found.damaged[name] = error
            continue
        side = found.bound if is_bound else found.others
        side |= {f"{name}{file}": line for file, line in _of_checkpoint(saved).items()}
    return found


def _of_starts(run: Path, starts: Sequence[Facts]) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for iteration, state in _states(run, starts).items():
        lines |= {f"start {iteration} {name}": line for name, line in state.items()}
    if starts:
        lines["config"] = _of_values(starts[-1]["config"])
        lines |= _of_beginning(starts[0])
    return lines


def _starts(noted: Sequence[Session]) -> list[Facts]:
    """Returns the starts that have trained a run, in order; none if the ledger is damaged."""
    starts = [session.start for session in noted if session.start]
    try:
        return those_that_trained(starts) if starts else []
    except DAMAGES:
        return []


def _until_the_digest(noted: Sequence[Session]) -> Sequence[Session]:
    """Returns the sessions up to the one in which a run has finished: those after it have trained
    nothing, or nothing that was saved.
    """
    finished = [number for number, session in enumerate(noted) if session.digest]
    return noted[: finished[-1] + 1] if finished else noted


def _states(run: Path, starts: Sequence[Facts]) -> dict[int, dict[str, Line]]:
    """Returns the lines of each state of code, config and versions that has trained a run, by the
    iteration at which it began to. Keys of the config that change no bits make no other one.
    """
    states: dict[int, dict[str, Line]] = {}
    before = None
    for iteration in sorted({start["iteration"] for start in starts}):
        state = _of_start(run, maker(starts, iteration + 1))
        if state != before:
            before = states[iteration] = state
    return states


def _of_start(run: Path, start: Facts) -> dict[str, Line]:
    git = dict(start.get("git") or {})
    lines = {"class": _of_text(start.get("code")), "versions": _of_text(start.get("versions"))}
    if commit := git.get("commit"):
        lines["commit"] = _of_text(commit)
    files = {}
    if state := git.get("state"):
        files["changes since the commit"] = run / SOURCES / f"{state}.diff"
    sources = dict(start.get("sources") or {})
    lines["checksums of sources"] = _of_values(sources)
    files |= {f"source {name}": run / kept_as(name, crc) for name, crc in sources.items()}
    # Those that git has are not kept.
    lines |= {name: Line(_of(path.read_bytes())) for name, path in files.items() if path.is_file()}
    config = dict(start.get("config") or {})
    lines["config"] = _of_values({k: v for k, v in config.items() if k not in MAY_CHANGE})
    return lines


def _of_beginning(first: Facts) -> dict[str, Line]:
    lines = {
        f"began from {option}": _of_text(digest)
        for option, digest in dict(first.get("began_from") or {}).items()
    }
    lines["weights after setup"] = _of_text(first.get("model"))
    if "first_batch" in first:
        lines["first batch"] = _of_text(first["first_batch"])
    samples = dict(first.get("samples") or {})
    return lines | {f"samples of {loader}": _of_text(n) for loader, n in samples.items()}


def _checkpoint(iteration: int) -> str:
    """Returns how the names of the lines of a checkpoint begin."""
    return f"checkpoint {layout.name_of(iteration)} "


def _of_checkpoint(saved: Mapping[str, Any]) -> dict[str, Line]:
    files = {name: text for name, text in saved.items() if name.endswith(SUFFIX)}
    values = {name: value for name, value in saved.items() if name not in files}
    lines = {name: Line(text.removeprefix("sha256 ")) for name, text in sorted(files.items())}
    return lines | {f"values of {STATE_FILE}": _of_values(values)}


def _best(run: Path, starts: Sequence[Facts]) -> list[Path]:
    """Returns the checkpoints that are kept for being the best."""
    number = starts[-1]["config"][f"{_KEY}keep_best"] if starts else 0
    names = [layout.name_of(iteration) for iteration, _ in best.best_of(run)[:number]]
    return [run / layout.FOLDER / name for name in names]


def _is_kept_by_all(path: Path, saved: Mapping[str, Any], starts: Sequence[Facts]) -> bool:
    """Returns whether each run of the same config has kept this checkpoint, however it was stopped.

    The newest `keep_last` are others if one of them was made at a stop, by the clock, or by save().
    """
    iteration = layout.iteration_of(path) or 0
    before = [start for start in starts if start["iteration"] < iteration]
    if not before:  # where the run began, from another one's
        return False
    last = _training(starts[-1])
    is_kept = not last["keep_last"] or (last["keep_every"] and not iteration % last["keep_every"])
    loop, data = saved["loop"], saved["data"]
    ended = loop["epoch"] - (data["epoch"] > 0 and not data["ended"])
    epochs = loop["epochs_before"], ended
    due = due_at(_training(before[-1]), iteration, *epochs, is_epoch_end=False)
    return bool(is_kept and due.checkpoint)


def _training(start: Facts) -> dict[str, Any]:
    """Returns the section `training` of the config of a start."""
    config = start["config"]
    return {key.removeprefix(_KEY): config[key] for key in config if key.startswith(_KEY)}


def _of_numbers(run: Path) -> dict[str, Line]:
    """Returns a line for each name under which numbers were logged."""
    hashes: dict[str, Any] = {}
    for one in numbers(run):  # a list as JSON, piece by piece: there may be millions
        name = f"{one.file} {escaped(one.name)}"
        begin = ", " if name in hashes else "["
        text = f"{begin}{json.dumps([one.iteration, one.value])}"
        hashes.setdefault(name, hashlib.sha256()).update(text.encode())
    for content in hashes.values():
        content.update(b"]")
    return {name: Line(content.hexdigest()) for name, content in sorted(hashes.items())}
