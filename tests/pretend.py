"""A pretend accelerator: a device whose memory the host cannot touch, built of tests/accelerator.

    python -m pytest --device intel_hpu -m "device or pretend" -n 0     # tests on it
    CUSTOM_DEVICE_ROOT=$(python tests/pretend.py) python train.py --device intel_hpu

It is built once per machine. Its settings stand in accelerator/runtime.cc.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

NAME = "intel_hpu"  # accelerator/device.h tells why it is called so
SOURCES = Path(__file__).with_name("accelerator")
LIBRARY = "libpretend.so"
_FLAGS = "-std=c++17 -O1 -fPIC -shared -w -D_GLIBCXX_USE_CXX11_ABI=1".split()
_OF_PADDLE = "-DPADDLE_WITH_CUSTOM_DEVICE -DPADDLE_WITH_CUSTOM_KERNEL".split()
_LIBRARIES = "-lphi -lphi_core -lcommon -lpthread".split()
_KEPT_SECONDS = 7 * 24 * 3600.0


class Counts(NamedTuple):
    """How often a device was asked; the order is that of accelerator/runtime.cc."""

    synchronized: int
    to_device: int  # copies that the host waits for
    to_host: int
    within: int
    queued_to_device: int
    queued_to_host: int
    queued_within: int

    @property
    def waits(self) -> int:
        """How often the host has waited for the device."""
        return self.synchronized + self.to_device + self.to_host + self.within

    def since(self, before: Counts) -> Counts:
        """What was counted since then."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def missing() -> str:
    """Why it cannot be built here; empty: it can be."""
    if shutil.which("g++") is None:
        return "there is no g++"
    version = _paddle()[1]
    needs = "paddle 3.3, whose interface for devices has what is used"
    return "" if version >= (3, 3) else f"it needs {needs}; here is {version[0]}.{version[1]}"


@functools.cache
def folder() -> Path | None:
    """The folder of the plug-in, which is built if it is not there; None: something is missing."""
    if missing():
        return None
    paddle, version = _paddle()
    content = b"".join(source.read_bytes() for source in sorted(SOURCES.iterdir()))
    text = f"{paddle} {version} {_FLAGS}"
    name = hashlib.sha256(content + text.encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"expbase-pretend-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise RuntimeError(f"{place} is another user's, whose code would run: remove it")
    target = place / name
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it
        if not (target / LIBRARY).exists():
            _build(paddle, target)
            for other in place.iterdir():  # of sources that were changed since
                if other.is_dir() and time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(other)
        os.utime(target)
    return target


@functools.cache
def _paddle() -> tuple[Path, tuple[int, ...]]:
    """The folder of paddle and its version; an import would take seconds, and devices."""
    found = importlib.util.find_spec("paddle")
    assert found is not None
    paddle = Path(str(found.origin)).parent
    version = (paddle / "version" / "__init__.py").read_text().partition("full_version")[2]
    return paddle, tuple(map(int, re.findall(r"\d+", version)[:3]))


def _build(paddle: Path, target: Path) -> None:
    own = [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]
    libraries = paddle / "libs"
    with tempfile.TemporaryDirectory() as temporary:
        objects = {str(Path(temporary) / f"{one.stem}.o"): one for one in SOURCES.glob("*.cc")}
        flags = [*_FLAGS, *_OF_PADDLE, *own]
        _run([["g++", "-c", *flags, str(source), "-o", to] for to, source in objects.items()])
        library = str(Path(temporary) / LIBRARY)
        linked = [f"-L{libraries}", *_LIBRARIES, f"-Wl,-rpath,{libraries}"]
        _run([["g++", "-shared", *objects, "-o", library, *linked]])
        target.mkdir(exist_ok=True)
        shutil.move(library, target / f"{LIBRARY}.new")
    (target / f"{LIBRARY}.new").rename(target / LIBRARY)  # which is whole or not there


def _run(commands: list[list[str]]) -> None:
    """Runs them at the same time, and fails with what the first one says that fails."""
    pipe: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipe) for command in commands]
    for process, text in [(process, process.communicate()[1]) for process in processes]:
        if process.returncode:
            command = " ".join(map(str, process.args))
            raise RuntimeError(f"the pretend accelerator is not built: {command}\n{text[:3000]}")


def environment() -> dict[str, str]:
    """The variables with which a process has the device."""
    if missing():
        raise RuntimeError(f"the pretend accelerator is not built: {missing()}")
    return {"CUSTOM_DEVICE_ROOT": str(folder()), "GLOG_minloglevel": "1"}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / LIBRARY))
    library.pretend_count.restype = ctypes.c_long
    return library


def counts() -> Counts:
    """What was counted in this process, which has the device, since its start."""
    return Counts(*(_library().pretend_count(which) for which in range(len(Counts._fields))))


if __name__ == "__main__":
    print(environment()["CUSTOM_DEVICE_ROOT"])
