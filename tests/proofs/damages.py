"""Proves that foreign and damaged files are refused in a line, and do no harm.

Files of all formats of a run are made, and each is damaged in a random way: cut off, with other
bytes, with numbers, names and lists in the places of each other, huge, nested, twice, or in their
place a directory, a link or a pipe. Pickles also get programs that run something. Each is read in a
process of its own, as load_model, a start or a tool would: it must be read, or be one error of ours
without a traceback; nothing that it names may run; no process may crash, take more than 10 s, or
need more than 1.5 times its size and 200 MB.

    python tests/proofs/damages.py [--count 300] [--seed 0] [FORMAT …]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import pickletools
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import paddle  # noqa: E402
import visualdl  # noqa: E402, F401  # what each start would import, and grow by
from tiny import Tiny, make, trained  # noqa: E402

from expbase.__main__ import main as tool  # noqa: E402
from expbase.base.files import checksum_of  # noqa: E402
from expbase.checkpoint import layout, storage  # noqa: E402
from expbase.checkpoint.layout import CheckpointError  # noqa: E402
from expbase.checkpoint.model_files import WeightsError, read_weights  # noqa: E402
from expbase.config import ConfigError  # noqa: E402
from expbase.tools import show  # noqa: E402

SECONDS = 10
TIMES, MORE_BYTES = 1.5, 200 << 20
OURS = (CheckpointError, WeightsError, ConfigError)
MARK = Path(tempfile.gettempdir()) / f"damages-{os.getpid()}"  # what a program in a file makes
TOUCH = f"open({str(MARK)!r}, 'w')"


class Full(Tiny):
    """With a generator, and a rate that no schedule decides."""

    def setup_model(self) -> None:
        super().setup_model()
        self.random = np.random.default_rng(3)
        self.other = paddle.optimizer.SGD(0.5, parameters=self.model.parameters())
        self.seen = [0.5]

    def train_batch(self) -> None:
        super().train_batch()
        self.seen.append(self.random.random())


class Ran:
    """Pickled, it is a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


# --- damages -----------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Callable[[], Any], ...] = (
    *(lambda v=v: v for v in (None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1.5, 1e300, "", "x")),
    *(lambda v=v: v for v in ([], {}, [[]], [-1], [2**62, 4], [1.0], ["1"], "../x", "/dev/zero")),
    *(lambda v=v: v for v in ({"$tensor": "x"}, {"$array": [0, 0, 0]}, {"$tuple": 3}, {"$": 1})),
    lambda: nested(5000),
    lambda: float("nan"),
    lambda: [10**30] * 3000,
    lambda: [int("7" * 4000)] * 3000,
    lambda: 10**30,
    lambda: "y" * 100_000,
)


def other_json(value: Any, source: random.Random) -> Any:
    """The value with something else in one place of it."""
    if isinstance(value, (dict, list)) and value and source.random() < 0.85:
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        key = source.choice(keys)
        changed = value.copy()
        way = source.random()
        if way < 0.15:
            del changed[key]
        elif way < 0.25 and isinstance(value, dict):
            changed[source.choice((str(key) + "x", "", "a/b", "__metadata__"))] = changed.pop(key)
        else:
            changed[key] = other_json(changed[key], source)
        return changed
    return source.choice(VALUES)()


