"""The Python files of an experiment, to tell whether another start has other code.

code = Code.of(type(experiment))
code.files                       # checksums: {"train.py": "0a1b2c3d", "nets/small.py": …}
code.changes_since(facts)        # "" or "nets/small.py: changed since …"
keep(code, output_dir)           # sources/train.0a1b2c3d.py, …
"""

from __future__ import annotations

import functools
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
    """The code of an experiment when it was loaded: a file may be edited while it runs."""

    experiment: str  # "Experiment (train.py)"
    texts: Mapping[str, bytes | None]  # by path in `folder`; None: the file is not there any more
    folder: Path
    process: int  # that has loaded it, of which this one may be a fork

    @classmethod
    def of(cls, experiment: type, before: Code | None = None) -> Code:
        """Returns the code of a class: its name, and the files that are loaded from its folder.

        The folder is that of its file, or of the outermost package that the file is in. Files of
        expbase and of installed packages are left out. A notebook has none. The texts that are in
        `before` are not read anew.
        """
        module = sys.modules.get(experiment.__module__)
        own = Path(getattr(module, "__file__", None) or os.devnull)
        depth = str(getattr(module, "__package__", None) or "").count(".")
        folder = own.parents[min(depth, len(own.parents) - 1)]
        # By their names: there are thousands, and a Path of each takes half the time of a start.
        names = {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
        loaded = [Path(name) for name in sorted(names) if name.startswith(f"{folder}/")]
        known = (
            {before.folder / name: text for name, text in before.texts.items()} if before else {}
        )
        texts = {
            str(file.relative_to(folder)): known[file] if file in known else _text(file)
            for file in loaded
            if file.suffix == ".py" and "-packages" not in str(file) and _OURS not in file.parents
        }
        is_file = module is not None and own != Path(os.devnull)
        where = f" ({own.relative_to(folder)})" if is_file else ""
        process = before.process if before else os.getpid()
        return cls(experiment.__name__ + where, texts, folder, process)

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The checksums of the texts."""
        return {n: _GONE if t is None else f"{zlib.crc32(t):08x}" for n, t in self.texts.items()}

    def edited(self) -> list[str]:
        """Returns the files whose text on the disk is another one now."""
        return [name for name, text in self.texts.items() if _text(self.folder / name) != text]

    def facts(self) -> dict[str, Any]:
        """Returns the class and the checksums, as JSON values for a manifest or a ledger."""
        return {"code": self.experiment, "sources": self.files}

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
    wanted = {name: text for name, text in code.texts.items() if text is not None}
    wanted = {name: text for name, text in wanted.items() if name not in but}
    size = sum(map(len, wanted.values()))
    try:
        if size > _MOST_BYTES:
            return (
                f"the Python files of this script that git does not have are {size / 1e6:.1f} MB, "
                f"and a run keeps a copy of up to {_MOST_BYTES / 1e6:.0f} MB: it keeps none. "
                "Commit them, or copy them yourself."
            )
        for name, data in wanted.items():
            path = output_dir / kept_as(name, code.files[name])
            if not (path.is_file() and path.stat().st_size == len(data)):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb", opener=regular) as file:  # no flush: 5 ms for each
                    file.write(data)
    except OSError as error:
        return f"the Python files of this script could not be copied into the run: {error.strerror}"
    return ""


def kept_as(name: str, checksum: str) -> str:
    """Returns the path, within a run, of the copy of a file with this checksum."""
    return f"{SOURCES}/{name.removesuffix('.py')}.{checksum}.py"


def _text(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
