"""The masks themselves. Causal, Window and Predicate see absolute positions: query row r stands at ``q_start + r``, key
column c at ``k_start + c``. Lengths and Dense see local indices, which start at 0 in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from softlookup._mask_algebra import Booleans, Full, Grid, Indices, Mask, Step
from softlookup._problems import LARGEST_WIDTH, Problems, describe, integer, integers

__all__ = ["Causal", "Dense", "Full", "Lengths", "Mask", "Predicate", "Window", "per_item"]

PredicateFunction = Callable[[Indices, Indices, Indices, Indices], Booleans]

SHOWN_ELEMENTS = 16  # arrays up to this size are spelled out in a repr


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query at position i may attend to keys at positions j <= i.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.Causal().dense(1, 1, 3, 3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    def _look(self, grid: Grid) -> Booleans:
        return grid.key <= grid.query

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return [("window", None, 0)]

    @property
    def _positional(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """A query at position i may attend to keys at positions i - left to i + right, both ends included.

    Parameters
    ----------
    left, right
        Number of keys on either side of the query's own position, int >= 0; None is unlimited.

    Raises
    ------
    TypeError, ValueError
        If a side is not an int >= 0 or None.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.Window(1).dense(1, 1, 3, 3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        problems = Problems("Window")
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is not None:
                fix = f"{name}=None is unlimited (other libraries write -1)"
                expected = "an int >= 0 or None"
                side = integer(problems, name, side, least=0, most=LARGEST_WIDTH, expected=expected, fix=fix)
                object.__setattr__(self, name, side)
        problems.raise_any()

    def _look(self, grid: Grid) -> Booleans:
        visible = np.ones((1, 1, 1, 1), bool)
        if self.left is not None:
            visible = visible & (grid.key >= grid.query - self.left)
        if self.right is not None:
            visible = visible & (grid.key <= grid.query + self.right)
        return visible

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return [("window", self.left, self.right)]

    @property
    def _positional(self) -> bool:
        return self.left is not None or self.right is not None

    def __repr__(self) -> str:
        return f"Window({self.left}, {self.right})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lengths(Mask):
    """Each batch item has its own number of valid keys (and queries); the rest is padding.

    Parameters
    ----------
    keys
        Valid keys of each item: an int, or ints that broadcast to the batch axes. From 0 to M.
    queries
        Valid queries of each item, likewise, from 0 to N; None is all. A padded query's row is empty.
    padding_side
        "right": the valid ones come first. "left": they come last.

    Raises
    ------
    TypeError, ValueError
        If the lengths are not ints or the side is neither of the two. Lengths out of range are reported by the call
        that uses the mask.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.Lengths([1, 3]).dense(2, 1, 1, 3)[:, 0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 1]])
    """

    keys: int | Sequence[int] | Indices
    queries: int | Sequence[int] | Indices | None = None
    padding_side: Literal["left", "right"] = "right"

    def __post_init__(self) -> None:
        problems = Problems("Lengths")
        for name in ("keys", "queries"):
            if getattr(self, name) is not None:
                array = integers(problems, name, getattr(self, name), expected="ints", fix="pass lengths as ints")
                object.__setattr__(self, name, _frozen(array))
        if self.padding_side not in ("left", "right"):
            problems.value("padding_side", describe(self.padding_side), '"left" or "right"', "name the padded side")
        problems.raise_any()

    def _look(self, grid: Grid) -> Booleans:
        _, _, N, M = grid.shape
        visible = np.ones((1, 1, 1, 1), bool)
        for lengths, index, size in ((self.keys, grid.column, M), (self.queries, grid.row, N)):
            if isinstance(lengths, np.ndarray):
                each = self._each(lengths, grid.leading).reshape(-1, 1, 1, 1)
                visible = visible & (index < each if self.padding_side == "right" else index >= size - each)
        return visible

    def _each(self, lengths: Indices, leading: tuple[int, ...]) -> Indices:
        """One length for each item of a grid, whose batch may be flattened, or one for all."""
        B = math.prod(leading)
        if lengths.size in (1, B):
            return lengths
        try:
            return per_item(lengths, leading)
        except ValueError:
            raise ValueError(
                f"softlookup.Mask.dense: found {self!r} with {lengths.size} lengths of shape {list(lengths.shape)}; "
                f"expected 1 or B = {B}; fix: pass one length for each batch item, or B as a tuple of leading axes"
            ) from None

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        keys, queries = (
            per_item(lengths, leading) if isinstance(lengths, np.ndarray) else None
            for lengths in (self.keys, self.queries)
        )
        return [("lengths", keys, queries, self.padding_side)]

    def _identity(self) -> tuple[object, ...]:
        return _contents(self.keys), _contents(self.queries), self.padding_side

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, Lengths) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> tuple[Any, ...]:
        return Lengths, (self.keys, self.queries, self.padding_side)

    def __repr__(self) -> str:
        queries = "" if self.queries is None else f", queries={_spelled(self.queries)}"
        side = "" if self.padding_side == "right" else f", padding_side={self.padding_side!r}"
        return f"Lengths({_spelled(self.keys)}{queries}{side})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dense(Mask):
    """Any mask at all, element by element.

    Parameters
    ----------
    array
        bool [N, M], or with as many axes as q and broadcast to [..., Hq, N, M]. Copied.

    Raises
    ------
    TypeError, ValueError
        If it is not a plain bool array of at least two axes.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> sl.Dense(np.array([[True, False], [True, True]])) & sl.Causal()
    Dense([[True, False], [True, True]]) & Causal()
    """

    array: Booleans

    def __post_init__(self) -> None:
        problems = Problems("Dense")
        if type(self.array) is not np.ndarray or self.array.dtype != np.bool_:
            found = describe(self.array)
            problems.type("array", found, "a numpy.ndarray of bool", "np.asarray(array, dtype=bool), True = may attend")
        elif self.array.ndim < 2:
            found = describe(self.array)
            problems.value("array", found, "[N, M], or as many axes as q", "array[None, :] hides keys of all rows")
        problems.raise_any()
        object.__setattr__(self, "array", _frozen(self.array.copy()))

    @classmethod
    def _borrow(cls, array: Booleans) -> Dense:
        """A mask for the time of one call, which reads the caller's array in place."""
        mask = object.__new__(cls)
        object.__setattr__(mask, "array", array)
        return mask

    def _look(self, grid: Grid) -> Booleans:
        shape = self.array.shape
        try:
            if len(shape) > 3 and math.prod(shape[:-3]) not in (1, math.prod(grid.leading)):
                return np.broadcast_to(self.array, (*grid.leading, *grid.shape[1:])).reshape(grid.shape)
            return np.broadcast_to(self.array.reshape(math.prod(shape[:-3]), *shape[-3:]), grid.shape)
        except ValueError:
            raise ValueError(
                f"softlookup.Mask.dense: found Dense of shape {list(shape)}; expected one that broadcasts to "
                f"[B, Hq, N, M] = {list(grid.shape)}; fix: ask for the shape that the array was made for"
            ) from None

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return [("dense", self.array)]

    def __eq__(self, other: object) -> bool:
        return _contents(self.array) == _contents(other.array) if isinstance(other, Dense) else NotImplemented

    def __hash__(self) -> int:
        return hash(_contents(self.array))

    def __reduce__(self) -> tuple[Any, ...]:
        return Dense, (self.array,)

    def __repr__(self) -> str:
        return f"Dense({_spelled(self.array)})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Predicate(Mask):
    """Any rule at all, as a function of indices.

    Parameters
    ----------
    function
        Called as ``function(b, h, i, j)`` with int64 arrays that broadcast to [rows, keys]: the flattened batch index,
        the query head, and the absolute positions of query and key. Returns bool, True where i may attend to j. It
        runs under the interpreter's lock, so it is slow; an exception in it reaches the caller. The mask can be
        pickled where the function can.

    Raises
    ------
    TypeError
        If the function is not callable.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.Predicate(lambda b, h, i, j: (i - j) % 2 == 0).dense(1, 1, 2, 4)[0, 0].astype(int)
    array([[1, 0, 1, 0],
           [0, 1, 0, 1]])
    """

    function: PredicateFunction

    def __post_init__(self) -> None:
        if not callable(self.function):
            problems = Problems("Predicate")
            found = describe(self.function)
            problems.type("function", found, "a function (b, h, i, j) -> bool array", "pass a callable")
            problems.raise_any()

    def _look(self, grid: Grid) -> Booleans:
        visible = np.empty(grid.shape, bool)
        for b, h in np.ndindex(grid.shape[:2]):
            query = grid.query[min(b, len(grid.query) - 1), 0]
            visible[b, h] = self._ask(grid.batch[b, 0], grid.head[0, h], query, grid.key[0, 0])
        return visible

    def _ask(self, b: Indices, h: Indices, i: Indices, j: Indices) -> Booleans:
        """The function's answer, checked: C-contiguous [rows, keys]. b is [1, 1], h and i [rows, 1], j [1, keys]."""
        answer = self.function(b, h, i, j)
        shape = (i.shape[0], j.shape[1])
        problems = Problems("Predicate")
        found = np.asarray(answer)
        told = f"{describe(answer if isinstance(answer, np.ndarray) else found)} returned by {self!r}"
        if isinstance(answer, np.ma.MaskedArray):
            problems.type("function", told, "a plain bool array", "return .filled(False), if what is masked is hidden")
        elif found.dtype != np.bool_:
            problems.type("function", told, "bool, True where query i may attend to key j", "return a comparison")
        elif found.ndim > 2 or any(
            size not in (1, full) for size, full in zip(found.shape[::-1], shape[::-1], strict=False)
        ):
            expected = f"a shape that broadcasts to [rows, keys] = {list(shape)}"
            problems.value("function", told, expected, "b is [1, 1], h and i are [rows, 1], j is [1, keys]")
        problems.raise_any()
        return np.ascontiguousarray(np.broadcast_to(found, shape))

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return [("predicate", self._ask)]

    @property
    def _positional(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.function, '__qualname__', repr(self.function))})"


def per_item(values: Indices, leading: tuple[int, ...]) -> Indices:
    """One index for each item of the flattened batch, or one for all: int64 contiguous [B] or [1]."""
    if values.size == 1:
        return values.reshape(1)
    return np.ascontiguousarray(np.broadcast_to(values, leading)).reshape(-1)


def _frozen(array: NDArray[Any] | None) -> NDArray[Any] | None:
    if array is not None:
        array.setflags(write=False)
    return array


def _contents(value: object) -> tuple[object, ...] | None:
    """What two arrays must share to be equal: type, shape and elements."""
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else None


def _spelled(value: object) -> str:
    """An array as one would write it, or its type and shape where it is long."""
    if isinstance(value, np.ndarray) and value.size <= SHOWN_ELEMENTS:
        return repr(value.tolist())
    return f"<{describe(value)}>"
