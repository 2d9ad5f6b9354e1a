"""Limits of what is read from a checkpoint, which somebody else may have written.

No run saves a value that meets one. Without them a text of 13 letters would be computed for days
(`Fraction("1e300000000")`), a shape would ask for more memory than there is, and eight bytes of the
type of objects would be an address that Python follows. What each refuses is a ValueError.

    fraction("1/3")                   # and not of "1e300000000"
    sized([2, 3], 8, 48)              # six items of eight bytes
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from expbase.base.errors import ValueMistake

_MOST_EXPONENT = 10**6  # of a decimal
_MOST_BITS = 4096  # of a number that is taken apart bit by bit
MOST_AXES = 64  # NPY_MAXDIMS of numpy's ndarraytypes.h; paddle's limit is lower
_MOST_EMPTY = 1 << 20  # items without a byte in a file
_WORD = 1 << 63


def fraction(text: str) -> Fraction:
    """Returns a fraction as `str` writes it, without an exponent."""
    if not re.fullmatch(r"-?\d+(/\d+)?", text, re.ASCII):
        raise ValueMistake(f"{text!r:.80} is no fraction; expected digits, as 1/3.")
    return Fraction(text)  # Python itself reads no more than 4,300 digits


def decimal(text: str) -> Decimal:
    """Returns a decimal whose digits could be written out."""
    made = Decimal(text)
    if abs(made.adjusted()) > _MOST_EXPONENT:
        raise ValueMistake(f"{text!r:.80} is out of range; expected an exponent below a million.")
    return made


def word(number: int) -> int:
    """Returns an integer of 64 bits."""
    if not -_WORD <= number < _WORD:
        raise ValueMistake("an integer of more than 64 bits; expected fewer.")
    return number


def bits(value: Any) -> Any:
    """Returns a value; if it is an integer, one that can be taken apart bit by bit."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueMistake(f"an integer of {value.bit_length()} bits; expected few.")
    return value


def sized(shape: Sequence[int], item_size: int, num_bytes: int) -> Sequence[int]:
    """Returns a shape that needs just the bytes that are there."""
    fits = len(shape) <= MOST_AXES and min(map(word, shape), default=0) >= 0
    if not fits or math.prod(shape) * item_size != num_bytes:
        raise ValueMistake(f"the shape {shape!s:.80} does not fit {num_bytes} bytes.")
    return shape


def same(shape: Sequence[int], other: Sequence[int]) -> None:
    """Raises a ValueError if two shapes differ."""
    if [*shape] != [*other]:
        raise ValueMistake(f"the shapes {shape!s:.80} and {other!s:.80} differ.")


def few(number: int) -> None:
    """Raises a ValueError if so many items have no byte in a file."""
    if number > _MOST_EMPTY:
        raise ValueMistake(f"{number} items without content; expected fewer.")


def of_bytes(dtype: Any) -> Any:
    """Returns a type of numpy whose items are numbers, texts or times, and no addresses."""
    if dtype.hasobject:
        raise ValueMistake(f"{dtype!s:.80} is a type of objects, which no file has.")
    return dtype
