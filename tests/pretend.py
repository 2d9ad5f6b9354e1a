"""A pretend accelerator: a device whose memory the host cannot touch, built of tests/accelerator.

    python -m pytest --device intel_hpu -m "device or pretend" -n 0     # tests on it
    CUSTOM_DEVICE_ROOT=$(python tests/pretend.py) python train.py --device intel_hpu

It is built once per machine, where g++ is there. Its settings stand in accelerator/runtime.cc.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

NAME = "intel_hpu"  # accelerator/device.h tells why it is called so
SOURCES = Path(__file__).with_name("accelerator")
LIBRARY = "libpretend.so"
_FLAGS = "-std=c++17 -O1 -fPIC -shared -w -D_GLIBCXX_USE_CXX11_ABI=1".split()
_OF_PADDLE = "-DPADDLE_WITH_CUSTOM_DEVICE -DPADDLE_WITH_CUSTOM_KERNEL".split()
_LIBRARIES = "-lphi -lphi_core -lcommon -lpthread -lrt".split()


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


@functools.cache
def folder() -> Path | None:
    """The folder of the plug-in, which is built if it is not there; None: there is no g++."""
    if shutil.which("g++") is None:
        return None
    found = importlib.util.find_spec("paddle")
    assert found is not None
    paddle = Path(str(found.origin)).parent
    sources = sorted(SOURCES.iterdir())
    content = b"".join(source.read_bytes() for source in sources)
    text = f"{paddle} {(paddle / 'version' / '__init__.py').read_text()} {_FLAGS}"
    name = hashlib.sha256(content + text.encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"expbase-pretend-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    assert place.stat().st_uid == os.getuid()  # else its code would be somebody else's
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it
        target = place / name
        if not (target / LIBRARY).exists():
            target.mkdir(exist_ok=True)
            _build(paddle, target)
    return target


def _build(paddle: Path, target: Path) -> None:
    own = [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]
    compiled = []
    for source in sorted(SOURCES.glob("*.cc")):
        command = ["g++", "-c", *_FLAGS, *_OF_PADDLE, *own, str(source), "-o"]
        compiled.append(str(target / f"{source.stem}.o"))
        subprocess.run([*command, compiled[-1]], check=True)
    libraries = paddle / "libs"
    linked = target / f"{LIBRARY}.new"  # renamed when it is whole
    command = ["g++", "-shared", *compiled, "-o", str(linked), f"-L{libraries}"]
    subprocess.run([*command, *_LIBRARIES, f"-Wl,-rpath,{libraries}"], check=True)
    for path in compiled:
        os.unlink(path)
    linked.rename(target / LIBRARY)


def environment() -> dict[str, str]:
    """The variables with which a process has the device."""
    return {"CUSTOM_DEVICE_ROOT": str(folder()), "GLOG_minloglevel": "1"}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / LIBRARY))
    library.pretend_count.restype = ctypes.c_long
    for function in (library.pretend_used, library.pretend_peak):
        function.restype = ctypes.c_size_t
    return library


def counts() -> Counts:
    """What was counted in this process, which has the device, since its start."""
    return Counts(*(_library().pretend_count(which) for which in range(len(Counts._fields))))


def used_bytes(number: int = 0) -> int:
    """The memory of a device that is allocated now; paddle keeps what it has once had."""
    return int(_library().pretend_used(number))


def peak_bytes(number: int = 0) -> int:
    """The most memory of a device that was allocated at a time."""
    return int(_library().pretend_peak(number))


if __name__ == "__main__":
    print(folder() or "there is no g++")
