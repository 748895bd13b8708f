"""The checks of a pullback: the slopes that it is given, and what it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._array_checks import Shapes, float_code
from softlookup._problems import Problems, describe
from softlookup._types import NAMES

ALL = ("q", "k", "v", "bias", "sinks")


def as_wrt(problems: Problems, value: Any, absent: tuple[str, ...]) -> frozenset[str]:
    """The names of what gradients are asked for; `absent` are those that the call was made without."""
    expected = f"a sequence of names out of {', '.join(map(repr, ALL))}"
    fix = 'wrt=("q", "k", "v")'
    if isinstance(value, str) or not isinstance(value, Iterable):
        problems.type("wrt", describe(value), expected, f"wrt=({value!r},)" if value in ALL else fix)
        return frozenset()
    names = list(value)
    for name in names:
        if name not in ALL:
            problems.value("wrt", describe(name), expected, fix)
        elif name in absent:
            problems.value("wrt", repr(name), f"what the call was made with; it had no {name}", f"leave {name!r} out")
    return frozenset(name for name in names if name in ALL)


def check_output_slope(problems: Problems, value: Any, sizes: Shapes, codes: tuple[int, int]) -> None:
    """Report what is wrong with the slope of the output; `codes` are the types of the output and of the sums."""
    code = float_code(problems, "dout", value)
    if code is not None and code not in codes:
        names = " or ".join(dict.fromkeys(NAMES[allowed] for allowed in codes))
        problems.type("dout", describe(value), names, f"dout.astype(np.{NAMES[codes[1]]})")
    if isinstance(value, np.ndarray) and value.shape != sizes.out:
        fix = f"np.broadcast_to(dout, {sizes.out}), if it is to be spread"
        problems.value("dout", f"shape {list(value.shape)}", f"{list(sizes.out)}, the shape of the output", fix)


def as_lse_slope(problems: Problems, value: Any, sizes: Shapes) -> NDArray[np.float64] | None:
    """The slope of lse as float64 [B, Hq, N]; every float type widens to it without loss."""
    if value is None:
        return None
    before = problems.count
    float_code(problems, "dlse", value)
    if isinstance(value, np.ndarray) and value.shape != sizes.out[:-1]:
        expected = f"{list(sizes.out[:-1])}, the shape of lse"
        problems.value("dlse", f"shape {list(value.shape)}", expected, "one slope for each row; None for none")
    if problems.count > before:
        return None
    return np.ascontiguousarray(value, np.float64).reshape(sizes.rows)
