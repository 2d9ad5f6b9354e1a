"""What rank 0 writes of a checkpoint, and the names of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from expbase.base.arrays import serialize
from expbase.state.objects import Tensors

FORMAT = 13  # of state.json
STATE_FILE = "state.json"
SUFFIX = ".safetensors"
ARRAYS = "@values"  # the file of the arrays in entries other than the objects
SHARES = "shares"  # the entry of what each share has
LOCAL = "@local_"  # what the name of the files of local state begins with; no attribute's can

Name = tuple[str, str]  # file and key of a tensor


@dataclass
class Snapshot:
    """The state of all ranks at a save."""

    tensors: Tensors
    values: dict[str, Any]
    local: list[dict[str, Any]]  # the values that each rank has other than rank 0
    trained: set[Name]  # must be finite

    def nonfinite(self) -> str:
        """The first tensors that are not finite; "" if all are."""
        bad = [f"{f}.{key}" for f, key in self.trained if not self.tensors[f][key].is_finite()]
        return ", ".join(sorted(bad)[:3])

    def files(self) -> dict[str, list[Any]]:
        """The content of each file, in buffers."""
        state = {"format": FORMAT, "values": self.values, "local": self.local}
        return {
            **{f"{name}{SUFFIX}": [*serialize(arrays)] for name, arrays in self.tensors.items()},
            STATE_FILE: [json.dumps(state).encode()],
        }
