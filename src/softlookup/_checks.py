"""Every check of the arguments of a call, and its message; those of arrays stand in _array_checks.

One set of rules, each written so that good input costs a comparison and no allocation: a message is made only when a
rule is broken. Nothing is converted silently; what is widened (sinks, positions) loses nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._array_checks import Shapes, float_code, input_code, plain_array, shapes
from softlookup._masks import Dense, Lengths, Mask, per_item
from softlookup._problems import (
    LARGEST_FLOAT32,
    LARGEST_POSITION,
    SMALLEST_FLOAT32,
    SMALLEST_FLOAT64,
    Problems,
    describe,
    integer,
    integers,
    real,
)
from softlookup._scoring import Scoring, Starts
from softlookup._types import FLOAT32, FLOAT64, NAMES, core_view

LARGEST_THREADS = 1024

RANGE_32 = f"{SMALLEST_FLOAT32:.3g} to {LARGEST_FLOAT32:.3g}"
SCALE_FIX = f"None is 1/sqrt(d_k); 0 or {RANGE_32} in magnitude unless q is float64"
SOFTCAP_FIX = f"None is no softcap; from {RANGE_32} unless q is float64"


def lookup_of(
    problems: Problems,
    q: object,
    k: object,
    v: object,
    mask: object,
    bias: object,
    scale: object,
    softcap: object,
    sinks: object,
    q_start: object,
    k_start: object,
) -> tuple[int | None, Shapes | None, Scoring]:
    """Check what all lookups share: the type code, the sizes and the scoring. None where a problem left none.

    The scoring of a call without options depends on its sizes alone, and is kept with them.
    """
    code = input_code(problems, q, k, v)
    sizes = shapes(problems, q, k, v)
    is_plain = mask is None and bias is None and scale is None and softcap is None and sinks is None and q_start is None
    if is_plain and type(k_start) is int and k_start == 0 and sizes is not None and sizes.plain is not None:
        return code, sizes, sizes.plain
    return code, sizes, scoring_of(problems, code, sizes, mask, bias, scale, softcap, sinks, q_start, k_start)


def scoring_of(
    problems: Problems,
    code: int | None,
    sizes: Shapes | None,
    mask: object,
    bias: object,
    scale: object,
    softcap: object,
    sinks: object,
    q_start: object,
    k_start: object,
) -> Scoring:
    checked_mask = None if mask is None else as_mask(problems, mask, sizes)
    checked_bias, bias_code = (None, FLOAT32) if bias is None else as_bias(problems, bias, sizes, code)
    start, first_key, placed = positions(problems, q_start, k_start, checked_mask, sizes)
    factor_of_products = as_scale(problems, scale, None if sizes is None else sizes.width, code)
    cap = 0.0 if softcap is None else as_softcap(problems, softcap, code)
    logits = None if sinks is None else as_sinks(problems, sinks, None if sizes is None else sizes.heads, code)
    program = None
    if checked_mask is not None and sizes is not None and not problems.count:
        program = checked_mask._program(sizes.leading, sizes.heads, sizes.queries, sizes.keys)
    return Scoring(
        factor_of_products, cap, checked_bias, bias_code, logits, start, first_key, program, checked_mask, placed
    )


def flag(problems: Problems, name: str, value: object) -> None:
    """True or False, and nothing that only behaves so."""
    if value is not True and value is not False:
        problems.type(name, describe(value), "True or False", f"{name}=True")


def as_threads(problems: Problems, value: object) -> int:
    expected = f"an int from 1 to {LARGEST_THREADS}"
    fix = "None takes the default"
    return integer(problems, "threads", value, least=1, most=LARGEST_THREADS, expected=expected, fix=fix) or 1


def chosen(problems: Problems, name: str, value: Any, size: int | None) -> NDArray[np.int64]:
    """Chosen indices of an axis, negative ones resolved; all of them for None."""
    if value is None:
        return np.arange(size or 0)
    fix = f"{name}=[0, -1], or None for all"
    indices = integers(problems, name, value, expected="a sequence or array of ints", fix=fix)
    if indices is None or size is None:
        return np.zeros(1, np.int64)
    if indices.ndim != 1:
        problems.value(name, f"shape {list(indices.shape)}", "one axis", fix)
    elif indices.size and not -size <= indices.min() <= indices.max() < size:
        problems.value(name, f"indices from {indices.min()} to {indices.max()}", f"-{size} to {size - 1}", fix)
    return np.where(indices < 0, indices + size, indices)


# Scores


def as_scale(problems: Problems, value: object, width: int | None, code: int | None) -> float:
    """The factor of q . k; 1/sqrt(d_k) for None."""
    if value is None:
        if width == 0:
            problems.value("scale", "None with d_k = 0", "a number, as 1/sqrt(0) is none", "scale=1.0")
        return 1.0 / math.sqrt(width) if width else 1.0
    return factor(problems, "scale", value, code, SCALE_FIX)


def factor(
    problems: Problems,
    name: str,
    value: object,
    code: int | None,
    fix: str,
    expected: str = "a finite real number",
) -> float:
    """A number that products are multiplied by, in the type of that code: one that would count as 0 is refused."""
    number = real(problems, name, value, expected=expected, fix=fix)
    if number is None:
        return 0.0
    least, most = (SMALLEST_FLOAT64, math.inf) if code == FLOAT64 else (SMALLEST_FLOAT32, LARGEST_FLOAT32)
    if number and not least <= abs(number) <= most:
        reason = f"{expected}, 0 or within the normal numbers of {NAMES[FLOAT64 if code == FLOAT64 else FLOAT32]}"
        problems.value(name, describe(value), reason, fix)
    return number


def as_softcap(problems: Problems, value: object, code: int | None) -> float:
    """The softcap."""
    expected = "a finite real number > 0"
    number = real(problems, "softcap", value, expected=expected, fix=SOFTCAP_FIX)
    if number is None:
        return 0.0
    if number <= 0 or (code != FLOAT64 and not SMALLEST_FLOAT32 <= number <= LARGEST_FLOAT32):
        problems.value("softcap", describe(value), expected, SOFTCAP_FIX)
    return number


def as_bias(problems: Problems, value: Any, sizes: Shapes | None, code: int | None) -> tuple[NDArray[Any] | None, int]:
    """The bias as the core takes it, which broadcasts it to the scores, and its type code."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "b":
        problems.type("bias", describe(value), "a float array that is added to the scores", "mask= (True = may attend)")
        return None, FLOAT32
    bias_code = float_code(problems, "bias", value)
    if bias_code is None:
        return None, FLOAT32
    if code is not None and bias_code not in (code, FLOAT32):
        expected = NAMES[code] if code == FLOAT32 else f"float32 or {NAMES[code]}, the type of q"
        problems.type("bias", describe(value), expected, "bias.astype(np.float32)")
    if sizes is None or not fits_scores(problems, "bias", value.shape, sizes):
        return None, FLOAT32
    return core_view(value, bias_code), bias_code


