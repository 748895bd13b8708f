"""How what was measured grows with the size of the problem: powers fitted to the sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from softlookup.bench.rows import Row, is_limit

EXPONENT_TOLERANCE = 0.1
# A field of the row and its exponent: all pairs, the pairs in a window of fixed width, extra memory.
SWEPT = {"time-full": ("seconds", 2.0), "time-window": ("seconds", 1.0), "memory": ("extra_bytes", 1.0)}
LEAST_SIZES = 3


@dataclass(frozen=True)
class Growth:
    """How a quantity grows with the size: quantity = factor x size ^ exponent, a least-squares fit in logarithms."""

    workload: str
    dtype: str
    contender: str
    quantity: str
    exponent: float
    expected: float
    sizes: tuple[int, ...]
    values: tuple[float, ...]


def growths(rows: Iterable[Row]) -> list[Growth]:
    """The fits of the sweeps: seconds against N, extra bytes against N; those with at least three sizes."""
    points: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.workload not in SWEPT or is_limit(row.contender):
            continue
        value = getattr(row, SWEPT[row.workload][0])
        if value is not None and value > 0:
            which, _, size = row.detail.rpartition("-")
            points.setdefault((row.workload, which, row.dtype, row.contender), []).append((int(size), value))
    return [_fit(*key, sorted(found)) for key, found in points.items() if len(found) >= LEAST_SIZES]


def _fit(workload: str, which: str, dtype: str, contender: str, points: list[tuple[int, float]]) -> Growth:
    quantity, expected = SWEPT[workload]
    sizes, values = zip(*points, strict=True)
    exponent = float(np.polyfit([math.log(size) for size in sizes], [math.log(value) for value in values], 1)[0])
    name = f"{workload}-{which}" if which else workload
    return Growth(name, dtype, contender, quantity, exponent, expected, sizes, values)
