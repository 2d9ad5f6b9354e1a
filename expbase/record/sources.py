"""The source files of an experiment: what another start, or another rank, may have changed.

checksums(type(experiment))     # {"train.py": "0a1b2c3d", "nets/small.py": …}
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from pathlib import Path

_OURS = Path(__file__).parents[1]


def checksums(experiment: type) -> dict[str, str]:
    """Returns those of what is loaded from the folder of the class's file, by path in that folder.

    Without expbase's own files, and without those of packages that are installed; of none if the
    class has no file, as in a notebook.
    """
    file = getattr(sys.modules.get(experiment.__module__), "__file__", None)
    folder = Path(file or os.devnull).parent
    # By their names: there are thousands, and a Path of each takes half the time of a start.
    names = {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
    loaded = [Path(name) for name in sorted(names) if name.startswith(f"{folder}/")]
    return {
        str(file.relative_to(folder)): _checksum(file)
        for file in loaded
        if file.suffix == ".py" and "-packages" not in str(file) and _OURS not in file.parents
    }


def _checksum(file: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{zlib.crc32(file.read_bytes()):08x}"
    return "gone"
