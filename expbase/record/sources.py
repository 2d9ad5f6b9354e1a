"""The Python files of an experiment, to tell whether another start has other code.

code = Code.of(type(experiment))
code.files                       # checksums: {"train.py": "0a1b2c3d", "nets/small.py": …}
code.changes_since(facts)        # "" or "nets/small.py: changed since …"
keep(code, output_dir)           # sources/train.0a1b2c3d.py, …
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase.base.files import regular

SOURCES = "sources"  # in the output directory
_OURS = Path(__file__).parents[1]
_MOST_BYTES = 1_000_000  # of the files that are kept of one start
_GONE = "gone"  # instead of a checksum: the file is not there any more


@dataclass(frozen=True)
class Code:
    """The code of an experiment when it was made: a file may be edited while it runs."""

    experiment: str  # "Experiment (train.py)"
    files: Mapping[str, str]  # checksums, by path in `folder`
    folder: Path

    @classmethod
    def of(cls, experiment: type) -> Code:
        """Returns the code of a class: its name, and the files that are loaded from its folder.

        The folder is that of its file, or of the outermost package that the file is in. Files of
        expbase and of installed packages are left out. A notebook has none.
        """
        module = sys.modules.get(experiment.__module__)
        own = Path(getattr(module, "__file__", None) or os.devnull)
        depth = str(getattr(module, "__package__", None) or "").count(".")
        folder = own.parents[min(depth, len(own.parents) - 1)]
        # By their names: there are thousands, and a Path of each takes half the time of a start.
        names = {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
        loaded = [Path(name) for name in sorted(names) if name.startswith(f"{folder}/")]
        files = {
            str(file.relative_to(folder)): _checksum(file)
            for file in loaded
            if file.suffix == ".py" and "-packages" not in str(file) and _OURS not in file.parents
        }
        is_file = module is not None and own != Path(os.devnull)
        where = f" ({own.relative_to(folder)})" if is_file else ""
        return cls(experiment.__name__ + where, files, folder)

    def facts(self) -> dict[str, Any]:
        """Returns the class and the checksums, as JSON values for a manifest or a ledger."""
        return {"code": self.experiment, "sources": dict(self.files)}

    def changes_since(self, then: Mapping[str, Any], *, of_others: bool = True) -> str:
        """Returns a sentence on how the code differs from that of a checkpoint; "" if it does not.

        Args:
            then: The `facts` of the checkpoint.
            of_others: Also tell that another class has written it.
        """
        found = []
        before = then.get("code", self.experiment)
        if before != self.experiment:
            if not of_others:
                return ""
            found.append(f"the checkpoint was written by {before}, and this is {self.experiment}")
        files = dict(then.get("sources", {}))
        if changed := [name for name, code in self.files.items() if files.get(name, code) != code]:
            found.append(f"{', '.join(changed)}: changed since the checkpoint was written")
        rest = "what training has changed comes from the checkpoint, all else from the code of now"
        return "; ".join([*found, rest]) if found else ""


def keep(code: Code, output_dir: Path, but: Collection[str] = ()) -> str:
    """Copies the files of a code into a run, each distinct one once.

    Args:
        code: The code.
        output_dir: Of the run.
        but: Names of files that are left out, since git has them.

    Returns:
        Why some or all are not kept; "" if all are.
    """
    there = {name: checksum for name, checksum in code.files.items() if checksum != _GONE}
    wanted = {name: checksum for name, checksum in there.items() if name not in but}
    try:
        size = sum((code.folder / name).stat().st_size for name in wanted)
        if size > _MOST_BYTES:
            return (
                f"the Python files of this script that git does not have are {size / 1e6:.1f} MB, "
                f"and a run keeps a copy of up to {_MOST_BYTES / 1e6:.0f} MB: it keeps none. "
                "Commit them, or copy them yourself."
            )
        for name, checksum in wanted.items():
            path = output_dir / kept_as(name, checksum)
            data = (code.folder / name).read_bytes()
            is_there = path.is_file() and path.stat().st_size == len(data)
            if _checksum_of(data) == checksum and not is_there:  # else it was edited since
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb", opener=regular) as file:  # no flush: 5 ms for each
                    file.write(data)
    except OSError as error:
        return f"the Python files of this script could not be copied into the run: {error.strerror}"
    return ""


def kept_as(name: str, checksum: str) -> str:
    """Returns the path, within a run, of the copy of a file with this checksum."""
    return f"{SOURCES}/{name.removesuffix('.py')}.{checksum}.py"


def _checksum(file: Path) -> str:
    try:
        return _checksum_of(file.read_bytes())
    except OSError:
        return _GONE


def _checksum_of(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
