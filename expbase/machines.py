"""Several machines: of which run each rank's directory is, and whether all ranks run the same code.

Without a shared disk the checkpoints are with rank 0 alone. So a file in each machine's directory
notes of which run it is and how far that was: a start in which the machines have changed places, or
rank 0 has an empty disk, does not begin anew in silence. A run of one process imports none of this.

    note = RunNote(run_directory)
    for text in note.compare(newest_checkpoint, type(experiment)): warn(text)
    note.update(newest_checkpoint)        # there is another one

Configs and shapes are compared by checks.check_alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import paddle

from expbase import _version, distributed, sources
from expbase.run_dir import NOTE, RunDirectory
from expbase.state import checkpoint

_NAMED = 8  # differences that a line names at most
_ADVICE = (
    "Start so that the machine with the newest checkpoint is rank 0 (paddle's launcher: --rank 0 "
    "on it), or copy it to rank 0's directory; --fresh begins a new run on purpose."
)


@dataclass(frozen=True)
class Place:
    """What the directory of a rank shows at a start; the iterations are -1 if there is none."""

    rank: int
    host: str
    directory: str
    newest: int = -1  # iteration of the newest checkpoint in it
    run: str = ""  # as noted: the id of its run
    known: int = -1  # as noted: the iteration of that run's newest checkpoint, wherever it was
    made_on: str = ""  # as noted: the host of that

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.directory})"


def check_places(places: Sequence[Place]) -> Iterator[str]:
    """Compares the ranks with a directory of their own, rank 0 first; yields what is odd.

    That is an older checkpoint than one that was known: it leads to the same bits, only later.

    Raises:
        CheckpointError: Rank 0 would leave newer checkpoints behind, or continue another run.
    """
    first, knows = places[0], "{0} knows of one of iteration {0.known} on {0.made_on}"
    for other in sorted(places, key=lambda place: -place.newest):
        wrong, known = "", knows.format(other)
        if other.newest > first.newest:
            wrong = f"the newest checkpoint, of iteration {other.newest}, is with {other}"
        elif other.known > first.newest == -1:
            wrong = f"no checkpoint is there, and {known}"
        elif other.known >= 0 and first.run not in ("", other.run):
            wrong = f"its run is not that of the other machine: {known}"
        if wrong:
            raise checkpoint.CheckpointError(f"output directory of {first}: {wrong}. {_ADVICE}")
    last = max(places, key=lambda place: place.known)
    if last.known > first.newest:
        yield f"continues from iteration {first.newest}, although {knows.format(last)}"


class RunNote:
    """The note in the output directory of this rank; there is none if all ranks share one."""

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.path / NOTE
        self._rank = distributed.rank()
        self._is_shared = self._rank > 0 and directory.is_of_rank_zero()
        self._is_needed = False
        self._content: dict[str, str | int] = {}

    def compare(self, newest: Path | None, experiment: type) -> list[str]:
        """What check_places and the code of all ranks have to tell, in one collective."""
        facts = self._place(newest), self._is_shared, uuid.uuid4().hex, code(experiment)
        of_ranks = distributed.gather_objects(facts)
        places = [place for place, is_shared, *_ in of_ranks if not is_shared]
        told = [*check_places(places)]
        runs = [place.run for place in places if place.run]
        self._is_needed = len(places) > 1
        self._content = {"run": [*runs, of_ranks[0][2]][0], "host": places[0].host}
        self._write(places[0].newest)
        return [*told, *different_code({str(place): facts for place, *_, facts in of_ranks})]

    def _place(self, newest: Path | None) -> Place:
        if self._rank:
            listed = checkpoint.listed(self._path.with_name(checkpoint.FOLDER))
            newest = listed[-1] if listed else None
        noted = {}
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is torn
            noted = json.loads(self._path.read_bytes())
        known = noted.get("run", ""), noted.get("iteration", -1), noted.get("host", "")
        directory = str(self._path.parent)
        return Place(self._rank, platform.node(), directory, _iteration(newest), *known)

    def update(self, newest: Path | None) -> None:
        """Notes rank 0's newest checkpoint, which is on its disk; all ranks call it."""
        if self._is_needed:
            path = distributed.on_rank_zero(lambda: newest, "the note of the newest checkpoint")
            with contextlib.suppress(OSError):  # without room: an older note is enough to warn
                self._write(_iteration(path))

    def _write(self, iteration: int) -> None:
        self._content["iteration"] = iteration
        if self._is_needed and not self._is_shared:
            temporary = self._path.with_name(f"{NOTE}-{self._rank}")
            temporary.write_text(json.dumps(self._content))
            os.replace(temporary, self._path)  # whole, whichever rank of this machine was the last


def _iteration(path: Path | None) -> int:
    found = checkpoint.iteration_of(path) if path else None
    return -1 if found is None else found


def code(experiment: type) -> dict[str, str]:
    """What a rank runs: versions, and checksums of expbase and of the experiment's files."""
    ours = Path(__file__).parent
    files = {*ours.rglob("*.py")} - {*ours.glob("experiments/*/*.py")}  # a link in a checkout
    facts = {"expbase": f"{_version.__version__} {sources.checksum(sorted(files))}"}
    facts |= {"python": platform.python_version(), "paddle": paddle.__version__}
    return {**facts, "numpy": numpy.__version__, **sources.checksums(experiment)}


def different_code(of_ranks: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """What each rank runs other than rank 0, the first; what only one of them has is left out."""
    (first_rank, first), *others = of_ranks.items()
    for rank, facts in others:
        names = [name for name in first if facts.get(name, first[name]) != first[name]]
        if names:
            told = ", ".join(f"{name} {facts[name]} (not {first[name]})" for name in names[:_NAMED])
            yield f"{rank} does not run the same as {first_rank}: {told}"
