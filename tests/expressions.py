"""Masks written twice: as the library's value, and as plain comparisons of positions.

`Written` carries both readings through `&`, `|` and `~`, so that a composed mask is checked against
NumPy's own logic. The plain reading shares nothing with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import softlookup as sl


@dataclass(frozen=True)
class Geometry:
    """Where a call stands: weights of shape [*leading, heads, queries, keys], starts in positions."""

    shape: tuple[int, ...]
    q_start: Any = 0
    k_start: int = 0

    @property
    def batch(self) -> np.ndarray:
        """The flattened batch index [*leading, 1, 1, 1]."""
        leading = self.shape[:-3]
        return np.arange(np.prod(leading, dtype=int)).reshape(*leading, 1, 1, 1)

    @property
    def heads(self) -> np.ndarray:
        """[heads, 1, 1]."""
        return np.arange(self.shape[-3])[:, None, None]

    @property
    def rows(self) -> np.ndarray:
        """Absolute positions of the queries [*leading, 1, queries, 1]."""
        start = np.broadcast_to(np.asarray(self.q_start, dtype=np.int64), self.shape[:-3])
        return start[..., None, None, None] + np.arange(self.shape[-2])[:, None]

    @property
    def columns(self) -> np.ndarray:
        """Absolute positions of the keys [keys]."""
        return self.k_start + np.arange(self.shape[-1])


@dataclass(frozen=True)
class Written:
    """One mask and its two readings."""

    text: str
    library: Any
    plain: Callable[[Geometry], np.ndarray]
    positional: bool = False

    def dense(self, geometry: Geometry) -> np.ndarray:
        """The plain reading, bool [*leading, heads, queries, keys]."""
        return np.broadcast_to(self.plain(geometry), geometry.shape)

    def __and__(self, other: Written) -> Written:
        return Written(
            f"({self.text} & {other.text})",
            self.library & other.library,
            lambda geometry: self.dense(geometry) & other.dense(geometry),
            self.positional or other.positional,
        )

    def __or__(self, other: Written) -> Written:
        return Written(
            f"({self.text} | {other.text})",
            self.library | other.library,
            lambda geometry: self.dense(geometry) | other.dense(geometry),
            self.positional or other.positional,
        )

    def __invert__(self) -> Written:
        return Written(f"~{self.text}", ~self.library, lambda geometry: ~self.dense(geometry), self.positional)

    def __repr__(self) -> str:
        return self.text


def full() -> Written:
    """Everything."""
    return Written("Full()", sl.Full(), lambda g: np.ones(g.shape, dtype=bool))


def causal() -> Written:
    """Keys at or before the query."""
    return Written("Causal()", sl.Causal(), lambda g: g.columns <= g.rows, positional=True)


def window(left: int | None, right: int | None) -> Written:
    """Keys from i - left to i + right."""

    def plain(g: Geometry) -> np.ndarray:
        offsets = g.columns - g.rows
        inside = np.ones(offsets.shape, dtype=bool)
        if left is not None:
            inside &= offsets >= -left
        if right is not None:
            inside &= offsets <= right
        return inside

    return Written(f"Window({left}, {right})", sl.Window(left, right), plain, positional=True)


def lengths(keys: Any, queries: Any = None, padding_side: str = "right") -> Written:
    """The first or the last `keys` columns and `queries` rows of every batch item, by local index."""

    def inside(sizes: Any, total: int, leading: tuple[int, ...]) -> np.ndarray:
        limits = np.asarray(sizes).reshape(leading)[..., None, None, None]
        index = np.arange(total)
        return index < limits if padding_side == "right" else index >= total - limits

    def plain(g: Geometry) -> np.ndarray:
        shown = inside(keys, g.shape[-1], g.shape[:-3])
        if queries is not None:
            shown = shown & inside(queries, g.shape[-2], g.shape[:-3]).swapaxes(-1, -2)
        return shown

    text = f"Lengths({np.asarray(keys).tolist()}, {None if queries is None else np.asarray(queries).tolist()}"
    return Written(f"{text}, {padding_side!r})", sl.Lengths(keys, queries, padding_side=padding_side), plain)


def dense(array: np.ndarray) -> Written:
    """A bool array, [queries, keys] or with all axes, sizes of 1 broadcast."""
    return Written(f"Dense({array.shape})", sl.Dense(array), lambda g: array)


def speckled(b: Any, h: Any, i: Any, j: Any) -> np.ndarray:
    """Depends on every index it is given."""
    return (3 * b + 5 * h + 7 * i + 11 * j) % 4 != 0


def every_third(b: Any, h: Any, i: Any, j: Any) -> np.ndarray:
    """Depends on the key alone, so its answer needs broadcasting."""
    return j % 3 == 0


PREDICATES = {"speckled": speckled, "every_third": every_third}


def predicate(name: str) -> Written:
    """One of the functions above."""
    function = PREDICATES[name]
    return Written(
        f"Predicate({name})",
        sl.Predicate(function),
        lambda g: function(g.batch, g.heads, g.rows, g.columns),
        positional=True,
    )