def text_of(value: Any, source: random.Random) -> bytes:
    """As JSON, at times with a key twice."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "[" * 100_000
    if source.random() < 0.1 and ":" in text:
        first = text.index("{") + 1
        text = text[:first] + text[first : text.index(":", first)] + ": 7, " + text[first:]
    return text.encode()


def other_bytes(data: bytes, source: random.Random) -> bytes:
    """Cut off, longer, or with some other bytes."""
    way = source.randrange(5)
    place = source.randrange(len(data) + 1)
    if way == 0:
        return data[:place]
    if way == 1:
        return data[:place] + source.randbytes(source.choice((1, 8, 1000))) + data[place:]
    if way == 2:
        return data + data[:place]
    changed = bytearray(data)
    for _ in range(source.choice((1, 3, 50))):
        near = min(len(data), 400) if way == 3 else len(data)  # the beginning says most
        if near:
            changed[source.randrange(near)] = source.randrange(256)
    return bytes(changed)


def other_tensors(data: bytes, source: random.Random) -> bytes:
    """A safetensors file with another header, or other bytes."""
    if source.random() < 0.3:
        return other_bytes(data, source)
    (length,) = struct.unpack("<Q", data[:8])
    header = other_json(json.loads(data[8 : 8 + length]), source)
    text = text_of(header, source)
    says = len(text) if source.random() < 0.9 else source.choice((0, 2**63, 2**64 - 1, 10**9))
    return struct.pack("<Q", says) + text + data[8 + length :]


def other_pickle(data: bytes, source: random.Random) -> bytes:
    """A pickle with other bytes, with other operations, or with a program in it."""
    way = source.random()
    if way < 0.3:
        return other_bytes(data, source)
    if way < 0.6:
        return pickle.dumps({"w": source.choice(PROGRAMS)()}, source.choice((2, 4)))
    places = [place for _, _, place in pickletools.genops(data) if place]
    place = source.choice(places)
    codes = source.choice(
        (b"2" * 1000, b"]" * 10_000, b"(" * 10_000, b"\x85" * 3000, b"0", b"s", b"R", b"b", b"e",
         b"\x8d" + struct.pack("<Q", 2**40), b"\x8b" + struct.pack("<I", 2**31 - 1),
         b"B" + struct.pack("<I", 2**32 - 1), b"j" + struct.pack("<I", 2**32 - 1),
         b"r" + struct.pack("<I", 2**32 - 1), b"cos\nsystem\n", b"cbuiltins\nexec\n")
    )  # fmt: skip
    return data[:place] + codes + data[place:]


PROGRAMS: tuple[Callable[[], Any], ...] = (
    lambda: Ran(exec, TOUCH),
    lambda: Ran(os.system, f"touch {MARK}"),
    lambda: Ran(eval, TOUCH),
    lambda: Ran(getattr, Ran(__import__, "os"), "system"),
    lambda: np.zeros(2, object),
    lambda: np.zeros((0, 2**40)),
    lambda: {(((((1,),),),),): 2},
    lambda: nested(200),
    lambda: [2**100_000] * 100,
    lambda: Ran(bytearray, 2**33),
    lambda: Ran(tuple, "a" * 1000),
)


def of_pickle(folder: Path, good: Path, source: random.Random) -> Path:
    """A damaged `.pdparams`."""
    path = folder / "model.pdparams"
    data = pickle.dumps(pickle.loads(good.read_bytes()), source.choice((2, 3, 4, 5)))
    path.write_bytes(other_pickle(data, source))
    return path


def of_tensors(folder: Path, good: Path, source: random.Random) -> Path:
    """A damaged `.safetensors`."""
    path = folder / "model.safetensors"
    path.write_bytes(other_tensors(good.read_bytes(), source))
    return path


def of_checkpoint(folder: Path, good: Path, source: random.Random) -> Path:
    """A run whose only checkpoint is damaged; two of three times the manifest does not show it."""
    run = folder / "run"
    shutil.copytree(good, run)
    (path,) = layout.listed(run / layout.FOLDER)
    file = source.choice(sorted(path.iterdir()))
    if source.random() < 0.15:
        file.unlink()
        links = (lambda: file.symlink_to("/dev/zero"), lambda: file.symlink_to(file))
        source.choice((file.mkdir, lambda: os.mkfifo(file), lambda: None, *links))()
        return run
    data = file.read_bytes()
    manifest = json.loads((path / layout.MANIFEST).read_bytes())
    if source.random() < 0.03:
        file.write_bytes(b"")
    elif file.name == layout.MANIFEST:
        manifest = other_json(manifest, source)
    elif file.suffix == ".json":
        file.write_bytes(text_of(other_json(json.loads(data), source), source))
    else:
        file.write_bytes(other_tensors(data, source))
    if source.random() < 0.7:
        write_manifest(path, manifest, file.name)
    return run


def of_run(folder: Path, good: Path, source: random.Random) -> Path:
    """A run of which a file beside the checkpoints is damaged, or something else."""
    run = folder / "run"
    shutil.copytree(good, run)
    names = ("config.yaml", "metrics.jsonl", "validations.jsonl", "ledger.jsonl", "worker_0.log",
             "vdlrecords.run.log", ".lock-0", "STOP")  # fmt: skip
    file = run / source.choice(names)
    if source.random() < 0.25:
        file.unlink(missing_ok=True)
        links = (lambda: file.symlink_to("/dev/zero"), lambda: file.symlink_to("/nowhere"))
        source.choice((file.mkdir, lambda: os.mkfifo(file), lambda: None, *links))()
    elif file.suffix == ".yaml":
        file.write_bytes(other_yaml(file.read_bytes(), source))
    elif file.suffix == ".jsonl" and source.random() < 0.7:
        records = [json.loads(line) for line in file.read_bytes().splitlines()]
        number = source.randrange(len(records))
        lines = [json.dumps(record).encode() for record in records]
        lines[number] = text_of(other_json(records[number], source), source)
        file.write_bytes(b"\n".join(lines) + b"\n" * source.choice((0, 1)))
    elif file.exists():
        file.write_bytes(other_bytes(file.read_bytes(), source))
    return run


def other_yaml(data: bytes, source: random.Random) -> bytes:
    """Other bytes, aliases of aliases, or other values."""
    lines = data.splitlines()
    line = source.randrange(len(lines))
    bomb = b"".join(b"b%d: &b%d [%s]\n" % (n, n, b", ".join([b"*b%d" % (n - 1)] * 9))
                    for n in range(1, 12))  # fmt: skip
    more = (
        *(b"b0: &b0 x\n" + bomb, b"b0: &b0 [*b0]\n", b"m: &m {<<: *m}\n", b"x: !!bool maybe\n"),
        *(b"x: 0x" + b"f" * 100_000, b"x: 1" + b":1" * 100_000, b"x: " + b"[" * 10_000),
        *(b"".join(b"k%d: 1\n" % n for n in range(30_000)), b"x: 2020-13-45\n", b"? [1]\n: 2\n"),
        b"#" * (1 << 21),
    )
    way = source.randrange(3)
    if way == 0:
        return other_bytes(data, source)
    if way == 1:
        return data + source.choice(more)
    key = lines[line].partition(b":")[0]
    lines[line] = key + b": " + json.dumps(source.choice(VALUES[:-4])()).encode()[:5000]
    return b"\n".join(lines)


def of_index(folder: Path, good: Path, source: random.Random) -> Path:
    """A model in parts, whose index or whose part is damaged, or a pipe."""
    index = folder / "model.safetensors.index.json"
    content = {"weight_map": {"0.weight": "part.safetensors", "3.bias": "part.safetensors"}}
    part = of_tensors(folder, good, source).rename(folder / "part.safetensors")
    if source.random() < 0.2:
        part.unlink()
        os.mkfifo(part)
    index.write_bytes(text_of(other_json(content, source), source))
    if source.random() < 0.1:
        index.unlink()
        os.mkfifo(index)
    return index


def write_manifest(path: Path, manifest: Any, changed: str) -> None:
    """One that agrees with what is there, if it has its parts."""
    with contextlib.suppress(Exception):
        if changed != layout.MANIFEST:
            data = (path / changed).read_bytes()
            entry = {"size": len(data), "crc32": checksum_of([data])}
            manifest["files"][changed] = entry
        parts = manifest["iteration"], manifest["files"], manifest["info"]
        (path / layout.MANIFEST).write_bytes(storage._manifest_bytes(*parts))
        return
    (path / layout.MANIFEST).write_bytes(text_of(manifest, random.Random(0)))


# --- reading -----------------------------------------------------------------------------------


def resume(run: Path) -> None:
    """As the same command would."""
    exp = make(Full, run, max_iteration=4, save_interval=2)
    exp.setup()
    exp.resume_or_load()
    exp.close()


def look(run: Path) -> None:
    """As `python -m expbase show` does at a checkpoint."""
    show.of_checkpoint(layout.listed(run / layout.FOLDER)[0])


def start(run: Path) -> None:
    """As the same command would, to the end, after whom the tools look."""
    trained(Full, run, max_iteration=4, save_interval=2)
    list_and_show(run)


def list_and_show(run: Path) -> None:
    """As somebody who looks at the runs in a folder; they answer with a line, and code 1."""
    for words in (["ls", str(run.parent)], ["ls", "--json", str(run.parent)], ["show", str(run)]):
        tool(words)


@dataclass(frozen=True)
class Format:
    """How a good file is made, damaged and read."""

    good: str
    damage: Callable[[Path, Path, random.Random], Path]
    read: Callable[[Path], object]


FORMATS = {
    "pdparams": Format("model.pdparams", of_pickle, read_weights),
    "safetensors": Format("model.safetensors", of_tensors, read_weights),
    "checkpoint": Format("run", of_checkpoint, resume),
    "shown": Format("run", of_checkpoint, look),
    "started": Format("run", of_run, start),
    "listed": Format("run", of_run, list_and_show),
    "index": Format("model.safetensors", of_index, read_weights),
}


def make_good(folder: Path) -> None:
    """A good one of each; in a process of its own, so that ours has no threads of paddle's."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    with contextlib.redirect_stderr(io.StringIO()):
        exp = trained(Full, folder / "run", max_iteration=2, save_interval=2)
        exp.save_model(folder / "model.safetensors")
        exp.save_model(folder / "model.pdparams")
    os._exit(0)


