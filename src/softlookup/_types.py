"""Element types: the four that the core reads and writes, and their codes.

A type is recognised by its dtype object, never by importing the package that made it: bfloat16 comes from ml_dtypes,
which is no dependency, so it is known by its name. It has no buffer format, so the core is handed its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(4)
INT8, INT4 = range(4, 6)  # codes, in caches only
NAMES = ("float32", "float64", "float16", "bfloat16")
EXPECTED = "float32, float64, float16 or bfloat16"

_NATIVE: list[np.dtype[Any]] = [np.dtype(name) for name in NAMES[:BFLOAT16]]
_CODES = {dtype: code for code, dtype in enumerate(_NATIVE)}


def code_of(dtype: np.dtype[Any]) -> int | None:
    """The core's code of a dtype, or None where the core does not know the type."""
    code = _CODES.get(dtype)
    if code is None and dtype.name == "bfloat16" and dtype.itemsize == 2 and dtype.isnative:
        code = _CODES[dtype] = BFLOAT16
    return code


def dtype_of(code: int) -> np.dtype[Any]:
    """The dtype of a code. bfloat16 needs the package ml_dtypes, which is imported only here.

    Raises
    ------
    ImportError
        If the code is bfloat16 and ml_dtypes is not installed.
    """
    if code < BFLOAT16:
        return _NATIVE[code]
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            "softlookup: found bfloat16 asked for and no package ml_dtypes, which gives NumPy that type; "
            "expected it installed; fix: pip install ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def core_view(array: NDArray[Any], code: int) -> NDArray[Any]:
    """The array as the core takes it: bfloat16 as its bits, everything else as it is. Never a copy."""
    return array.view(np.uint16) if code == BFLOAT16 else array


def statistics_dtype(code: int) -> np.dtype[Any]:
    """The type of statistics, scores and weights: float64 for float64 input, float32 for all others."""
    return np.dtype(np.float64) if code == FLOAT64 else np.dtype(np.float32)


def sum_code(code: int) -> int:
    """The type code of sums over numbers of a type: that of `statistics_dtype`."""
    return FLOAT64 if code == FLOAT64 else FLOAT32
