"""A bucket in a directory, by the names that boto3 has; $BUCKETS is where."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def resource(service: str) -> Any:
    """boto3.resource("s3")."""
    assert service == "s3"
    return SimpleNamespace(Bucket=Bucket)


class Bucket:
    """What the recipe needs of a bucket."""

    def __init__(self, name: str) -> None:
        self._root = Path(os.environ["BUCKETS"], name)
        self.objects = SimpleNamespace(filter=self._listed)

    def _listed(self, Prefix: str) -> Iterator[Any]:
        paths = (path for path in self._root.rglob("*") if path.is_file())
        keys = sorted(str(path.relative_to(self._root)) for path in paths)
        return (SimpleNamespace(key=key) for key in keys if key.startswith(Prefix))

    def upload_file(self, Filename: str, Key: str) -> None:
        """Copies a file into the bucket."""
        path = self._root / Key
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Filename, path)

    def download_file(self, Key: str, Filename: str) -> None:
        """Copies a file out of the bucket."""
        shutil.copy(self._root / Key, Filename)