def fits_scores(problems: Problems, name: str, shape: tuple[int, ...], sizes: Shapes) -> bool:
    """Whether a shape has 2 axes or as many as q, and broadcasts to [..., Hq, N, M]."""
    scores = sizes.scores if max(sizes.axes) > 2 else sizes.scores[-2:]
    if shape == scores:
        return True
    expected = f"[N, M] = {list(scores[-2:])}, or as many axes as q, to broadcast to [..., Hq, N, M] = {list(scores)}"
    if len(shape) not in (2, *sizes.axes):
        fix = f"give it {max(sizes.axes)} axes"
        if len(shape) == 1:
            fix = f"{name}[None]"
        elif len(shape) == 3:
            fix = f"{name}[:, None] if axis 0 is the batch, {name}[None] if it is the heads"
        problems.value(name, f"shape {list(shape)}", expected, fix)
        return False
    if any(size not in (1, full) for size, full in zip(shape[::-1], scores[::-1], strict=False)):
        problems.value(
            name, f"shape {list(shape)}", expected, "axis -2 is queries, axis -1 keys; a size of 1 is spread"
        )
        return False
    return True


def as_sinks(problems: Problems, value: Any, heads: int | None, code: int | None) -> NDArray[np.float64] | None:
    """One logit a head, float64 [Hq]; every float type widens to it without loss. code: the type they count in."""
    if float_code(problems, "sinks", value) is None:
        return None
    if heads is not None and value.shape != (heads,):
        found = f"shape {list(value.shape)}"
        problems.value("sinks", found, f"[Hq] = [{heads}], one logit a head", f"np.full({heads}, logit) for all alike")
    sinks = np.ascontiguousarray(value, np.float64)
    if (sinks == np.inf).any():
        problems.value("sinks", "+inf", "numbers, or -inf for no sink", "a large finite logit")
    elif code != FLOAT64 and (np.isfinite(sinks) & (np.abs(sinks) > LARGEST_FLOAT32)).any():
        beyond = np.abs(sinks[np.isfinite(sinks)]).max()
        expected = f"numbers up to {LARGEST_FLOAT32:.3g} in magnitude unless q is float64, or -inf for no sink"
        problems.value("sinks", f"magnitudes up to {beyond:.3g}", expected, "-np.inf, or a float64 q, k and v")
    return sinks


# Masks and positions


