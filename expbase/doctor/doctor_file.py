"""What the doctor keeps of a run, in a file of its own: nothing is lost without it.

kept = Kept(code={"optimizer._beta1": "float 0.9"}, conditions=conditions_of(experiment, code))
kept.looks[400] = Look(told={"module __main__.SEEN": "int 3"})
write(run_dir, kept)
read(checkpoint, 400)  # of the run that a checkpoint belongs to, up to its iteration
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.base.files import DAMAGES, checksum_of, read_bytes
from expbase.checkpoint import layout
from expbase.config import flatten
from expbase.engine.start import Options
from expbase.ranks import collectives
from expbase.record import provenance
from expbase.record.sources import Code

FILE = "doctor.json"
_MOST_BYTES = 1 << 26
# Options that a start may have otherwise than the start before: `config` and `opts` are in the
# config, and the others say how long, where and from what it trains.
_OF_EACH = {*vars(Options()), "config", "opts", "print_config"}


@dataclass
class Look:
    """What was seen at one capture of the state: texts of values by path."""

    told: dict[str, str] = field(default_factory=dict)  # what has changed, in any start
    asked: dict[str, str] = field(default_factory=dict)  # … in objects that are asked for a state


@dataclass
class Kept:
    """What the file has."""

    code: dict[str, str] = field(default_factory=dict)  # what the code of the last start has set
    hooked: dict[str, str] = field(default_factory=dict)  # what on_train_begin has set
    looks: dict[int, Look] = field(default_factory=dict)  # by iteration, in their order
    conditions: str = ""  # under which the code of the last start has set it; "": unknown


def conditions_of(experiment: Any, code: Code) -> str:
    """Returns a checksum of all on which what setup makes may depend, but for the data.

    That is code, packages, number of ranks, config and options, without how long and where it
    trains. Of a notebook, whose code is in no file, nobody knows: "".
    """
    if not code.files:
        return ""
    config = flatten(experiment.config)
    keys = [key for key in config if not key.startswith("training.") or key == "training.seed"]
    own = {name: value for name, value in vars(experiment.args).items() if name not in _OF_EACH}
    own["data"] = vars(experiment.args).get("data")
    facts = [code.files, provenance.packages(), collectives.world_size(), own]
    text = repr([*facts, {key: config[key] for key in sorted(keys)}])
    return f"{checksum_of([text.encode()]):08x}"


def write(run_dir: Path, kept: Kept) -> None:
    """Writes the file anew, if the system does not refuse: it is worth no error."""
    path = run_dir / FILE
    temporary = path.with_name(f".writing-{FILE}")
    with suppress(OSError):
        temporary.write_text(json.dumps(kept, default=vars))
        os.replace(temporary, path)


def read(checkpoint: Path, iteration: int) -> Kept:
    """Returns what was known of a run up to one of its checkpoints; nothing if it cannot be read.

    A run of expbase 1.0 has no such file: each of its manifests has what was told until then.
    """
    with suppress(OSError, *DAMAGES):
        found = json.loads(read_bytes(checkpoint.parent.parent / FILE, _MOST_BYTES))
        looks = {int(number): Look(**look) for number, look in found.get("looks", {}).items()}
        up_to = {number: look for number, look in looks.items() if number <= iteration}
        conditions = str(found.get("conditions", ""))
        return Kept({**found["code"]}, {**found.get("hooked", {})}, up_to, conditions)
    with suppress(OSError, *DAMAGES):
        manifest = json.loads(read_bytes(checkpoint / layout.MANIFEST, _MOST_BYTES))
        then = manifest["info"]["inventory"]
        look = Look({**then["told"]}, {**then.get("asked", {})})
        return Kept({**then.get("code", {})}, {}, {iteration: look})
    return Kept()
