"""The source files of an experiment: what another start, or another rank, may have changed.

checksums(type(experiment))     # {"train.py": "0a1b2c3d", "nets/small.py": …}
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from pathlib import Path

_OURS = Path(__file__).parents[1]


def checksums(experiment: type) -> dict[str, str]:
    """Of the files of its classes, and of what else is loaded from the folder of the first one.

    By their paths in that folder, and by their names elsewhere. Without expbase's own files, and
    without those of packages that are installed; none of a class that has no file, as in a
    notebook.
    """
    files = [_file_of(cls.__module__) for cls in experiment.__mro__]
    folder = next(iter(files), Path()).parent
    # By their names: there are thousands, and a Path of each takes half the time of a start.
    names = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]]
    loaded = {Path(name) for name in names if name.startswith(f"{folder}/")}
    return {
        str(file.relative_to(folder)) if folder in file.parents else file.name: _checksum(file)
        for file in sorted({*files, *loaded})
        if file.suffix == ".py" and "-packages" not in str(file) and _OURS not in file.parents
    }


def _file_of(module: str) -> Path:
    return Path(getattr(sys.modules.get(module), "__file__", None) or "")


def _checksum(file: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{zlib.crc32(file.read_bytes()):08x}"
    return "gone"
