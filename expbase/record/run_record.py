"""ledger.jsonl: one JSON object for each start and each end of a process of the run.

A start without an end is a process that was killed. A leaf; what a start or an end is worth
noting is passed in (provenance.py gathers it).

    ledger = Ledger(directory / "ledger.jsonl")
    ledger.write("start", iteration=400, ranks=2, config_changes=config_changes(directory, config))
    ledger.write("end", iteration=600, reason="finished", exit_code=0)   # and first_iteration=400
    for session in sessions(read(directory / "ledger.jsonl")): ...
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase.config import flatten, load_yaml
from expbase.meter import json_lines, json_value
from expbase.run_dir import CONFIG

LEDGER = "ledger.jsonl"


class Ledger:
    """Appends to the ledger of a run.

    Args:
        path: The file, made at the first record; None writes nothing (on ranks other than 0).
        clock: Gives the time in seconds since 1970.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._began: dict[str, Any] = {}  # what an end says of its start

    @property
    def writes(self) -> bool:
        """Whether it does: gathering what it is to note would be in vain otherwise."""
        return self._path is not None

    def write(self, event: str, **facts: Any) -> None:
        """Appends one record, so that it is on disk when this returns.

        Args:
            event: "start" or "end". An end also gets its start's iteration, `first_iteration`.
            **facts: JSON values.
        """
        if self._path is None:
            return
        if event == "start":
            self._began = {"first_iteration": facts.get("iteration")}
        elif event == "end":
            facts = {**self._began, **facts}
        record = {"event": event, "time": round(self._clock(), 3), **facts}
        with self._path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_with_newline(self._path):
                file.write("\n")  # a kill tore the record before
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# --- reading ---------------------------------------------------------------------------------


@dataclass
class Session:
    """What one process of the run noted.

    Attributes:
        start: Its first record; None if it failed before it began, because another rank did.
        end: Its last record; None if it is running, or was killed.
    """

    start: dict[str, Any] | None
    end: dict[str, Any] | None = None


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a ledger; torn ones are passed over, and without a file there are none.

    A field that is not of its kind is None, as if it had not been found out.

    Raises:
        OSError: It cannot be read.
    """
    return parse(path.read_bytes()) if path.exists() else []


def parse(data: bytes) -> list[dict[str, Any]]:
    """The records in the bytes of a ledger, as `read` gives them."""
    return [*map(_checked, json_lines(data))]


# What readers rely on, in the words of _fits: a text may say why a list or mapping is not known.
_FIELDS: dict[Any, Any] = {
    "time": (float, int),
    **dict.fromkeys(("iteration", "first_iteration", "ranks", "exit_code"), int),
    **dict.fromkeys(("reason", "resumed", "directory", "python", "platform", "host"), str),
    "command": [str],
    "config_changes": {...: [object, object]},
    "packages": ({...: str}, str),
    "local_packages": ([str], str),
    "environment": {...: str},
    "device": ({"name": str}, str),
    "git": {...: object},
}
_GIT_FIELDS: dict[Any, Any] = {
    **dict.fromkeys(("commit", "branch", "state", "note"), str),
    "left_out": {"count": int, "first": [str]},
}


def _checked(fields: Mapping[str, Any], kinds: Mapping[Any, Any] = _FIELDS) -> dict[str, Any]:
    checked = {n: v if _fits(v, kinds.get(n, object)) else None for n, v in fields.items()}
    if kinds is _FIELDS and isinstance(code := checked.get("git"), dict):
        checked["git"] = _checked(code, _GIT_FIELDS)
    return checked


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind.

    Args:
        value: From JSON.
        kind: A type; [kind]: a list of it; [kind, kind]: two; {name: kind}: with this entry;
            {...: kind}: whatever the names; (kind, kind): one of them.
    """
    if isinstance(kind, tuple):
        return any(_fits(value, one) for one in kind)
    if isinstance(kind, list):
        is_list = isinstance(value, list) and len(kind) in (1, len(value))
        return is_list and all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(
            _fits(item, one)
            for name, one in kind.items()
            for item in (value.values() if name is ... else [value.get(name)])
        )
    return isinstance(value, kind) and (kind is object or not isinstance(value, bool))


def last_start(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the last start noted; empty if there was none."""
    starts = [record for record in records if record.get("event") == "start"]
    return dict(starts[-1]) if starts else {}


def sessions(records: Iterable[Mapping[str, Any]]) -> list[Session]:
    """The starts with their ends, in order."""
    found: list[Session] = []
    for record in records:
        if record.get("event") == "start":
            found.append(Session(dict(record)))
        elif record.get("event") == "end":
            if not found or found[-1].end is not None:
                found.append(Session(None))
            found[-1].end = dict(record)
    return found


def config_changes(directory: Path, config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What a start changes in the config, against the start before it.

    Args:
        directory: The output directory, with the config.yaml of the first start.
        config: The config of this start, not yet in the ledger.

    Returns:
        `[before, now]` by full key, as JSON values; None also where there is no such key.

    Raises:
        ConfigError: The config.yaml cannot be read.
    """
    file = directory / CONFIG
    first = load_yaml(file) if file.exists() else {}  # dump_config may be overridden
    before = last_config(first, read(directory / LEDGER))
    now = _flat(config)
    keys = dict.fromkeys([*before, *now])
    pairs = {key: [before.get(key), now.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def last_config(first: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The config of the last start, by full keys and as JSON values.

    Args:
        first: That of the first start, from its config.yaml.
        records: Of the ledger; each start says what it changed.
    """
    config = _flat(first)
    for record in records:
        changes = record.get("config_changes") if record.get("event") == "start" else None
        if isinstance(changes, dict):  # an earlier expbase noted none
            config |= {key: pair[-1] for key, pair in changes.items()}
    return config


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in flatten(config).items()}


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON; what JSON does not have, as a text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return json_value(value) if isinstance(value, (str, int, float, type(None))) else str(value)
