"""Files of paddle: all real ones are read, and no hostile one runs or crashes anything."""

from __future__ import annotations

import codecs
import math
import os
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from expbase.state.pdparams import PdparamsError, parse

RECONSTRUCT = np.zeros(1).__reduce__()[0]  # numpy moved it with version 2
SCALAR = np.float64(1).__reduce__()[0]  # type: ignore[index]  # it is a tuple
PLAIN = (3, "<", None, None, None, -1, -1, 0)  # the state of a plain type


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


def test_files_of_paddle_are_read_in_every_protocol(files: dict[str, bytes]) -> None:
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


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_file_that_calls_a_function_is_refused_and_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"weight": np.ones(3), "evil": Call(os.mkdir, "harm")}
    with pytest.raises(PdparamsError):
        parse(pickle.dumps(content, protocol))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins eval", "os system", "numpy load", "functools partial", "collections Counter"],
)
def test_only_the_names_that_arrays_need_are_known(name: str) -> None:
    with pytest.raises(PdparamsError, match=f"names '{name.replace(' ', '.')}', which .* run code"):
        parse(f"c{name.replace(' ', chr(10))}\n.".encode())


# By what is wrong with it: how it is made, and what is said about it.
HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    # Were it to believe that this type of objects has no flags, numpy would take the bytes for
    # the pointer of an object.
    "objects without their flags": (
        lambda: array((1,), dtype("O", (3, "|", None, None, None, -1, -1, 0)), b"AAAAAAAA"),
        "type 'O'; expected a type of numbers",
    ),
    "objects": (lambda: np.array([1, "a"], dtype=object), "type 'O8'"),
    "records of objects": (lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "O")]), "type 'V12'"),
    "records of numbers": (lambda: np.zeros(2, dtype=[("a", "f4")]), "type 'V4'"),
    "texts": (lambda: np.array(["ab"]), "type 'U2'"),
    "dates": (lambda: np.zeros(2, "M8[s]"), "type 'M8'"),
    "a description of records": (lambda: typed("f4,O"), "type 'f4,O'"),
    "a type of no name": (lambda: typed(np.float32), "names 'numpy.float32'"),
    "no type": (lambda: array((1,), "f4", b"1234"), "an array of Python objects"),
    "flags": (lambda: typed("f4", (*PLAIN[:7], 63)), "with fields, flags or"),
    "another size": (lambda: typed("f4", (*PLAIN[:5], 1, -1, 0)), "with fields, flags or"),
    "fields": (lambda: typed("f4", (*PLAIN[:3], ("a",), {}, -1, -1, 0)), "with fields, flags or"),
    "a byte order": (lambda: typed("f4", (3, "!", *PLAIN[2:])), "a strange byte order"),
    "a list for a type": (lambda: typed("f4", [3, "<"]), "with fields, flags or"),
    "too few bytes": (lambda: sized((5,), b"1234"), "has 4 bytes for an array of shape (5,)"),
    "too many bytes": (lambda: sized((), b"12345"), "has 5 bytes for an array of shape ()"),
    "negative sizes": (lambda: sized((-1, -1), b"1234"), "has 4 bytes for an array of shape (-1"),
    "a huge shape": (lambda: sized((2**62, 4), b""), "has 0 bytes for an array of shape (46116"),
    "a huge empty shape": (lambda: sized((2**80, 0), b""), "Maximum allowed dimension"),
    "a hundred axes": (lambda: sized((1,) * 100, b"1234"), "dimension"),
    "fractions": (lambda: sized((1.0,), b"1234"), "has 4 bytes for an array of shape (1.0,)"),
    "a number for a shape": (lambda: sized(1, b"1234"), "not iterable"),
    "a list of content": (lambda: array((1,), dtype("i8"), [1]), "an array of Python objects"),
    "no content": (lambda: Call(RECONSTRUCT, np.ndarray, (0,), b"b"), "a NoneType in a place"),
    "a scalar of an object": (lambda: Call(SCALAR, dtype("O"), b"AAAAAAAA"), "type 'O'"),
    "a scalar of few bytes": (lambda: Call(SCALAR, dtype(), b"12"), "has 2 bytes for an array"),
    "a state on a dict": (lambda: Call(OrderedDict, state={"a": 1}), "a _Dict in a place"),
    "arguments of a dict": (lambda: Call(OrderedDict, [["a", 1]]), "0 positional arguments"),
    "bytes in another code": (lambda: Call(codecs.encode, "a", "zip"), "bytes in 'zip'"),
    "a tuple of bytes": (lambda: Call(tuple, bytes(10)), "a bytes in a place"),
    "an object": (lambda: Path("x"), "names 'pathlib"),
    "a tuple as a key": (lambda: {(1,): 2}, "a tuple in a place"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_a_line(kind: str, protocol: int) -> None:
    make, text = HOSTILE[kind]
    with pytest.raises(PdparamsError) as caught:
        parse(pickle.dumps({"good": np.ones(2), "x": make()}, protocol))
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


PROGRAMS = {
    b"": "EOFError",
    b"text": "not a file of weights",
    b"\x80\x04.": "not a file of weights",  # nothing is left
    b"}]\x94\x93.": "requires str",  # a name that is no text
    b"}]K\x01R.": "must be an iterable",  # a call of a list
    b"})b.": "a _Dict in a place",  # a state of a dict
    b"c_codecs\nencode\n}b.": "a function in a place",  # it would change this module
    b"}(i\nos\n.": "not a file of weights",
    b"(cnumpy\nndarray\no.": "instruction OBJ",
    b"cnumpy\nndarray\n)\x81.": "instruction NEWOBJ",
    b"}\x82\x01.": "instruction EXT1",
    b"}Pid\n.": "instruction PERSID",
    b"})\x85\x85K\x01s.": "a tuple in a place",
    b"}(K\x01u.": "not a file of weights",  # a key without a value
    b"}}K\x01s.": "a _Dict in a place",  # as a key
    b"]K\x01K\x02s.": "IndexError",  # an item of a list by name
    b"}u.": "not a file of weights",  # down to a mark that nobody made
    b"K\x01\x87.": "list index out of range",
    b"}h\x05.": "not a file of weights",  # what was not noted before
    # An unpickler makes room for 2**31 notes, and for bytes without end.
    b"}r\xff\xff\xff\x7f0.": "instruction POP",
    b"}\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.": "EOFError",
    # Python crashes when it hashes such a key.
    b"})" + b"\x85" * 100_000 + b"K\x01s.": "a tuple in a place",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_wrong_program_is_refused(program: bytes) -> None:
    with pytest.raises(PdparamsError) as caught:
        parse(program)
    assert PROGRAMS[program] in str(caught.value)


def test_what_is_deep_or_contains_itself_is_no_matter() -> None:
    deep = b"\x80\x04}\x8c\x01a" + b"]" * 50_000 + b"a" * 49_999 + b"s."
    assert parse(deep) == {}
    itself: dict[str, Any] = {"weight": np.ones(1)}
    itself["self"] = itself
    assert list(parse(pickle.dumps(itself))) == ["weight"]


def test_a_small_file_cannot_fill_the_memory() -> None:
    data = bytes(4000)
    arrays = {str(number): array((1000,), dtype(), data) for number in range(1000)}
    with pytest.raises(PdparamsError, match="more arrays than it has bytes for"):
        parse(pickle.dumps(arrays, 4))
    shared = np.ones(1000, ">f4")
    found = parse(pickle.dumps({str(number): shared for number in range(1000)}, 4))
    assert len({id(item.data) for item in found.values()}) == 1


def test_a_file_cut_off_anywhere_is_refused(files: dict[str, bytes]) -> None:
    data = files["mixed4"]
    for length in range(len(data)):
        with pytest.raises(PdparamsError):
            parse(data[:length])


def test_a_changed_file_is_read_or_refused_and_nothing_else(files: dict[str, bytes]) -> None:
    source, sources = random.Random(0), list(files.values())
    read = 0
    for _ in range(600):
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
    assert 0 < read < 600
