"""The algebra of masks: what every mask is, how masks are joined, and what the joined ones mean.

A mask is immutable and has no shape of its own; True means *may attend*. Masks are joined by ``&``, ``|`` and ``~``.
Every mask has two readings that must agree: `_look`, plain NumPy for any rectangle of queries and keys, which `dense`
is made of, and `_program`, the postfix program that the core runs tile by tile. The core's programs are bounded, so the
number of steps is known from the making of a mask on, and one of too many is never made: what walks through a mask need
not fear its depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._problems import Problems, describe, integer, integers

Booleans = NDArray[np.bool_]
Indices = NDArray[np.int64]
Step = tuple[Any, ...]

BATCH_FIX = "pass the size of the batch, or the sizes of the leading axes as a tuple"


@dataclass(frozen=True)
class Grid:
    """A rectangle of queries and keys: indices with four axes that broadcast to [B, Hq, N, M].

    row and column are local, query and key absolute positions; queries and keys are N and M. leading are the axes that
    the batch is flattened from.
    """

    leading: tuple[int, ...]
    batch: Indices
    head: Indices
    row: Indices
    column: Indices
    query: Indices
    key: Indices

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch.size, self.head.size, self.row.size, self.column.size


def _grid(leading: tuple[int, ...], Hq: int, N: int, M: int, q_start: Indices, k_start: int) -> Grid:
    B = math.prod(leading)
    row = np.arange(N).reshape(1, 1, N, 1)
    column = np.arange(M).reshape(1, 1, 1, M)
    return Grid(
        leading=leading,
        batch=np.arange(B).reshape(B, 1, 1, 1),
        head=np.arange(Hq).reshape(1, Hq, 1, 1),
        row=row,
        column=column,
        query=q_start.reshape(-1, 1, 1, 1) + row,
        key=k_start + column,
    )


class Mask:
    """What all masks are: `Full`, `Causal`, `Window`, `Lengths`, `Dense`, `Predicate`, and what & | ~ make of them.

    A joined mask has at most 256 steps: one for every mask in it and one for every & | ~. Joining more is a ValueError;
    one `Dense` or `Predicate` says anything in one step.

    Examples
    --------
    >>> import softlookup as sl
    >>> mask = sl.Causal() & ~sl.Window(0)
    >>> mask, isinstance(mask, sl.Mask)
    (Causal() & ~Window(0, 0), True)
    """

    __slots__ = ()
    __array_ufunc__ = None  # lets `array & mask` reach __rand__ instead of looping over the array

    def _look(self, grid: Grid) -> Booleans:
        """Visibility on the grid, in any shape that broadcasts to [B, Hq, N, M]."""
        raise NotImplementedError

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        """The core's postfix program for scores of shape [*leading, Hq, N, M]."""
        raise NotImplementedError

    def _leaves(self) -> Iterator[Mask]:
        """The masks that this one is joined from."""
        yield self

    @property
    def _positional(self) -> bool:
        """Whether absolute positions are used, so that q_start matters."""
        return False

    @property
    def _steps(self) -> int:
        """The length of the program."""
        return 1

    def dense(
        self, B: int | tuple[int, ...], Hq: int, N: int, M: int, q_start: int | Indices = 0, k_start: int = 0
    ) -> Booleans:
        """Every element of the mask, as plain NumPy: the oracle of what the core computes tile by tile.

        Parameters
        ----------
        B, Hq, N, M
            Batch, query heads, queries, keys. A tuple for B is the leading axes of a call, which are flattened:
            lengths and arrays then broadcast over them, as they do in the call.
        q_start
            Position of query row 0: an int, or int64 [B].
        k_start
            Position of key column 0.

        Returns
        -------
        numpy.ndarray
            bool [B, Hq, N, M]; True where the query may attend to the key.

        Raises
        ------
        ValueError
            If the mask holds an array that does not fit the shape.

        Examples
        --------
        >>> import softlookup as sl
        >>> sl.Causal().dense(1, 1, 2, 3, q_start=1)[0, 0].astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        """
        problems = Problems("Mask.dense")
        leading = B if isinstance(B, tuple) else (B,)
        batch = [integer(problems, "B", size, least=0, expected="an int >= 0", fix=BATCH_FIX) for size in leading]
        items = None if None in batch else math.prod(leading)
        for name, value in (("Hq", Hq), ("N", N), ("M", M)):
            integer(problems, name, value, least=0, expected="an int >= 0", fix="pass the size of the axis")
        starts = integers(problems, "q_start", q_start, expected="an int or int64 [B]", fix="pass positions as ints")
        integer(problems, "k_start", k_start)
        if starts is not None and items is not None and starts.size not in (1, items):
            problems.value("q_start", f"{starts.size} positions", f"one, or B = {items}", "pass an int or int64 [B]")
        problems.raise_any()
        assert starts is not None
        grid = _grid(leading, Hq, N, M, starts, k_start)
        return np.broadcast_to(self._look(grid), grid.shape).copy()

    def __and__(self, other: object) -> Mask:
        right = _operand(self, "&", other)
        if isinstance(right, Full) or self is right:
            return self
        return right if isinstance(self, Full) else And(self, right)

    def __or__(self, other: object) -> Mask:
        right = _operand(self, "|", other)
        if isinstance(self, Full) or self is right:
            return self
        return right if isinstance(right, Full) else Or(self, right)

    def __rand__(self, other: object) -> Mask:
        return _operand(self, "&", other) & self

    def __ror__(self, other: object) -> Mask:
        return _operand(self, "|", other) | self

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "softlookup: a mask has no truth value (found `and`, `or`, `not` or `if` on a mask); "
            "expected masks joined element by element; fix: use &, | and ~"
        )


