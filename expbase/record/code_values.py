"""What the code of a run sets, as checksums by path: for the next start, which names what it sets
otherwise. Nothing is lost without the file.

    write(run_dir, {"optimizer._beta1": "float 0.9"})
    read(run_dir)                                     # {} if there is none that can be read
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from expbase.base.files import DAMAGES, read_bytes

FILE = "doctor.json"
_MOST_BYTES = 1 << 26


def write(run_dir: Path, code: Mapping[str, str]) -> None:
    """Writes the file anew, if the system does not refuse: it is worth no error."""
    path = run_dir / FILE
    temporary = path.with_name(f".writing-{FILE}")
    with suppress(OSError):
        temporary.write_text(json.dumps({"code": code}))
        os.replace(temporary, path)


def read(run_dir: Path) -> dict[str, str]:
    """Returns what the last start of a run has written; nothing if that cannot be read."""
    with suppress(OSError, *DAMAGES):
        code = json.loads(read_bytes(run_dir / FILE, _MOST_BYTES))["code"]
        return {str(path): str(text) for path, text in code.items()}
    return {}
