"""Files of paddle: every real one is read, and no hostile one runs or crashes anything."""

from __future__ import annotations

import codecs
import math
import os
import pickle
import random
from collections import OrderedDict
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


def test_a_file_in_slices_is_told_apart() -> None:
    with pytest.raises(PdparamsError, match="written in slices by protocol 2 or 3"):
        parse(pickle.dumps({"UnpackBigParamInfor@@": {}}))


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


def lying_flags() -> Any:
    # Eight bytes that numpy would take for the pointer of an object, were it to believe the file
    # that this type of objects has no flags.
    return array((1,), dtype("O", (3, "|", None, None, None, -1, -1, 0)), b"AAAAAAAA")


HOSTILE: dict[str, Any] = {
    "objects with lying flags": lying_flags,
    "flags on numbers": lambda: array((1,), dtype("f4", (*PLAIN[:7], 63)), b"1234"),
    "a size on numbers": lambda: array((1,), dtype("f4", (*PLAIN[:5], 1, -1, 0)), b"1234"),
    "fields on numbers": lambda: array(
        (1,), dtype("f4", (3, "<", None, ("a",), {}, 4, 1, 16)), b""
    ),
    "an order that there is not": lambda: array((1,), dtype("f4", (3, "!", *PLAIN[2:])), b"1234"),
    "a state that is no tuple": lambda: array((1,), dtype("f4", [3, "<"]), b"1234"),
    "objects": lambda: np.array([1, "a"], dtype=object),
    "records": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "O")]),
    "plain records": lambda: np.zeros(2, dtype=[("a", "f4")]),
    "texts": lambda: np.array(["ab"]),
    "dates": lambda: np.zeros(2, "M8[s]"),
    "raw memory": lambda: np.zeros(2, "V8"),
    "a type in words": lambda: array((1,), dtype("f4,O"), b"1234"),
    "a type of no text": lambda: array((1,), dtype(np.float32), b"1234"),
    "no type": lambda: array((1,), "f4", b"1234"),
    "too few bytes": lambda: array((5,), dtype(), b"1234"),
    "too many bytes": lambda: array((1,), dtype(), b"12345678"),
    "negative sizes": lambda: array((-1, -1), dtype(), b"1234"),
    "a huge shape": lambda: array((2**62, 4), dtype(), b""),
    "a huge empty shape": lambda: array((2**80, 0), dtype(), b""),
    "sizes that are no integers": lambda: array((1.0,), dtype(), b"1234"),
    "a hundred axes": lambda: array((1,) * 100, dtype(), b"1234"),
    "a shape that is no tuple": lambda: array(1, dtype(), b"1234"),
    "a list of content": lambda: array((1,), dtype("i8"), [os.getpid()]),
    "no content": lambda: Call(RECONSTRUCT, np.ndarray, (0,), b"b"),
    "a state on a dict": lambda: Call(OrderedDict, state={"__class__": 1}),
    "arguments of a dict": lambda: Call(OrderedDict, [["a", 1]]),
    "a scalar of an object": lambda: Call(SCALAR, dtype("O"), b"AAAAAAAA"),
    "a scalar of few bytes": lambda: Call(SCALAR, dtype("f8"), b"1234"),
    "bytes in another code": lambda: Call(codecs.encode, "a", "zip"),
    "a tuple of bytes": lambda: Call(tuple, bytes(10)),
    "an object": lambda: Path("x"),
    "a tuple as a key": lambda: {(1,): 2},
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_a_line(kind: str, protocol: int) -> None:
    data = pickle.dumps({"good": np.ones(2), "x": HOSTILE[kind]()}, protocol)
    with pytest.raises(PdparamsError) as caught:
        parse(data)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"text",
        b"\x80\x04.",  # nothing is left
        b"\x80\x04]\x94\x93.",  # a name that is no text
        b"}r\xff\xff\xff\x7f0.",  # a memory of 2**31 entries, of which an unpickler makes room
        b"}\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",  # bytes without end
        b"(" * 100_000 + b"}u.",
        b"}(K\x01u.",  # a key without a value
        b"}}K\x01s.",  # a dict as a key
        b"]K\x01K\x02s.",  # an item of a list by name
        b"}\x85\x85\x85\x85)s.",
        b"}h\x05.",  # what was not noted before
        b"}\x82\x01.",  # an instruction for registered extensions
        b"}Pid\n.",  # one for persistent objects
        b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.",  # Python crashes when it hashes this key
        b"(" + b"]" * 10 + b"d.",
    ],
)
def test_a_wrong_program_is_refused(program: bytes) -> None:
    with pytest.raises(PdparamsError):
        parse(program)


def test_what_is_deep_or_contains_itself_is_no_matter() -> None:
    deep = b"\x80\x04}\x8c\x01a" + b"]" * 200_000 + b"a" * 199_999 + b"s."
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
