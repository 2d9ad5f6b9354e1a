"""Checkpoint directories that survive a kill at any moment: write, verify, prune.

A checkpoint appears complete or not at all: its files are written into a hidden directory and
flushed to disk; manifest.json, the last of them, lists their sizes and checksums; then the
directory is renamed. The newest whose manifest verifies is the one to continue from.

    path = write(directory, 400, {"model.safetensors": buffers, "state.json": [text]})
    path = newest_intact(directory, print)
    there = opened(path)                      # there.manifest, there.state, there.arrays
    prune(directory, keep_last=3)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expbase.base.files import (
    DAMAGES,
    checksum_of,
    flush,
    mapped,
    read_bytes,
    regular,
    remove,
    write_flushed,
)
from expbase.base.threads import result_of
from expbase.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    STATE_FILE,
    SUFFIX,
    CheckpointError,
    check_format,
    iteration_of,
    listed,
    name_of,
)

MOST_BYTES = 1 << 26  # of a manifest, or an index


class UnreadableError(CheckpointError):
    """The system refuses to read one, which is no damage: it is left where it is."""


def write(
    directory: Path,
    iteration: int,
    files: Mapping[str, Iterable[Any]],
    info: Mapping[str, Any] | None = None,
) -> Path:
    """Writes one checkpoint; it is complete and on disk when this returns.

    `files` has for each file the buffers that are its content. `info` goes into the manifest.

    Raises:
        CheckpointError: The system refused; earlier checkpoints are unchanged.
    """
    target = directory / name_of(iteration)
    temporary = directory / f".writing-{target.name}"
    try:
        if refused := remove(temporary):
            raise refused
        directory.mkdir(exist_ok=True)  # but not the run's, which may have been moved away
        temporary.mkdir()
        entries = {name: write_flushed(temporary / name, parts) for name, parts in files.items()}
        write_flushed(temporary / MANIFEST, [_manifest_bytes(iteration, entries, info or {})])
        flush(temporary)
        if refused := remove(target):  # a damaged one: no run saves an iteration twice
            raise refused
        temporary.rename(target)
        flush(directory)
        return target
    except BaseException as error:
        remove(temporary)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{target}: cannot be written: {error.strerror or error}. Earlier checkpoints are "
            "intact. Make room or correct the permissions."
        ) from error


def flush_logs(run: Path) -> None:
    """Writes the logs of a run to the disk, so that a power cut loses nothing of them."""
    for path in filter(Path.is_file, [*run.glob("*.jsonl"), *run.glob("*.log")]):
        with contextlib.suppress(OSError):  # a log that cannot be kept must not cost a checkpoint
            flush(path)


def verify(path: Path) -> dict[str, Any]:
    """Checks every byte of a checkpoint; returns its manifest.

    Raises:
        CheckpointError: A file is missing, longer, shorter or changed.
    """
    manifest = read_manifest(path)
    files = {path / name: entry for name, entry in manifest["files"].items()}
    with ThreadPoolExecutor() as executor:
        for job in [executor.submit(_verify_file, *item) for item in files.items()]:
            result_of(job, executor)  # raises what it raised
    return manifest


def _verify_file(file: Path, entry: Mapping[str, int]) -> None:
    with reading(file):
        if not file.is_file() or file.stat().st_size != entry["size"]:
            raise CheckpointError(f"{file}: is no file of {entry['size']} bytes.")
        # In pieces of which each gets the memory of the one before.
        with open(file, "rb", opener=regular) as stream:
            if checksum_of(iter(lambda: stream.read(1 << 16), b"")) != entry["crc32"]:
                raise CheckpointError(f"{file}: its content has changed since it was written.")


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns whatever is wrong with a file read in the block into one error that names it."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(
            f"{file}: cannot be read: {error.strerror}. That is no damage, and nothing was "
            "changed. Correct the permissions or the disk, and run the same command again."
        ) from error
    except DAMAGES as error:
        raise CheckpointError(f"{file}: damaged, or not of expbase: {error!r:.300}") from error


@dataclass
class Opened:
    """A checkpoint to read from: its files are mapped into memory."""

    path: Path
    manifest: dict[str, Any]
    files: dict[str, np.ndarray[Any, np.dtype[np.uint8]]]  # but for the manifest

    @property
    def info(self) -> dict[str, Any]:
        """What the manifest says beside its list of files."""
        with reading(self.path / MANIFEST):
            return dict(self.manifest["info"])

    @property
    def state(self) -> dict[str, Any]:
        """What state.json has."""
        return state_in(self.path, self.files[STATE_FILE].tobytes(), self.info)

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """The tensors by file and key, as arrays.Array: views of the files."""
        from expbase.base.arrays import parse  # here: a tool that only looks needs no paddle

        found = {}
        for name, data in self.files.items():
            if name.endswith(SUFFIX):
                with reading(self.path / name):
                    found[name.removesuffix(SUFFIX)] = parse(data)
        return found


def opened(path: Path) -> Opened:
    """Opens a checkpoint; who has found it has verified it.

    Raises:
        CheckpointError: Its manifest or a file is damaged.
    """
    manifest = read_manifest(path)
    return Opened(path, manifest, {name: mapped(path / name) for name in manifest["files"]})


def state_in(path: Path, text: bytes, info: Mapping[str, Any]) -> dict[str, Any]:
    """Parses the state of a checkpoint; a FormatError if another version of expbase wrote it."""
    with reading(path / STATE_FILE):
        state: dict[str, Any] = json.loads(text)
        # First: in another format all else may be another thing, and no damage.
        check_format(path, state["format"], info)
        return state


def check_format_at(path: Path) -> None:
    """Raises a FormatError if the checkpoint at a path is of another version of expbase.

    Nothing is said of one that is damaged: `verify` does that.
    """
    state = path / STATE_FILE
    with reading(state):
        if not state.is_file():
            return
        with state.open("rb") as file:
            head = file.read(64)
    number = re.match(rb'{"format": (\d+)', head)
    if number and int(number[1]) != FORMAT:
        check_format(path, int(number[1]), read_manifest(path)["info"])


def position_at(path: Path) -> tuple[Any, Any]:
    """Returns the iteration of a checkpoint, and its position in the data without its order.

    (None, None) if it has none: what is wrong with it is said when it is restored.
    """
    try:
        state = opened(path).state
        with reading(path / STATE_FILE):
            values = state["values"]
            position = {key: v for key, v in values["data"].items() if key != "loader"}
            return values["loop"]["iteration"], position
    except CheckpointError:
        return None, None


def newest_intact(directory: Path, say: Callable[[str], object]) -> Path | None:
    """Returns the newest checkpoint that verifies, in a directory that no other process writes to.

    Damaged newer ones are moved aside, if they can be; `say` is called with what was wrong with
    each. What a killed process left half written or half deleted is deleted, or told.

    Raises:
        CheckpointError: None is intact, and there are damaged ones; also those of earlier calls: a
            run must not begin anew because it was started twice.
    """
    for unfinished in (*directory.glob(".writing-*"), *directory.glob(".deleting-*")):
        if refused := remove(unfinished):
            say(f"{unfinished}: left by another start, and cannot be deleted: {refused.strerror}")
    stuck: list[str] = []

    def move_aside(damaged: Path, error: CheckpointError) -> None:
        aside = directory / f"damaged-{damaged.name}"
        remove(aside)  # an earlier one of the same iteration
        try:
            damaged.rename(aside)
            where = f"Moved aside to {aside.name}."
        except OSError as refused:
            stuck.append(damaged.name)
            where = f"It cannot be moved aside ({refused.strerror}), and is passed over."
        say(f"damaged checkpoint: {error} {where}")

    path = newest_verified(directory, move_aside)
    left = sorted([*stuck, *(file.name for file in directory.glob("damaged-*"))])
    if path is None and left:
        raise CheckpointError(
            f"{directory}: no intact checkpoint is left, and {', '.join(left)} is damaged. Repair "
            "one and rename it, or start over with --fresh."
        )
    return path


def newest_verified(
    directory: Path, reject: Callable[[Path, CheckpointError], object] = lambda path, error: None
) -> Path | None:
    """Returns the newest checkpoint that verifies; `reject` is called with each damaged newer one.

    Raises:
        UnreadableError: The system refuses to read one.
    """
    for path in reversed(listed(directory)):
        try:
            verify(path)
            return path
        except UnreadableError:
            raise
        except CheckpointError as error:
            reject(path, error)
    return None


def prune(
    directory: Path,
    keep_last: int,
    keep_every: int = 0,
    keep_best: Callable[[Collection[int]], Collection[int]] = lambda there: (),
    *,
    ignored: Collection[str] = (),
) -> dict[str, str]:
    """Deletes the checkpoints that nothing asks to keep.

    Kept are the newest `keep_last` (0: all), those at multiples of `keep_every` (0: none for that
    reason), and those that `keep_best` returns of the iterations that are there. Those of the
    `ignored` names do not count.

    Returns:
        By name of those to delete what the system refused; "": it is deleted.
    """
    done: dict[str, str] = {}
    if not keep_last:
        return done
    saved = [(path, iteration_of(path) or 0) for path in listed(directory)]
    best = keep_best([iteration for _, iteration in saved])
    there = [one for one in saved if one[0].name not in ignored]
    for path, iteration in there[:-keep_last]:
        if iteration not in best and not (keep_every and iteration % keep_every == 0):
            done[path.name] = _delete(path)
    return done


def _delete(path: Path) -> str:
    """Deletes a checkpoint, or says what the system refuses; who protects all of it keeps it."""
    doomed = path.with_name(f".deleting-{path.name}")
    try:
        files = {*os.listdir(path)}
        path.rename(doomed)  # so that none under a checkpoint's name is ever half deleted
        refused = remove(doomed)
        if refused is None:
            return ""
        if files != {*os.listdir(doomed)}:
            return f"{refused.strerror}. What is left of it is in {doomed.name}"
        doomed.rename(path)  # protected as by `chmod -R a-w`
        return str(refused.strerror)
    except OSError as error:
        return str(error.strerror)


def _manifest_bytes(iteration: int, files: Mapping[str, Any], info: Mapping[str, Any]) -> bytes:
    content = {"format": 1, "iteration": iteration, "files": files, "info": info}
    checksum = checksum_of([json.dumps(content, sort_keys=True).encode()])
    return (json.dumps(content | {"crc32": checksum}, sort_keys=True, indent=1) + "\n").encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint, whose files are not looked at."""
    file = path / MANIFEST
    with reading(file):
        if not file.is_file():
            raise CheckpointError(f"{file}: there is no such file.")
        raw = read_bytes(file, MOST_BYTES)
        manifest: dict[str, Any] = json.loads(raw)
        # The manifest has no checksum outside itself. Instead it is written again from what was
        # read, and must be the same to the byte: so no flipped bit is overlooked.
        same = raw == _manifest_bytes(manifest["iteration"], manifest["files"], manifest["info"])
        elsewhere = [name for name, _ in manifest["files"].items() if Path(name).name != name]
    if not same or elsewhere:
        raise CheckpointError(f"{file}: its content has changed since it was written.")
    return manifest
