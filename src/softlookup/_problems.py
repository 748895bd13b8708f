"""Bad input: how it is collected, worded and raised, and the checks of single numbers.

One call reports everything that is wrong with it at once. Each problem says what was given, what was expected and the
fix. The error is a TypeError as soon as one of the problems is a wrong type, else a ValueError. Checks return None
after they reported, so that the checks after them can go on; nothing that they return is used before `raise_any` has
passed.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A position is q_start or k_start plus an index, and masks add the width of a window: 2**60 + 2**60 + 2**62 < 2**63.
LARGEST_POSITION = 2**60
LARGEST_WIDTH = 2**62
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
SMALLEST_FLOAT64 = float(np.finfo(np.float64).tiny)


class Problems:
    """The problems found in the arguments of one call.

    Parameters
    ----------
    where
        Name of the function that was called, as the user wrote it.
    """

    __slots__ = ("_error", "_found", "_where")

    def __init__(self, where: str) -> None:
        self._where = where
        self._found: list[str] = []
        self._error: type[Exception] = ValueError

    @property
    def count(self) -> int:
        """How many problems were reported so far."""
        return len(self._found)

    def value(self, name: str, found: str, expected: str, fix: str) -> None:
        """Report an argument of the right type and a wrong value."""
        self._found.append(f"{name}: found {found}; expected {expected}; fix: {fix}")

    def type(self, name: str, found: str, expected: str, fix: str) -> None:
        """Report an argument of a wrong type."""
        self.value(name, found, expected, fix)
        self._error = TypeError

    def raise_any(self) -> None:
        """Raise one error that lists every problem, if there is any."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._error(f"softlookup.{self._where}: {self._found[0]}")
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(self._found, 1))
        raise self._error(f"softlookup.{self._where}: {len(self._found)} problems:{lines}")


def describe(value: object) -> str:
    """A few words for a value of any type, for the `found` of a message."""
    if isinstance(value, np.ndarray):
        kind = "" if type(value) is np.ndarray else f"{type(value).__module__}.{type(value).__qualname__}, "
        return f"{kind}{value.dtype} {list(value.shape)}"
    if isinstance(value, (str, numbers.Number, type(None), np.generic)):
        return f"{value!r}"[:60]
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    module = type(value).__module__
    name = type(value).__qualname__
    return f"a {name}" if module == "builtins" else f"a {module.partition('.')[0]}.{name}"


def integer(
    problems: Problems,
    name: str,
    value: object,
    *,
    least: int = -LARGEST_POSITION,
    most: int = LARGEST_POSITION,
    expected: str = "an int",
    fix: str = "pass an int",
) -> int | None:
    """An int within [least, most]; bool is not one."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        problems.type(name, describe(value), expected, fix)
        return None
    if not least <= number <= most:
        problems.value(name, str(number), expected, fix)
        return None
    return number


def real(problems: Problems, name: str, value: object, *, expected: str, fix: str) -> float | None:
    """A finite real number as a float; bool is not one."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        problems.type(name, describe(value), expected, fix)
        return None
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        problems.value(name, describe(value), expected, fix)
        return None
    return number


def integers(problems: Problems, name: str, value: object, *, expected: str, fix: str) -> NDArray[np.int64] | None:
    """One or more ints (a number, a sequence or an array) as an int64 array of the same shape; bool is not one."""
    array: NDArray[Any]
    found = describe(value)
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, (int, np.integer, Sequence)) and not isinstance(value, (str, bytes)):
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # ragged, or beyond int64
            array = np.asarray(None)
        if array.size == 0:
            array = array.astype(np.int64)
        if isinstance(value, Sequence) and array.dtype != object:
            found = f"{found} of {array.dtype}"
    else:
        array = np.asarray(None)
    if isinstance(array, np.ma.MaskedArray) or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        problems.type(name, found, expected, fix)
        return None
    widened = array.astype(np.int64)
    if widened.size and not -LARGEST_POSITION <= int(widened.min()) <= int(widened.max()) <= LARGEST_POSITION:
        problems.value(name, f"values from {widened.min()} to {widened.max()}", "values within 2**60", fix)
        return None
    return widened
