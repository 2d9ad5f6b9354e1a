"""Files of paddle: all real ones are read, and no hostile one runs, fills or crashes anything."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import numpy as np
import paddle
import pytest

from expbase.base.arrays import Array
from expbase.checkpoint import pdparams
from expbase.checkpoint.pdparams import PdparamsError

RECONSTRUCT = np.zeros(1).__reduce__()[0]  # numpy moved it with version 2
SCALAR = np.float64(1).__reduce__()[0]  # type: ignore[index]  # it is a tuple
PLAIN = (3, "<", None, None, None, -1, -1, 0)  # the state of a plain type


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], dict[str, Array]]:
    def parse(content: bytes) -> dict[str, Array]:
        path = tmp_path / "x.pdparams"
        path.write_bytes(content)
        return pdparams.read_arrays(path)

    return parse


class Call:
    """A pickle of it calls a function, and then sets a state, when it is unpickled."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self._reduced = (function, args, state)

    def __reduce__(self) -> Any:
        return self._reduced


def dtype(text: Any = "f4", state: Any = PLAIN) -> Call:
    return Call(np.dtype, text, False, True, state=state)


def array(shape: Any, kind: Any, data: Any) -> Call:
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, shape, kind, False, data))


def sized(shape: Any, data: bytes) -> Call:
    return array(shape, dtype(), data)


def typed(text: Any, state: Any = PLAIN) -> Call:
    return array((1,), dtype(text, state), b"1234")


# --- what is read ------------------------------------------------------------------------------


def contents() -> dict[str, Any]:
    """What people save with paddle.save."""
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 2), paddle.nn.BatchNorm1D(2))
    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.Adam(schedule, parameters=model.parameters())
    model(paddle.ones([2, 3])).mean().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "mixed": OrderedDict(
            bf16=paddle.ones([2]).astype("bfloat16"),
            fortran=np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            scalar=np.float64(3),
            zero_d=np.array(True),
            empty=np.zeros((0, 2)),
            big_endian=np.arange(3).astype(">i4"),
            complex=np.ones(2, "complex64"),
            twice=[np.ones(2), paddle.ones([1]), 1, -(2**40), 2.5, None, (1, 2, 3, 4), "text"],
            nested={"layer": {"weight": paddle.ones([1])}},
        ),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> dict[str, bytes]:
    """Each content in each protocol, as paddle.save writes it."""
    directory: Path = tmp_path_factory.mktemp("files")
    written = {}
    for name, content in contents().items():
        for protocol in (2, 3, 4):
            path = directory / f"{name}{protocol}"
            paddle.save(content, str(path), protocol=protocol)
            written[path.name] = path.read_bytes()
    return written


Parse = Callable[[bytes], dict[str, Array]]


def test_files_of_paddle_are_read_in_every_protocol(files: dict[str, bytes], parse: Parse) -> None:
    for name, data in files.items():
        found = parse(data)
        unpickled = pickle.loads(data)
        for key, value in unpickled.items():
            value = value[1] if isinstance(value, tuple) else value  # (automatic name, array)
            if not isinstance(value, np.ndarray):
                assert key not in found
                continue
            native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
            assert found[key].data.tobytes() == native.tobytes(), (name, key)
            assert found[key].shape == value.shape
            bits = "bfloat16" if value.dtype == np.uint16 else value.dtype.name
            assert found[key].dtype == bits
    assert parse(files["mixed4"])["bf16"].dtype == "bfloat16"
    assert len(parse(files["optimizer2"])) == len(parse(files["optimizer4"])) > 10


def test_plain_values_and_the_names_of_tensors_are_read(tmp_path: Path) -> None:
    tensor = paddle.ones([1])
    values = {
        "last_lr": np.float64(0.1),
        "last_epoch": 3,
        "best": None,
        "rates": [0.5, np.bool_(1)],
    }
    paddle.save({"LR_Scheduler": values, "weight": tensor, "own": np.ones(1)}, str(tmp_path / "x"))
    found, names = pdparams.unpack(tmp_path / "x")
    assert found["LR_Scheduler"] == values
    assert type(found["LR_Scheduler"]["last_lr"]) is float
    assert names == {"weight": tensor.name}
    paddle.save({"weight": tensor}, str(tmp_path / "y"))
    assert pdparams.unpack(tmp_path / "y")[1] == {"weight": tensor.name}


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_file_that_calls_a_function_is_refused_and_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parse: Parse, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"weight": np.ones(3), "evil": Call(os.mkdir, "harm")}
    with pytest.raises(PdparamsError, match=r"names '.*could run code"):
        parse(pickle.dumps(content, protocol))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["builtins eval", "numpy load", "collections Counter"])
def test_only_the_names_that_arrays_need_are_known(parse: Parse, name: str) -> None:
    with pytest.raises(PdparamsError, match=f"names '{name.replace(' ', '.')}', which .* run code"):
        parse(f"c{name.replace(' ', chr(10))}\n.".encode())