def outcome(read: Callable[[Path], object], path: Path) -> tuple[str, str]:
    """What came of reading it in another process, and what it said."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        os.setsid()
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            found = read_here(read, path)
        with os.fdopen(sending, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(sending)
    previous = signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.alarm(SECONDS)
    try:
        with os.fdopen(receiving) as pipe:
            text = pipe.read()
        status = os.waitpid(pid, 0)[1]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if text:
        kind, said = json.loads(text)
        return str(kind), str(said)
    return ("HUNG" if status == signal.SIGKILL else "CRASHED"), f"status {status}"


def read_here(read: Callable[[Path], object], path: Path) -> tuple[str, str]:
    """In this process, which then ends."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is from now on
    try:
        read(path)
        found = "read", ""
    except OURS as error:
        found = "refused", str(error)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "TRACEBACK", f"{error!r:.300} at {place.filename}:{place.lineno}"
    grown = memory("VmHWM") - before
    grown = max(grown, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
    size = sum(f.stat().st_size for f in [path, *path.rglob("*")] if f.is_file())
    return ("SWOLLEN", f"{grown >> 20} MB") if grown > TIMES * size + MORE_BYTES else found


def memory(name: str) -> int:
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) << 10


def prove(name: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How many ended in which way, and what is wrong."""
    kinds: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory(prefix="damages-") as folder:
        make_good(Path(folder))
        for number in range(count):
            case = Path(folder) / f"case-{number}"
            case.mkdir()
            form = FORMATS[name]
            source = random.Random(f"{name} {seed} {number}")
            path = form.damage(case, Path(folder) / form.good, source)
            kind, said = outcome(form.read, path)
            kinds[kind] += 1
            if MARK.exists():
                kind = "RAN"
                MARK.unlink()
            if kind.isupper() or len(said.splitlines()) > 25:
                wrong.append(f"{name} {number}: {kind}: {said}")
            shutil.rmtree(case)
    return kinds, wrong


def main() -> int:
    """Prints the counts; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = int(args.count < 1)  # nothing is proved then
    for name in args.formats or FORMATS:
        began = time.monotonic()
        kinds, wrong = prove(name, args.count, args.seed)
        bad += len(wrong)
        for text in wrong:
            print(f"WRONG: {text}", flush=True)
        words = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        seconds = time.monotonic() - began
        print(
            f"{name}: {args.count - len(wrong)} of {args.count}: {words} ({seconds:.0f} s)",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