def as_mask(problems: Problems, value: Any, sizes: Shapes | None) -> Mask | None:
    """The mask, with its arrays checked against the sizes of the call."""
    if isinstance(value, Mask):
        mask = value
    elif isinstance(value, np.ndarray) and value.dtype.kind == "b":
        if not plain_array(problems, "mask", value):
            return None
        mask = Dense._borrow(value)
    else:
        _report_mask(problems, value)
        return None
    if sizes is not None:
        for leaf in mask._leaves():
            if isinstance(leaf, Dense):
                fits_scores(problems, "mask", leaf.array.shape, sizes)
            elif isinstance(leaf, Lengths):
                _check_lengths(problems, leaf, sizes)
    return mask


def _report_mask(problems: Problems, value: Any) -> None:
    """Say what a mask of a wrong type probably was."""
    expected = "a softlookup mask, or a bool array (True = may attend)"
    fix = "softlookup.Causal(), Window, Lengths, Dense or Predicate, joined by & | ~"
    if isinstance(value, type) and issubclass(value, Mask):
        fix = f"an instance: softlookup.{value.__name__}(...)"
    elif isinstance(value, np.ndarray) and type(value) is np.ndarray:
        fix = "mask != 0 if non-zero means may attend"
        if value.dtype.kind not in "iu":
            fix = "bias= if it is added to the scores"
        if value.dtype.kind in "iuf" and bool(((value == 0) | (value == 1)).all()):
            fix = "mask.astype(bool) if 1 means may attend; bias= if it is added to the scores"
    elif not isinstance(value, (str, bool, int, float)):
        plain_array(problems, "mask", value, "dtype=bool")
        return
    problems.type("mask", describe(value), expected, fix)


def _check_lengths(problems: Problems, mask: Lengths, sizes: Shapes) -> None:
    for name, lengths, most, axis in (
        ("keys", mask.keys, sizes.keys, "M"),
        ("queries", mask.queries, sizes.queries, "N"),
    ):
        if not isinstance(lengths, np.ndarray):
            continue
        _fits_batch(problems, f"Lengths {name}", lengths, sizes)
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= most:
            found = f"lengths from {lengths.min()} to {lengths.max()}"
            problems.value(
                f"Lengths {name}", found, f"0 to {axis} = {most}", "count the valid ones of this call's arrays"
            )


def _fits_batch(problems: Problems, name: str, values: NDArray[np.int64], sizes: Shapes) -> bool:
    """Whether there is one value for all items, or values that broadcast to the batch axes."""
    if values.size == 1:
        return True
    try:
        fits = values.ndim <= len(sizes.leading)
        fits = fits and np.broadcast_shapes(values.shape, sizes.leading) == sizes.leading
    except ValueError:
        fits = False
    if not fits:
        expected = f"one, or ints that broadcast to the batch axes {list(sizes.leading)}"
        fix = "batch axes come before the heads: q[:, None] makes a batch of single heads from [B, N, d]"
        problems.value(name, f"shape {list(values.shape)}", expected, fix)
    return fits


def positions(
    problems: Problems, q_start: Any, k_start: Any, mask: Mask | None, sizes: Shapes | None
) -> tuple[Starts, int, bool]:
    """Where query row 0 of each item and key column 0 stand, and whether that is known."""
    first_key = integer(problems, "k_start", k_start, expected="an int within 2**60", fix="k_start=0") or 0
    if q_start is None:
        if sizes is None or (sizes.queries == sizes.keys and first_key == 0):
            return 0, first_key, True
        if mask is not None and mask._positional:
            last = first_key + sizes.keys - sizes.queries
            found = f"None with N = {sizes.queries}, M = {sizes.keys}, k_start = {first_key} and {mask!r}"
            expected = "the position of query row 0, as this mask uses positions"
            fix = f'q_start="upper_left" ({first_key}), q_start="lower_right" ({last}), or an int or int array'
            problems.value("q_start", found, expected, fix)
        return 0, first_key, False
    if isinstance(q_start, str):
        if q_start not in ("upper_left", "lower_right"):
            fix = '"upper_left" (k_start) or "lower_right" (k_start + M - N)'
            problems.value("q_start", repr(q_start), "an alignment, an int or an int array", fix)
        shift = 0 if sizes is None or q_start == "upper_left" else sizes.keys - sizes.queries
        return first_key + shift, first_key, True
    if type(q_start) is int and -LARGEST_POSITION <= q_start <= LARGEST_POSITION:
        return q_start, first_key, True
    starts = integers(
        problems, "q_start", q_start, expected="an int or int array over the batch axes", fix="pass positions as ints"
    )
    if starts is None or sizes is None or not _fits_batch(problems, "q_start", starts, sizes):
        return 0, first_key, True
    return per_item(starts, sizes.leading), first_key, True