def _operand(mask: Mask, operator: str, other: object) -> Mask:
    """The other side of & or |, which must be a mask."""
    if isinstance(other, Mask):
        return other
    raise TypeError(
        f"softlookup: found {mask!r} {operator} {describe(other)}; expected masks on both sides of {operator}; "
        "fix: wrap a bool array in sl.Dense(array)"
    )


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query may attend to every key.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.Full() & sl.Causal()
    Causal()
    """

    def _look(self, grid: Grid) -> Booleans:
        return np.ones((1, 1, 1, 1), bool)

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return [("full",)]


def _bounded(steps: int, made: str) -> int:
    """The steps of a mask that is being made, if the core can run so many."""
    if steps > _core.MOST_MASK_STEPS:
        problems = Problems("Mask")
        expected = f"at most {_core.MOST_MASK_STEPS}, counting every mask and every & | ~"
        fix = "join the arrays first and wrap them in one softlookup.Dense, or write one softlookup.Predicate"
        problems.value("mask", f"{steps} steps in {made}", expected, fix)
        problems.raise_any()
    return steps


@dataclass(frozen=True, slots=True)
class Joined(Mask):
    """Two masks and what joins them."""

    left: Mask
    right: Mask
    _steps: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = self.left._steps + self.right._steps + 1
        made = f"masks of {self.left._steps} and {self.right._steps} joined by & or |"
        object.__setattr__(self, "_steps", _bounded(steps, made))

    def _join(self, step: str, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        left = self.left._program(leading, Hq, N, M)
        return [*left, *self.right._program(leading, Hq, N, M), (step,)]

    def _leaves(self) -> Iterator[Mask]:
        yield from self.left._leaves()
        yield from self.right._leaves()

    @property
    def _positional(self) -> bool:
        return self.left._positional or self.right._positional


@dataclass(frozen=True, slots=True, repr=False)
class And(Joined):
    def _look(self, grid: Grid) -> Booleans:
        return self.left._look(grid) & self.right._look(grid)

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return self._join("and", leading, Hq, N, M)

    def __repr__(self) -> str:
        return f"{_bracketed(self.left, Or)} & {_bracketed(self.right, Joined)}"


@dataclass(frozen=True, slots=True, repr=False)
class Or(Joined):
    def _look(self, grid: Grid) -> Booleans:
        return self.left._look(grid) | self.right._look(grid)

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return self._join("or", leading, Hq, N, M)

    def __repr__(self) -> str:
        return f"{self.left!r} | {_bracketed(self.right, Or)}"


@dataclass(frozen=True, slots=True, repr=False)
class Not(Mask):
    inner: Mask
    _steps: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = self.inner._steps + 1
        object.__setattr__(self, "_steps", _bounded(steps, f"~ of a mask of {self.inner._steps}"))

    def _look(self, grid: Grid) -> Booleans:
        return ~self.inner._look(grid)

    def _program(self, leading: tuple[int, ...], Hq: int, N: int, M: int) -> list[Step]:
        return [*self.inner._program(leading, Hq, N, M), ("not",)]

    def _leaves(self) -> Iterator[Mask]:
        return self.inner._leaves()

    @property
    def _positional(self) -> bool:
        return self.inner._positional

    def __invert__(self) -> Mask:
        return self.inner

    def __repr__(self) -> str:
        return f"~{_bracketed(self.inner, Joined)}"


def _bracketed(mask: Mask, binding: type[Mask]) -> str:
    """The mask's repr, in brackets where it binds less tightly than what stands around it."""
    return f"({mask!r})" if isinstance(mask, binding) else repr(mask)
