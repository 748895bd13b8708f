"""What a cache of codes adds to plain numbers: the constants of its columns, the rotation, and the way back.

A code stands for ``mean[c] + factor[c] * scale[t] * code``: mean and factor belong to a column of one head and are
fixed by the first append, the scale belongs to a token; a key of int4 has one for every 32 columns. So a token's codes
depend on nothing that comes later, and rolling back leaves what stays as it was. The core folds factors into the query,
adds q . mean to every score of a row, and lets the scales in beside the exact integer sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._types import INT4, INT8

Floats = NDArray[np.float32]

LOWEST_CODE = {INT8: -127, INT4: -8}
LARGEST_CODE = {INT8: 127, INT4: 7}
GROUP_COLUMNS: int = _core.GROUP_COLUMNS
# With fewer tokens than this in the first append, what is common to a column is not known: means are 0, factors 1.
LEAST_TOKENS = 16
# A column's factor is at least this share of the largest one: the bits of the query's codes are shared by all columns.
LEAST_FACTOR = 1 / 64

_COLUMNS_STEP = 64  # the core reads whole vectors of constants


@dataclass(frozen=True)
class Constants:
    """Means and factors of the columns of keys, float32 [B, Hk, columns] with zeros behind them; those of values.

    Immutable: caches that share pages share them too, until a row begins anew.
    """

    key_means: Floats
    key_factors: Floats
    value_means: Floats
    value_factors: Floats

    @classmethod
    def plain(cls, batch: int, heads: int, width: int, value_width: int) -> Constants:
        """Means of 0 and factors of 1."""
        arrays = []
        for columns in (width, value_width):
            means, factors = np.zeros((2, batch, heads, cls.columns_of(columns)), np.float32)
            factors[..., :columns] = 1
            arrays += [means, factors]
        return cls(*arrays)

    @staticmethod
    def columns_of(width: int) -> int:
        """The columns of the arrays for heads of this width."""
        return -(-width // _COLUMNS_STEP) * _COLUMNS_STEP

    def select(self, rows: NDArray[np.int64]) -> Constants:
        """Those of some batch items."""
        return Constants(self.key_means[rows], self.key_factors[rows], self.value_means[rows], self.value_factors[rows])

    @property
    def nbytes(self) -> int:
        return self.key_means.nbytes + self.key_factors.nbytes + self.value_means.nbytes + self.value_factors.nbytes


def constants_of_first(
    old: Constants, items: list[int], counts: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any] | None
) -> Constants:
    """The constants after the first append to some items: k [B, Hk, T, d_k], v [B, Hk, T, d_v] (None: columns of k)."""
    arrays = [array.copy() for array in (old.key_means, old.key_factors, old.value_means, old.value_factors)]
    for item in items:
        count = int(counts[item])
        for place, numbers in ((0, k), (2, v)):
            means, factors = arrays[place][item], arrays[place + 1][item]
            columns = numbers.shape[-1] if numbers is not None else 0
            means[:, :columns], factors[:, :columns] = 0, 1
            if numbers is not None and place == 0 and count >= LEAST_TOKENS:
                first = numbers[item, :, :count].astype(np.float32)
                means[:, :columns] = first.mean(axis=1)
                factors[:, :columns] = _factors(np.abs(first - means[:, None, :columns]).max(axis=1))
        if v is None:
            width = min(arrays[2].shape[-1], arrays[0].shape[-1])
            arrays[2][item][:, :width] = arrays[0][item][:, :width]
            arrays[3][item][:, :width] = arrays[1][item][:, :width]
    return Constants(*arrays)


def _factors(spread: Floats) -> Floats:
    """Factors from the largest distance to the mean of each column [Hk, columns]; constant columns get the least."""
    largest = spread.max(axis=-1, keepdims=True)
    factors = np.maximum(np.sqrt(spread * largest), LEAST_FACTOR * largest)
    return np.where(largest > 0, factors / np.where(largest > 0, largest, 1), np.float32(1)).astype(np.float32)


def numbers_of(codes: NDArray[np.int8], scales: Floats, means: Floats, factors: Floats) -> Floats:
    """What codes [Hk, T, columns] with scales [Hk, T] or [Hk, T, groups] stand for."""
    columns = codes.shape[-1]
    worth = scales_of_columns(scales, columns) * factors[:, None, :columns]
    return means[:, None, :columns] + worth * codes.astype(np.float32)


def scales_of_columns(scales: Floats, columns: int) -> Floats:
    """The scales of rows [Hk, T], or of groups of their columns [Hk, T, groups], as they broadcast to the columns."""
    if scales.ndim == 2 or scales.shape[-1] == 1:
        return scales.reshape(*scales.shape[:2], 1)
    return np.repeat(scales, GROUP_COLUMNS, axis=-1)[..., :columns]


def rotation_block(*widths: int) -> int:
    """The largest power of two that divides all widths: so many neighbouring columns are rotated together."""
    width = math.gcd(*widths)
    return width & -width


def rotated(numbers: NDArray[Any], block: int, threads: int) -> Floats:
    """Every block of columns times the Walsh-Hadamard matrix over sqrt(block), which is its own inverse."""
    result = np.array(numbers, np.float32, order="C")
    if result.size:
        _core.rotate(result.reshape(-1, result.shape[-1]), block, threads)
    return result
