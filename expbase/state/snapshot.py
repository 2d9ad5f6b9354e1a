"""What one rank writes of a checkpoint, and the names of its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.state.arrays import serialize
from expbase.state.objects import Tensors

FORMATS = 8, 9  # of state.json: without and with shares
STATE_FILE = "state.json"
SUFFIX = ".safetensors"
# Names of files that no attribute can have.
RANK = "@rank_"  # of what a rank has other than rank 0
SHARE = "@share_"  # of what a rank holds alone

Part = tuple[Tensors, dict[str, Any]]  # tensors and values that one rank has other than rank 0


@dataclass
class Snapshot:
    """Of rank 0 what all have, and of each rank its share."""

    tensors: Tensors
    values: dict[str, Any]
    ranks: list[Part]
    trained: set[tuple[str, str]]  # file and key of what must be finite
    others: int = 0  # bytes in the shares of the other ranks
    path: Path | None = None  # where all ranks write their shares
    iteration: int = 0
    is_needed: bool = True  # then that there is no room is an error
    facts: dict[str, Any] = field(default_factory=dict)  # for the manifest
    best: Sequence[int] = ()  # iterations whose checkpoints stay

    def nonfinite(self) -> str:
        """The first tensors that are not finite; "" if all are."""
        here = [(file, key) for file, key in self.trained if key in self.tensors.get(file, ())]
        bad = [f"{file}.{key}" for file, key in here if not self.tensors[file][key].is_finite()]
        return ", ".join(sorted(bad)[:3])

    def lack_of_room(self, directory: Path, files: Mapping[str, Sequence[Any]]) -> str:
        """What is needed, all shares included, and what there is; "" if enough, or `is_needed`."""
        size = sum(memoryview(part).nbytes for parts in files.values() for part in parts)
        # Up to a block more for each file, and for the directory.
        needed = size + self.others + 4096 * (len(files) + 2)
        if self.is_needed or needed <= (free := shutil.disk_usage(directory.parent).free):
            return ""
        return f"{needed / 1e6:,.1f} MB needed in {directory}, {free / 1e6:,.1f} MB free: make room"

    def tensor_files(self) -> dict[str, list[Any]]:
        """The content of each file of tensors, in buffers."""
        return {f"{n}{SUFFIX}": [*serialize(arrays)] for n, arrays in self.tensors.items()}

    def files(self) -> dict[str, list[Any]]:
        """On rank 0: the content of each file."""
        files = self.tensor_files()
        for rank, (other, _) in enumerate(self.ranks):
            flat = {f"{file}/{key}": array for file, a in other.items() for key, array in a.items()}
            if flat:
                files[f"{RANK}{rank}{SUFFIX}"] = [*serialize(flat)]
        text = {
            "format": FORMATS[any(name.startswith(SHARE) for name in files)],
            "values": self.values,
            "ranks": [of_rank for _, of_rank in self.ranks],
        }
        return {**files, STATE_FILE: [json.dumps(text, allow_nan=False).encode()]}