def refused(parse: Parse, content: bytes, text: str) -> None:
    """Asserts that it is one line with this text, and costs this process next to nothing."""
    tracemalloc.start()
    try:
        with pytest.raises(PdparamsError) as caught:
            parse(content)
        assert tracemalloc.get_traced_memory()[1] < len(content) + (50 << 20)
    finally:
        tracemalloc.stop()
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# By what is wrong with it: how it is made, and what is said about it.
HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    # Were it to believe that this type of objects has no flags, numpy would take the bytes for
    # the pointer of an object.
    "objects without their flags": (
        lambda: array((1,), dtype("O", (3, "|", None, None, None, -1, -1, 0)), b"AAAAAAAA"),
        "type 'O'; expected a type of numbers",
    ),
    "records of objects": (lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "O")]), "type 'V12'"),
    "texts": (lambda: np.array(["ab"]), "type 'U2'"),
    "a description of records": (lambda: typed("f4,O"), "type 'f4,O'"),
    "a type of no name": (lambda: typed(np.float32), "names 'numpy.float32'"),
    "no type": (lambda: array((1,), "f4", b"1234"), "no attribute 'text'"),
    "a byte order": (lambda: typed("f4", (3, "!", *PLAIN[2:])), "type '!f4'"),
    "a type in a type": (lambda: typed("f4", (3, "O,", *PLAIN[2:])), "type 'O,f4'"),
    "no byte order": (lambda: typed("f4", 3), "not subscriptable"),
    "too few bytes": (lambda: sized((5,), b"1234"), "size 1 into shape (5,)"),
    "too many bytes": (lambda: sized((), b"12345"), "a multiple of element size"),
    "negative sizes": (lambda: sized((-1, -1), b"1234"), "one unknown dimension"),
    "a huge shape": (lambda: sized((2**62, 4), b""), "size 0 into shape (46116"),
    "a huge empty shape": (lambda: sized((2**80, 0), b""), "Maximum allowed dimension"),
    "long numbers in a shape": (lambda: sized((2**2000,) * 5000, b""), "dimension"),
    "fractions": (lambda: sized((1.0,), b"1234"), "cannot be interpreted as an integer"),
    "a number for a shape": (lambda: sized(1, b"1234"), "iterable"),
    "a list of content": (lambda: array((1,), dtype("i8"), [1]), "a bytes-like object is required"),
    "no content": (lambda: Call(RECONSTRUCT, np.ndarray, (0,), b"b"), "non-iterable NoneType"),
    "a scalar of an object": (lambda: Call(SCALAR, dtype("O"), b"AAAAAAAA"), "type 'O'"),
    "a scalar of few bytes": (lambda: Call(SCALAR, dtype(), b"12"), "not a multiple of itemsize"),
    "bytes in another code": (lambda: Call(codecs.encode, "a", "zip"), "not a text encoding"),
    "a tuple of bytes": (lambda: Call(tuple, bytes(10)), "too many values to unpack"),
    "plain bytes": (lambda: b"1", "object has no attribute 'data'"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_a_line(parse: Parse, kind: str) -> None:
    make, text = HOSTILE[kind]
    refused(parse, pickle.dumps({"good": np.ones(2), "x": make()}, 2), text)


# numpy would make something of these; here they are the numbers that their bytes are, or nothing.
HARMLESS: dict[str, Callable[[], Any]] = {
    "flags": lambda: typed("f4", (*PLAIN[:7], 63)),
    "fields": lambda: typed("f4", (*PLAIN[:3], ("a",), {}, -1, -1, 0)),
    "a list for a type": lambda: typed("f4", [3, "<"]),
    "an unknown size": lambda: sized((-1,), b"1234"),
    "arguments of a dict": lambda: Call(OrderedDict, [["a", 1]]),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_a_strange_type_is_the_numbers_that_its_bytes_are(parse: Parse, kind: str) -> None:
    found = parse(pickle.dumps({"good": np.ones(2), "x": HARMLESS[kind]()}))
    assert found.pop("good").shape == (2,)
    assert [(str(item), item.data.tobytes()) for item in found.values()] in (
        [],
        [("float32 [1]", b"1234")],
    )


LIMITS = (
    "more memory or time than a file of its size should, or crashes Python. Convert it to safet"
)


def doubled(times: int) -> Any:
    value: Any = []
    for _ in range(times):
        value = [value, value]
    return value


def same_hash(number: int) -> bytes:
    """The program of a key whose hash is 0, like that of all the others, and of its value."""
    data = pickle.encode_long(number * (2**61 - 1))
    return b"\x8a%c%bN" % (len(data), data)


# The last ones take memory or time, or crash Python: without limits, at most half a GB and 10 s.
PROGRAMS = {
    b"": "EOFError",
    b"\x80\x04.": "UnpicklingError",  # nothing is left
    b"}]\x94\x93.": "requires str",  # a name that is no text
    b"})b.": "UnpicklingError",  # a state of a dict
    b"c_codecs\nencode\nN}\x8c\x01ak\x01s\x86b.": "Error",  # an attribute of a function
    b"}(ios\nmkdir\n.": "names 'os.mkdir'",
    b"cnumpy\nndarray\n)\x81.": "must be a type",
    b"}\x82\x01.": "unregistered extension",
    b"}Pid\n.": "persistent",
    b"})\x85\x85K\x01s.": "keys must be str",
    b"}(K\x01u.": "odd number of items",  # a key without a value
    b"K\x01\x87.": "underflow",
    b"}h\x05.": "Memo value not found",
    b"}\x94\x8c\x01ah\x00s.": "Circular reference",
    b"\x80\x04}\x8c\x01a" + b"]" * 50_000 + b"a" * 49_999 + b"s.": "RecursionError",
    b"}\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.": "too large",  # bytes without end
    b"}\x8e\0\0\0\0\x01\0\0\0x.": LIMITS,  # 4 GB of them
    b"}r\0\0\0\x02.": LIMITS,  # a note of number 2**25, after room for all before it
    # One text encoded 400 times, all of them noted: 400 MB.
    b"}X\0\0\x10\0" + b"x" * (1 << 20) + b"\x940" + b"c_codecs\nencode\nh\0\x85R\x940" * 400
    + b".": LIMITS,
    pickle.dumps({"x": doubled(22)}): "more values than weights do",
    pickle.dumps({"x": ["x" * 100_000] * 1000}): LIMITS,
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_wrong_program_is_refused(parse: Parse, program: bytes) -> None:
    refused(parse, program, PROGRAMS[program])


@pytest.mark.long
def test_a_small_file_cannot_take_time_without_end(parse: Parse) -> None:
    refused(parse, b"}(" + b"".join(map(same_hash, range(30_000))) + b"u.", LIMITS)


def test_a_small_file_cannot_fill_the_memory(parse: Parse) -> None:
    data = bytes(4000)
    arrays = {str(number): array((1000,), dtype(), data) for number in range(1000)}
    refused(parse, pickle.dumps(arrays, 4), "more arrays than it has bytes for")
    shared = np.ones(1000, ">f4")
    found = parse(pickle.dumps({str(number): shared for number in range(1000)}, 4))
    assert len({item.data.ctypes.data for item in found.values()}) == 1


def test_a_file_cut_off_anywhere_is_refused(files: dict[str, bytes], parse: Parse) -> None:
    data = files["mixed4"]
    for length in random.Random(0).sample(range(len(data)), 6):
        with pytest.raises(PdparamsError, match="not a file of weights"):
            parse(data[:length])


def test_a_changed_file_is_read_or_refused_and_nothing_else(
    files: dict[str, bytes], parse: Parse
) -> None:
    source, sources = random.Random(0), list(files.values())
    read = 0
    for _ in range(20):
        data = bytearray(source.choice(sources))
        for _ in range(source.randint(1, 4)):
            place = source.randrange(len(data))
            match source.randrange(3):
                case 0:
                    data[place] = source.randrange(256)
                case 1:
                    del data[place : place + source.randint(1, 20)]
                case _:
                    other = source.randrange(len(data))
                    data[place:place] = data[other : other + source.randint(1, 20)]
        try:
            arrays = parse(bytes(data))
        except PdparamsError:
            continue
        read += 1
        sizes = {"bfloat16": 2}
        for item in arrays.values():
            size = sizes.get(item.dtype) or np.dtype(item.dtype).itemsize
            assert item.data.size == math.prod(item.shape) * size
    assert 0 < read < 20


# --- the process -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), signal.SIGSEGV)", "os.close(1)"])
def test_a_process_that_crashes_is_a_line(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, capfd: Any, code: str
) -> None:
    program = [sys.executable, "-I", "-S", "-c", f"import os, signal\n{code}"]
    monkeypatch.setattr(pdparams, "_PROGRAM", program)
    refused(parse, b"12345678", LIMITS if "kill" in code else "not a file of weights")
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def halfway(fifo: Path, code: str) -> Iterator[tuple[Any, int]]:
    """A program that unpacks a file, of which more than a pipe holds is read; and its rest."""
    os.mkfifo(fifo)
    pipes = "unpack.__globals__['regular'] = os.open"  # a pipe is refused otherwise
    code = f"import os, signal\nfrom expbase.checkpoint.pdparams import *\n{pipes}\n{code}"
    command = [sys.executable, "-W", "ignore", "-c", code, str(fifo)]
    with forks.Popen(command, stdout=subprocess.PIPE) as program:
        try:
            file = os.open(fifo, os.O_WRONLY)
            os.write(file, b"}" + b"K\x010" * 70_000)  # numbers that are dropped
            yield program, file
        finally:
            program.kill()


def test_a_signal_to_the_group_does_not_end_the_process(tmp_path: Path) -> None:
    code = "signal.signal(15, lambda *_: print('heard'))\nprint(unpack(Path(sys.argv[1])))"
    with halfway(tmp_path / "fifo", code) as (program, file):
        os.killpg(program.pid, signal.SIGTERM)
        os.write(file, b".")
        os.close(file)
        assert program.stdout.read() == b"heard\n({}, {})\n"
